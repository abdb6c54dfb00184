"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const { charts } = drawing;
  const items = (lines) => lines.map((text) => Object.assign(document.createElement("li"), { textContent: text }));

  function say(text, lost = false) {
    at("state").textContent = text;
    at("state").classList.toggle("missing", lost);
  }

  // ---- each second: where the runs stand
  const make = (name, ...children) => {
    const element = document.createElement(name);
    element.append(...children);
    return element;
  };
  const title = document.title, finished = (runs) => runs.length > 0 && runs.every((run) => run.finished);
  let states = [], final = "", drawn = false;

  function spark(losses) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    const low = Math.min(...losses), span = Math.max(...losses) - low || 1;
    line.setAttribute("points", losses.map((v, i) => `${2 + 96 * i / Math.max(losses.length - 1, 1)},${18 - 16 * (v - low) / span}`).join(" "));
    svg.setAttribute("class", "spark");
    svg.setAttribute("viewBox", "0 0 100 20");
    svg.setAttribute("aria-hidden", "true");
    svg.append(line);
    return svg;
  }

  function progress({ runs, errors, left_out }) {
    states = runs;
    const more = left_out ? ` ${left_out} further runs are not shown.` : "";
    if (!final) say((!runs.length ? "Waiting for a run to begin."
      : drawn ? "Connected." : "Reading the run; the report comes after its first measurement.") + more);
    at("runs").replaceChildren(...runs.map((run) =>
      make("tr", make("th", run.name), make("td", spark(run.losses)), make("td", run.facts))));
    at("errors").replaceChildren(...items(errors));
    at("errors").hidden = !errors.length;
    const shares = runs.map((run) => (run.finished ? 1 : run.share)).filter((share) => share !== null);
    const words = finished(runs) ? "Finished" : shares.length ? `${Math.floor(100 * Math.min(...shares))}%` : runs[0]?.facts.split(",")[0];
    document.title = words ? `${words}: ${title}` : title;
  }

  // ---- the end: the whole report came with the last message, and needs no server
  function end(html) {
    if (final) URL.revokeObjectURL(final);
    final = URL.createObjectURL(new Blob([html], { type: "text/html" }));
    const link = make("a", "open report");
    Object.assign(link, { href: final, target: "_blank", rel: "noopener" });
    at("state").replaceChildren("Finished: ", link, ". This page needs the server no longer.");
    at("state").classList.remove("missing");
    at("state").classList.add("finished");
    document.title = `Finished: ${title}`;
    if (at("runs").children.length < 2) source.close();
  }

  // ---- a new report: what was opened, switched off, zoomed or focused stays so
  function controls() { // [key, element]: the element's place below the nearest id
    const counts = {};
    return [...at("report").querySelectorAll("details, summary, .legend button")].map((one) => {
      const key = `${one.closest("[id]").id} ${one.tagName}`;
      counts[key] = (counts[key] ?? 0) + 1;
      return [`${key} ${counts[key]}`, one];
    });
  }

  function report({ html, blocks, several, page: whole }) {
    const before = new Map(controls().map(([key, one]) => [key, [one.open, one.ariaPressed, one === document.activeElement]]));
    const zooms = new Map(charts.map(({ box, zoom }) => [box.id, zoom]));
    page.clear();
    document.body.className = several ? "live several" : "live single";
    at("report").innerHTML = html; // everything from a run is escaped in it
    for (const [key, control] of controls()) {
      const [open, pressed, focused] = before.get(key) ?? [];
      if (open) control.open = true;
      if (pressed) control.ariaPressed = pressed;
      if (focused) control.focus({ preventScroll: true });
    }
    page.show(at("report"), blocks, zooms);
    drawn = true;
    if (!final) say("Connected.");
    if (whole) end(whole);
  }

  // ---- the connection, which the browser opens again where it breaks
  const source = new EventSource(`events${location.search}`);
  source.addEventListener("progress", ({ data }) => progress(JSON.parse(data)));
  source.addEventListener("report", ({ data }) => report(JSON.parse(data)));
  source.addEventListener("error", () => final && finished(states) ? source.close() : say("The server does not answer: it has ended, or the connection is lost. "
    + "The page shows what arrived and tries again.", true));
})();
