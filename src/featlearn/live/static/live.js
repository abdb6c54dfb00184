"use strict";
(() => {
  const { build, refresh, remove, short } = drawing;
  const { matrixSequence, stepsOf } = matrices;
  // drawn before all others, in this order; numbers of the user's own, without /, come after the losses
  const FIRST = ["loss", "probe/loss", "test/loss", "probe/accuracy", "test/accuracy", "gap/probe", "gap/test",
    "ntk/alignment", "ntk/centered_alignment", "ntk/norm", "ntk/distance", "ntk/effective_rank", "weights/distance"];
  const MOST = 800; // points of a curve that the page keeps
  const at = (id) => document.getElementById(id);
  const runs = new Map(); // key -> { index, facts, error, curves: Map of name -> { x, y }, card }
  const figures = new Map(); // name of a scalar -> { box, block, chart }
  const stale = new Set(); // names to be drawn again
  const make = (name, properties = {}, ...content) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...content);
    return made;
  };

  // ---- what arrives
  function receive(message) {
    if (message.whole) for (const run of runs.values()) run.curves.clear();
    for (const news of message.runs) {
      const run = runs.get(news.run) ?? added(news.run);
      if (news.curves) replace(run, news.curves);
      for (const [step, values] of news.lines ?? [])
        for (const [name, value] of Object.entries(values)) add(run, name, step, value);
      if (news.facts) run.facts = news.facts;
      if (news.error !== undefined) run.error = news.error;
      describe(run);
      if (news.verdict) judge(run, news.verdict);
      if (news.pictures && runs.size === 1) picture(news.pictures);
    }
    const more = message.left_out ? ` ${message.left_out} further runs are not shown.` : "";
    tell(runs.size ? `Connected.${more}` : "Connected. There is no run here yet.");
    requestAnimationFrame(draw);
  }

  function added(key) {
    const card = make("div", { className: "card" }, make("h3"), make("p", { className: "facts" }),
      make("p", { className: "trouble", hidden: true }), make("div", { className: "judged" }));
    const run = { index: runs.size, facts: { name: key }, error: "", curves: new Map(), card };
    card.querySelector(".judged").append(make("p", { className: "note", textContent: "The first verdict takes a few seconds." }));
    at("runs").append(card);
    runs.set(key, run);
    return run;
  }

  function replace(run, curves) {
    for (const name of run.curves.keys()) stale.add(name);
    run.curves = new Map(Object.entries(curves).map(([name, [x, y]]) => [name, { x: [...x], y: [...y] }]));
    for (const name of run.curves.keys()) stale.add(name);
  }

  // of numbers repeated at one step the last counts
  function add(run, name, step, value) {
    if (!run.curves.has(name)) run.curves.set(name, { x: [], y: [] });
    const { x, y } = run.curves.get(name);
    let place = x.length;
    while (place > 0 && x[place - 1] >= step) place--;
    const same = x[place] === step ? 1 : 0;
    x.splice(place, same, step);
    y.splice(place, same, value);
    if (x.length > MOST) { // every other point of the older three quarters
      const kept = (_, i) => i > 0.75 * MOST || i % 2 === 0;
      run.curves.set(name, { x: x.filter(kept), y: y.filter(kept) });
    }
    stale.add(name);
  }

  // ---- where a run stands
  const duration = (s) => s < 90 ? `${short(Number(s.toPrecision(2)))} s` : s < 5400 ? `${Math.round(s / 60)} min`
    : `${Math.round(s / 360) / 10} h`;
  const percent = (share) => share < 2 ? `${Number((100 * share).toPrecision(2))} %` : `${Number(share.toPrecision(2))} times`;

  function describe({ index, facts, error, card, judged }) {
    const { name, step, steps, seconds, left, budget, spent, finished } = facts;
    const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    line.setAttribute("class", `swatch c${index % 8}`);
    for (const [key, value] of Object.entries({ width: 24, height: 8, "aria-hidden": "true" })) line.setAttribute(key, value);
    const stroke = document.createElementNS("http://www.w3.org/2000/svg", "path");
    stroke.setAttribute("d", "M0 4H24");
    line.append(stroke);
    card.querySelector("h3").replaceChildren(line, name);
    const known = (value) => value !== null && value !== undefined;
    const allowed = known(budget) ? `, the budget is ${percent(budget)}` : "";
    card.querySelector(".facts").textContent = [
      known(step) ? `step ${step}${known(steps) ? ` of ${steps}` : ""}` : "no measurement yet",
      known(seconds) && `${duration(seconds)} of training`,
      known(spent) && `measuring took ${finished ? "" : "about "}${percent(spent)} ${spent < 2 ? "of it" : "as long"}${allowed}`,
      finished ? "finished" : known(left) && `about ${duration(left)} left`,
      facts.left_out > 0 && `${facts.left_out} further numbers are not shown`,
    ].filter(Boolean).join(" · ");
    const soFar = card.querySelector(".so-far");
    if (soFar) soFar.hidden = finished && judged >= step;
    const trouble = card.querySelector(".trouble");
    trouble.textContent = error;
    trouble.hidden = !error;
  }

  // ---- the verdict and the pictures: HTML of the server, in which everything from a run is escaped
  let drawn = []; // charts of the pictures
  let released = []; // what ends that matrices follow the step
  let pictured = []; // steps of both
  function judge(run, verdict) {
    const judged = card(run, ".judged");
    judged.innerHTML = verdict.html;
    run.judged = verdict.step;
    judged.append(make("p", { className: "note so-far", textContent: `From the first ${short(verdict.step)} steps; it may still change.` }));
    describe(run);
  }

  function picture({ html, blocks }) {
    const place = at("pictures");
    const before = controls(place).map((one) => [one.open, one.ariaPressed, one === document.activeElement]);
    const zooms = new Map(drawn.map(({ box, zoom }) => [box.id, zoom]));
    drawn.forEach(remove);
    released.forEach((release) => release());
    place.innerHTML = html;
    // what was opened, switched off or focused stays so, unless there are other pictures now
    const restored = controls(place);
    if (restored.length === before.length) restored.forEach((one, i) => {
      [one.open, one.ariaPressed] = before[i];
      if (before[i][2]) one.focus({ preventScroll: true });
    });
    const charts = blocks.filter((block) => block.kind === "chart");
    drawn = charts.map((block) => build(at(`chart-${block.key}`), block, zooms.get(`chart-${block.key}`)));
    released = blocks.filter((block) => !charts.includes(block))
      .map((block) => matrixSequence(at(`figure-${block.key}`), block));
    pictured = blocks.flatMap(stepsOf);
    copying.tables(place);
  }
  const card = (run, selector) => run.card.querySelector(selector);
  const controls = (place) => [...place.querySelectorAll("details, summary, .legend button")];

  // ---- curves
  function draw() {
    const names = new Set([...runs.values()].flatMap((run) => [...run.curves.keys()]));
    for (const name of [...stale].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1))) {
      if (name.endsWith("_error") && names.has(name.slice(0, -6))) {
        stale.delete(name);
        continue;
      }
      const figure = figures.get(name) ?? framed(name);
      if (figure.box.closest("details:not([open])")) continue; // drawn when it is opened
      stale.delete(name);
      show(figure, name);
    }
    stepping.extend([...pictured, ...[...runs.values()].flatMap(({ curves }) => longest([...curves.values()]))]);
  }

  // the steps of the curve that has most of them up to the newest
  const longest = (curves) => curves.reduce((best, { x }) =>
    x.at(-1) > (best.at(-1) ?? -1) || (x.at(-1) === best.at(-1) && x.length > best.length) ? x : best, []);

  const rank = (name) => FIRST.includes(name) ? FIRST.indexOf(name) : name === "lr" ? 99 : name.includes("/") ? 100 : 2.5;

  function framed(name) {
    const box = make("div", { className: "chart" });
    const figure = make("figure", { id: `curve-${name}` }, make("figcaption", {}, make("h3", { textContent: name })), make("p", { className: "note latest" }),
      box, make("p", { className: "readout" }));
    box.setAttribute("role", "img");
    const home = at(rank(name) < 100 ? "first" : "others");
    if (home.id === "others") at("rest").hidden = false;
    const next = [...home.children].find((other) => rank(other.id.slice(6)) > rank(name));
    home.insertBefore(figure, next ?? null);
    const made = { box, block: null, chart: null, form: "" };
    figures.set(name, made);
    return made;
  }

  function lines(name) {
    const shown = [...runs.values()].filter((run) => run.curves.has(name));
    const x = [...new Set(shown.flatMap((run) => run.curves.get(name).x))].sort((a, b) => a - b);
    const aligned = (curve) => {
      const values = new Map(curve.x.map((step, i) => [step, curve.y[i]]));
      return x.map((step) => values.get(step) ?? null);
    };
    return { x, lines: shown.map((run) => {
      const y = aligned(run.curves.get(name));
      const error = run.curves.get(`${name}_error`);
      const errors = error && aligned(error);
      const bar = (sign) => y.map((v, i) => (v === null || errors[i] === null ? null : v + 2 * sign * errors[i]));
      return { label: run.facts.name, color: run.index % 8, dash: 0, y, group: run.index, kind: "",
               ...(errors ? { low: bar(-1), high: bar(1), error: errors } : {}) };
    }) };
  }

  function show(figure, name) {
    const found = lines(name);
    const values = found.lines.flatMap((line) => line.y).filter((v) => v !== null);
    const wide = values.length > 2 && Math.min(...values) > 0 && Math.max(...values) > 30 * Math.min(...values);
    const form = `${found.lines.map((line) => `${line.color}${"low" in line}`)} ${wide} ${Math.min(values.length, 3)}`;
    if (form !== figure.form) { // other lines or another axis
      const zoom = figure.chart?.zoom;
      if (figure.chart) remove(figure.chart);
      figure.block = { ...found, kind: "chart", xAxis: "steps", xLabel: "step", yLabel: "", yAxis: wide ? "log" : "linear",
                       marks: [], windows: [], levels: [] };
      figure.chart = build(figure.box, figure.block, zoom);
      figure.form = form;
    } else {
      Object.assign(figure.block, found);
      refresh(figure.chart);
    }
    const latest = found.lines.map((line) => `${line.label} ${short(line.y.findLast((v) => v !== null))}`).join(", ");
    figure.box.setAttribute("aria-label", `${name}, latest: ${latest}`);
    figure.box.dataset.points = values.length;
    figure.box.parentElement.querySelector(".latest").textContent = runs.size > 1 ? latest : short(found.lines[0].y.findLast((v) => v !== null));
  }

  at("rest").addEventListener("toggle", draw);

  // ---- the connection; it is opened again by the browser where it breaks
  function tell(words, lost = false) {
    at("state").textContent = words;
    at("state").classList.toggle("lost", lost);
  }
  const source = new EventSource(`events${location.search}`);
  source.addEventListener("message", (event) => receive(JSON.parse(event.data)));
  source.addEventListener("error", () => tell("The server does not answer: it has ended, or the connection is lost. "
    + "What is shown is what arrived; trying again.", true));
})();
