/** The network beside the theory: a worker made from scripts of this page, its buttons, and its points. */
import { element } from "./elements.mjs";

/** @returns {Worker} from a Blob: a page on disk has no other file to load */
function worker() {
  const parts = ["shared", "worker"].map((id) => document.getElementById(id).textContent);
  const address = URL.createObjectURL(new Blob(parts, { type: "text/javascript" }));
  const made = new Worker(address);
  URL.revokeObjectURL(address);
  return made;
}

const OVERSHOT = "The steps overshoot: this learning rate is too large. The theory is gradient flow, which has no steps.";

export class Experiment {
  /** @param {() => void} drawn called when points have arrived @param {(values: object) => void} set @param {() => void} reseeded */
  constructor(drawn, set, reseeded) {
    this.drawn = drawn;
    this.id = 0;
    this.points = new Map();
    this.over = false;
    this.running = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.toggle = element("button", { type: "button", class: "main", onclick: () => this.run(!this.running || this.over) });
    this.status = element("p", { class: "status", role: "status" });
    this.said = element("p", { class: "note" });
    this.suggested = null;
    this.follow = element("button", { type: "button", hidden: true, onclick: () => set(this.suggested.set) }, "Set the theory to the network");
    const button = (label, act, title) => element("button", { type: "button", title, onclick: act }, label);
    this.buttons = element("div", { class: "buttons", role: "group", "aria-label": "Training of the network" }, this.toggle,
      button("Step", () => this.single(), "One step of gradient descent (key: s)"),
      button("Restart", () => this.restart(), "Start again from the same weights (key: r)"),
      button("Other seed", reseeded, "Draw other weights (key: n)"));
  }

  /** @param {string} topic @param {object} setting */
  start(topic, setting) {
    this.topic = topic;
    this.setting = setting;
    this.restart();
  }

  restart() {
    clearTimeout(this.later);
    this.id += 1;
    this.points = new Map();
    this.over = false;
    if (!this.worker) this.connect();
    this.worker?.postMessage({ start: this.setting, topic: this.topic, id: this.id, running: this.running });
    this.label();
  }

  /** Where workers are forbidden the theory still moves. */
  connect() {
    try {
      this.worker = worker();
    } catch (error) {
      this.status.textContent = `No network can train here: ${error.message}`;
      return;
    }
    this.worker.onmessage = ({ data }) => this.receive(data);
    this.worker.onerror = (event) => { this.status.textContent = `The network stopped: ${event.message}`; };
  }

  /** A network that is changed by a slider starts when the slider rests. */
  startSoon(topic, setting) {
    this.topic = topic;
    this.setting = setting;
    clearTimeout(this.later);
    this.worker?.postMessage({ running: false });
    this.later = setTimeout(() => this.restart(), 120);
  }

  run(running) {
    if (running && this.over) {
      this.running = true;
      this.restart();
      return;
    }
    this.running = running;
    this.worker?.postMessage({ running });
    this.label();
  }

  single() {
    this.running = false;
    this.worker?.postMessage({ single: true });
    this.label();
  }

  receive(data) {
    if (data.id !== this.id) return;
    for (const { chart, series, x, y, error = 0, replace = false, fresh = false } of data.points) {
      const key = `${chart}/${series}`;
      if (fresh || !this.points.has(key)) this.points.set(key, { x: [], y: [], error: [] });
      const kept = this.points.get(key), place = replace ? kept.x.indexOf(x) : -1;
      if (place >= 0) [kept.y[place], kept.error[place]] = [y, error];
      else { kept.x.push(x); kept.y.push(y); kept.error.push(error); }
    }
    this.over = data.over;
    const state = data.failed ? "diverged" : data.over ? "done" : this.running ? "training" : "paused";
    this.status.textContent = `${data.step} steps, ${data.parameters.toLocaleString("en")} parameters: ${state}`;
    this.status.className = `status ${state}`;
    this.said.textContent = data.failed ? OVERSHOT : data.said;
    this.suggested = data.suggested;
    this.follow.hidden = !data.suggested;
    if (data.suggested) this.follow.textContent = data.suggested.label;
    this.label();
    this.drawn();
  }

  label() {
    this.toggle.textContent = this.over ? "Train again" : this.running ? "Pause" : "Train";
  }

  /** Points of one chart. @param {string} chart @returns {import("./chart.mjs").Points} */
  of(chart) {
    const found = new Map();
    for (const [key, points] of this.points) {
      const [name, series] = key.split("/");
      if (name === chart) found.set(Number(series), points);
    }
    return found;
  }
}
