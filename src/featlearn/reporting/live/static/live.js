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
  function progress({ runs, errors, left_out }) {
    const more = left_out ? ` ${left_out} further runs are not shown.` : "";
    say(runs.length ? `Connected.${more}` : `Connected. There is no run here yet.${more}`);
    at("runs").replaceChildren(...items(runs));
    at("errors").replaceChildren(...items(errors));
    at("errors").hidden = !errors.length;
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

  function report({ html, blocks, several }) {
    const before = new Map(controls().map(([key, one]) => [key, [one.open, one.ariaPressed, one === document.activeElement]]));
    const zooms = new Map(charts.map(({ box, zoom }) => [box.id, zoom]));
    page.clear();
    document.body.className = several ? "several" : "single";
    at("report").innerHTML = html; // everything from a run is escaped in it
    for (const [key, control] of controls()) {
      const [open, pressed, focused] = before.get(key) ?? [];
      if (open) control.open = true;
      if (pressed) control.ariaPressed = pressed;
      if (focused) control.focus({ preventScroll: true });
    }
    page.show(at("report"), blocks, zooms);
  }

  // ---- the connection, which the browser opens again where it breaks
  const source = new EventSource(`events${location.search}`);
  source.addEventListener("progress", ({ data }) => progress(JSON.parse(data)));
  source.addEventListener("report", ({ data }) => report(JSON.parse(data)));
  source.addEventListener("error", () => say("The server does not answer: it has ended, or the connection is lost. "
    + "The page shows what arrived and tries again.", true));
})();
