/** The page: one question at a time, its picture, its sliders, its network, its formula. */
import { mathematics } from "../mathematics/index.mjs";
import { TOPICS } from "../topics/index.mjs";
import { Chart, forgetColors } from "./chart.mjs";
import { ControlView } from "./controls.mjs";
import { element } from "./elements.mjs";
import { Experiment } from "./experiment.mjs";
import { fragment, read } from "./fragment.mjs";
import { LAZY, LazyOrRich } from "./lazy.mjs";

const QUESTIONS = { lazy: LAZY, ...TOPICS };
const CONTROLS = Object.fromEntries(
  Object.values(QUESTIONS).map((topic) => [topic.key, [...topic.controls, ...topic.networkControls]]));
const initial = (key) => Object.fromEntries(CONTROLS[key].map((control) => [control.key, control.value]));

/** What is shown. */
const shown = { topic: null, state: {}, charts: [], views: {}, extra: null, theory: null, lazy: null };
let asked = false, addressed = 0, coded = 0;

const experiment = new Experiment(() => draw(), (values) => set(values), () => set({ seed: shown.state.seed + 1 }));

/** Change values; the picture follows in the next frame, the network when the slider rests. */
function set(values, { soon = false } = {}) {
  Object.assign(shown.state, values);
  for (const [key, value] of Object.entries(values)) shown.views[key]?.set(value);
  shown.theory = null;
  draw();
  experiment[soon ? "startSoon" : "start"](shown.topic.key, shown.topic.experiment(shown.state));
  clearTimeout(addressed);
  addressed = setTimeout(() => history.replaceState(null, "", address()), 250);
}

function address() {
  return fragment(shown.topic.key, CONTROLS[shown.topic.key], shown.state);
}

/** At most once a frame. */
function draw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    const { topic, state } = shown;
    if (topic === LAZY) return;
    shown.theory ??= topic.theory(state);
    for (const chart of shown.charts) chart.draw(shown.theory.charts[chart.spec.key], experiment.of(chart.spec.key));
    shown.said.innerHTML = shown.theory.said;
    shown.extra?.draw(state);
    clearTimeout(coded);
    coded = setTimeout(() => { shown.code.textContent = shown.topic.python(shown.state); }, 100);
  });
}

/** Question 0 has neurons in a plane, and no theory. */
function openLazy() {
  const changed = (scale) => {
    shown.state.scale = scale;
    clearTimeout(addressed);
    addressed = setTimeout(() => history.replaceState(null, "", address()), 250);
  };
  clearTimeout(coded);
  experiment.worker?.postMessage({ running: false }); // the next question trains on arrival as before
  shown.lazy = new LazyOrRich(shown.state.scale, changed);
  document.getElementById("topic").replaceChildren(element("h2", {}, LAZY.question), element("p", { class: "lead" },
    "Eight neurons learn to tell two classes apart. Multiply their output by a large number, and they fit the data without moving: lazy. By a small one, and they must turn to the task: rich."),
  shown.lazy.box);
}

/** @param {string} key @param {Record<string, any>} given values that differ from the first ones */
function open(key, given = {}) {
  shown.lazy?.stop();
  const topic = QUESTIONS[key];
  Object.assign(shown, { topic, state: { ...initial(key), ...given }, theory: null, views: {}, charts: [], lazy: null });
  if (topic === LAZY) openLazy();
  else openTheory(topic);
  const links = /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("#topics a"));
  links.forEach((link) => {
    link.removeAttribute("aria-current");
    if (link.dataset.topic !== key) return;
    link.setAttribute("aria-current", "page");
    link.scrollIntoView({ block: "nearest", inline: "center" }); // on a phone they are one row
  });
  document.title = `${topic.question} featlearn explore`;
  history.replaceState(null, "", address());
}

function openTheory(topic) {
  shown.charts = topic.charts.map((spec) => new Chart(spec));
  shown.said = element("p", { class: "said", "aria-live": "polite" });
  shown.code = element("code");
  shown.extra = topic.extra?.(set) ?? null;
  document.getElementById("topic").replaceChildren(...content(topic));
  draw();
  experiment.start(topic.key, topic.experiment(shown.state));
}

