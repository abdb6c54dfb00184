/** Question 0: the same network, trained with two output scales, turns its neurons or leaves them. */
import { ScaledNetwork, clouds, cosines } from "../networks/scaled.mjs";
import { element, written } from "./elements.mjs";

const STEPS = 400, STEPS_PER_FRAME = 3, SAMPLES = 40, REACH = 1.7, CELLS = 48;
/** Largest mean angle, in degrees, by which neurons of a lazy network turn. */
const STILL = 10;
const WIDE = { dimension: 20, width: 24, samples: 200, steps: 400 };
const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

export const LAZY = {
  key: "lazy", question: "Lazy or rich?",
  controls: [{ key: "scale", label: "Output scale", min: 0.05, max: 30, log: true, value: 0.1 }], networkControls: [],
};

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class LazyOrRich {
  /** @param {number} scale @param {(scale: number) => void} changed */
  constructor(scale, changed) {
    this.scale = scale;
    this.seed = 1;
    this.data = clouds(SAMPLES, 2, 5);
    this.running = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    const button = (label, act, attributes = {}) => element("button", { type: "button", onclick: act, ...attributes }, label);
    this.toggle = button("Pause", () => this.run(!this.running || this.over), { class: "main" });
    this.slider = element("input", {
      id: "control-scale", type: "range", min: 0, max: 100, "aria-label": "Output scale, from rich to lazy",
      oninput: () => { this.set(Number((0.05 * 600 ** (Number(this.slider.value) / 100)).toPrecision(2))); changed(this.scale); },
    });
    this.output = element("output", { for: "control-scale" });
    this.said = element("p", { class: "said", role: "status" });
    this.plane = element("canvas", { width: 384, height: 384, role: "img" });
    [this.before, this.now] = ["at the start", "now"].map((when) =>
      element("canvas", { width: SAMPLES, height: SAMPLES, role: "img", "aria-label": `tangent kernel ${when}, samples sorted by class` }));
    this.wide = element("p", { class: "wide", role: "status" });
    this.more = button("The same on 20 dimensions", () => this.test());
    const figure = (title, canvas, note) => element("figure", {}, element("h3", {}, title), canvas, element("p", { class: "note" }, note));
    this.box = element("div", { class: "lazy" },
      element("div", { class: "buttons", role: "group", "aria-label": "Training" }, this.toggle,
        button("Other start", () => { this.seed += 1; this.restart(); }),
        element("label", { class: "scale-slider" }, "rich", this.slider, "lazy"), this.output),
      this.said,
      element("div", { class: "lazy-figures" },
        figure("The plane", this.plane, "Dots: samples of two classes. Shading: what the network answers. Lines: where each of its eight neurons switches on; dashed, at the start."),
        figure("Kernel at the start", this.before, "Bright: training on one sample moves the other. Sorted by class."),
        figure("Kernel now", this.now, "Squares: the network treats samples of a class alike.")),
      element("div", { class: "buttons" }, this.more), this.wide);
    this.set(scale);
  }

  /** @param {number} scale */
  set(scale) {
    this.scale = scale;
    this.slider.value = String(Math.round(100 * Math.log(scale / 0.05) / Math.log(600)));
    this.output.textContent = `output scale ${written(scale, 2)}`;
    this.slider.setAttribute("aria-valuetext", this.output.textContent);
    this.restart();
  }

  restart() {
    this.network = new ScaledNetwork({ scale: this.scale, width: 8, dimension: 2, seed: this.seed });
    this.loss = 1;
    this.over = false;
    this.wide.textContent = "";
    this.wideTask = 0;
    this.paint(this.before, cosines(this.network.kernel(this.data.x)));
    this.draw();
    this.run(this.running);
  }

  run(running) {
    if (running && this.over) { this.running = true; this.restart(); return; }
    this.running = running;
    this.label();
    if (running && !this.asked) this.asked = requestAnimationFrame(() => this.frame());
  }

  stop() {
    cancelAnimationFrame(this.asked);
    this.asked = this.wideTask = 0;
    this.stopped = true;
  }

  label() {
    this.toggle.textContent = this.over ? "Train again" : this.running ? "Pause" : "Train";
  }

  frame() {
    this.asked = 0;
    if (!this.running || this.stopped) return;
    for (let i = 0; i < STEPS_PER_FRAME; i++) this.loss = this.network.step(this.data);
    this.over = this.network.steps >= STEPS;
    this.draw();
    if (this.over) this.label();
    else this.run(true);
  }

  draw() {
    const { network, loss } = this, turned = network.turned(), fits = loss < 0.3;
    this.paint(this.now, cosines(network.kernel(this.data.x)));
    this.drawPlane();
    const angle = `${turned.toFixed(turned < 10 ? 1 : 0)}°`;
    const verdict = !fits ? `Its lines have turned by ${angle} so far.`
      : turned < STILL ? `<strong class="lazy-word">Lazy.</strong> It fits the data, and its lines turned by ${angle}: it only reweights the features it began with.`
        : `<strong class="rich-word">Rich.</strong> It fits the data, and its lines turned by ${angle}, toward the boundary: it learned features.`;
    this.said.innerHTML = `Step ${network.steps}, loss ${loss.toFixed(2)}. ${verdict}`;
    this.plane.setAttribute("aria-label", `Step ${network.steps}: eight lines, turned by ${angle} on average`);
  }

  drawPlane() {
    const { plane, network, data } = this, ctx = plane.getContext("2d"), size = plane.width, cell = size / CELLS;
    const to = (v) => (v / REACH + 1) * size / 2;
    ctx.fillStyle = color("--paper");
    ctx.fillRect(0, 0, size, size);
    for (let i = 0; i < CELLS; i++) {
      for (let j = 0; j < CELLS; j++) {
        const value = network.output([((i + 0.5) / CELLS * 2 - 1) * REACH, ((j + 0.5) / CELLS * 2 - 1) * REACH]);
        ctx.globalAlpha = 0.45 * Math.min(Math.abs(value), 1);
        ctx.fillStyle = color(value > 0 ? "--c1" : "--c0");
        ctx.fillRect(i * cell, size - (j + 1) * cell, cell, cell);
      }
    }
    const lines = (rows, width, dash, name, alpha) => {
      ctx.lineWidth = width;
      ctx.setLineDash(dash);
      ctx.strokeStyle = color(name);
      ctx.globalAlpha = alpha;
      for (const [a, b, c] of rows) {
        const length = Math.hypot(a, b) || 1, x = -c * a / length ** 2, y = -c * b / length ** 2, far = 4 * REACH;
        ctx.beginPath();
        ctx.moveTo(to(x - far * b / length), size - to(y + far * a / length));
        ctx.lineTo(to(x + far * b / length), size - to(y - far * a / length));
        ctx.stroke();
      }
    };
    lines(network.first.w, 1, [4, 4], "--soft", 0.7);
    lines(network.w, 2, [], "--ink", 0.9);
    ctx.setLineDash([]);
    ctx.globalAlpha = 1;
    data.x.forEach(([x, y], i) => {
      ctx.beginPath();
      ctx.arc(to(x), size - to(y), 5, 0, 2 * Math.PI);
      ctx.fillStyle = color(data.y[i] > 0 ? "--c1" : "--c0");
      ctx.fill();
      ctx.lineWidth = 1.5;
      ctx.strokeStyle = color("--paper");
      ctx.stroke();
    });
  }

  /** @param {HTMLCanvasElement} canvas @param {number[][]} values from -1 to 1 */
  paint(canvas, values) {
    const ctx = canvas.getContext("2d"), image = ctx.createImageData(SAMPLES, SAMPLES);
    values.flat().forEach((value, i) => {
      const place = Math.min(Math.max((value + 0.6) / 1.6, 0), 1) * (RAMP.length - 1), k = Math.min(Math.floor(place), RAMP.length - 2);
      image.data.set([...RAMP[k].map((c, j) => c + (RAMP[k + 1][j] - c) * (place - k)), 255], 4 * i);
    });
    ctx.putImageData(image, 0, 0);
  }

  /** Train with 18 inputs that do not matter, at this scale and at both ends of the slider, a few steps a frame. */
  test() {
    const { samples, dimension, width, steps } = WIDE, task = this.wideTask = (this.wideTask || 0) + Math.random();
    const data = clouds(samples, dimension, 7), unseen = clouds(400, dimension, 8);
    const scales = [...new Set([0.05, this.scale, 30])];
    const networks = scales.map((scale) => new ScaledNetwork({ scale, width, dimension, seed: this.seed }));
    const act = () => {
      if (this.wideTask !== task) return;
      const end = performance.now() + 12;
      while (performance.now() < end) networks.find(({ steps: done }) => done < steps)?.step(data);
      const behind = Math.min(...networks.map(({ steps: done }) => done));
      if (behind < steps) {
        this.wide.textContent = `Training with 18 further inputs that do not matter: ${Math.round(100 * networks.reduce((sum, one) => sum + one.steps, 0) / networks.length / steps)}%`;
        requestAnimationFrame(act);
        return;
      }
      const parts = networks.map((one, i) => `${written(scales[i], 2)}: ${Math.round(100 * one.error(unseen))}%`);
      this.wide.textContent = `After ${steps} steps with 18 further inputs that do not matter, wrong answers on unseen samples, by output scale: ${parts.join(", ")} (chance: 50%). Only features find the two inputs that matter.`;
    };
    act();
  }
}