function content(topic) {
  const view = (control) => {
    const changed = (value) => set({ [control.key]: value }, { soon: true });
    const made = new ControlView(control, shown.state[control.key], changed);
    shown.views[control.key] = made;
    return made.box;
  };
  const examples = topic.examples.map(({ label, set: values, say }) => element("button", {
    type: "button", title: say, onclick: () => { set({ ...initial(topic.key), ...values }); remark.textContent = say; },
  }, label));
  const remark = element("p", { class: "remark", role: "status" });
  return [
    element("h2", {}, topic.question),
    element("p", { class: "lead", html: topic.lead }),
    element("div", { class: "examples" }, element("span", {}, "Try:"), ...examples), remark, shown.said,
    element("div", { class: "stage" },
      element("section", { class: "panel", "aria-label": "Settings" },
        element("h3", {}, "Theory"), ...topic.controls.map(view),
        element("h3", {}, "Network in this page"), ...topic.networkControls.map(view),
        experiment.buttons, experiment.status, experiment.said,
        element("div", { class: "buttons" }, experiment.follow)),
      element("div", { class: "charts" }, ...(shown.extra ? [shown.extra.figure] : []), ...shown.charts.map((c) => c.figure))),
    element("div", { class: "below" },
      element("section", { class: "formula" }, element("h3", {}, "The formula"), element("div", { html: topic.formula })),
      element("section", { class: "fails" }, element("h3", {}, "Where it fails"), element("div", { html: topic.fails })),
      element("section", { class: "code" }, element("h3", {}, "The same in Python"),
        element("div", { class: "buttons" }, copier("Copy Python", () => topic.python(shown.state)),
          copier("Copy link", () => `${location.href.split("#")[0]}${address()}`)),
        element("pre", { tabindex: 0 }, shown.code))),
  ];
}

function copier(label, text) {
  const button = element("button", { type: "button" }, label);
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Select it and press Ctrl C";
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

/** By the clipboard, or by a selection where that is not allowed. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const topic = /^\d$/.test(event.key) && Object.keys(QUESTIONS)[Number(event.key)];
  const acts = shown.lazy ? { p: () => shown.lazy.run(!shown.lazy.running || shown.lazy.over), r: () => shown.lazy.restart() } : {
    p: () => experiment.run(!experiment.running || experiment.over), s: () => experiment.single(),
    r: () => experiment.restart(), n: () => set({ seed: shown.state.seed + 1 }),
  };
  if (topic) open(topic);
  else if (acts[event.key]) acts[event.key]();
  else return;
  event.preventDefault();
}

function begin() {
  const nav = document.getElementById("topics");
  const link = ({ key, question }, i) => element("a", {
    href: `#${key}`, "data-topic": key, title: `key: ${i}`, onclick: (event) => { event.preventDefault(); open(key); },
  }, question);
  nav.append(element("ol", {}, ...Object.values(QUESTIONS).map((topic, i) => element("li", {}, link(topic, i)))));
  const follow = () => {
    const found = read(location.hash, CONTROLS);
    open(found?.topic ?? LAZY.key, found?.state);
  };
  window.addEventListener("hashchange", () => { if (location.hash !== address()) follow(); });
  window.addEventListener("keydown", keys);
  new ResizeObserver(() => shown.charts.forEach((chart) => chart.resize())).observe(document.getElementById("topic"));
  const repaint = () => {
    forgetColors();
    shown.lazy?.draw();
    for (const chart of shown.charts) { chart.resize(); chart.plot?.redraw(); }
  };
  const printing = (on) => () => { document.documentElement.classList.toggle("print", on); repaint(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  window.addEventListener("beforeprint", printing(true));
  window.addEventListener("afterprint", printing(false));
  if (location.search === "?embed") document.documentElement.classList.add("embedded");
  follow();
  document.documentElement.classList.add("drawn");
}

/** For tests, and for the console. */
export const explorer = { mathematics, topics: TOPICS, questions: QUESTIONS, shown, experiment, set, open, initial };
globalThis.explorer = explorer;
begin();
