/** The plane of exponents: where the scaling limits learn features, where they stay kernels; a click goes there. */
import { TABLE_1, classify } from "../mathematics/latent.mjs";
import { element, shape } from "./elements.mjs";

/** @typedef {[number, number]} Limits */

const X = /** @type {Limits} */ ([-2.25, 1.75]), Y = /** @type {Limits} */ ([-2.5, 2.5]);
const WIDTH = 420, HEIGHT = 360, LEFT = 46, BOTTOM = 40, TOP = 8, RIGHT = 8;
const GRID = 0.25;
const WORDS = {
  frozen: "frozen: nothing moves", unstable: "unstable: steps overshoot", kernel: "kernel: the features stay",
  learning: "learning: the features move",
};

const px = (x) => LEFT + ((x - X[0]) / (X[1] - X[0])) * (WIDTH - LEFT - RIGHT);
const py = (y) => TOP + ((Y[1] - y) / (Y[1] - Y[0])) * (HEIGHT - TOP - BOTTOM);
const inside = (/** @type {number} */ v, /** @type {Limits} */ [low, high]) => Math.min(high, Math.max(low, v));
const snap = (v, limits) => Math.round(inside(v, limits) / GRID) * GRID;

/** Rows of Table 1 with a place of their own. @type {[string, keyof typeof TABLE_1, string][]} */
const POINTS = [
  ["NTK", "ntk", "plain"], ["mean field", "mean_field", "plain"], ["mean field⁺", "mean_field", "learning"],
  ["Kaiming", "kaiming", "plain"], ["Kaiming⁻", "kaiming", "kernel"], ["Xavier", "xavier", "plain"],
  ["Xavier⁻", "xavier", "kernel"], ["lazy", "lazy", "plain"],
];

const NOTE = "As κ grows, the output scale goes as κ to the power on the x axis, the learning rates as that on the y axis. "
  + "Only on the two lines does training take a finite time: on one the features learn, on the other they stay.";

export class Plane {
  /**
   * @param {(exponents: import("../mathematics/latent.mjs").Exponents) => void} chosen
   * @param {(state: any) => import("../mathematics/latent.mjs").Exponents} place where the sliders are
   */
  constructor(chosen, place) {
    this.chosen = chosen;
    this.place = place;
    this.svg = shape("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "application", tabindex: 0, "aria-label": "Plane of exponents; arrow keys move",
    });
    this.svg.addEventListener("click", (event) => this.clicked(event));
    this.svg.addEventListener("keydown", (event) => this.moved(event));
    this.phase = element("p", { class: "readout", role: "status" });
    this.buttons = element("div", { class: "buttons", role: "group", "aria-label": "Scalings of Table 1" },
      ...POINTS.map(([label, name, row]) => element("button", { type: "button", onclick: () => chosen(TABLE_1[name][row]) }, label)));
    this.figure = element("figure", { class: "plane", id: "figure-plane" },
      element("figcaption", {}, element("h3", {}, "Which scaling? Click a point")), this.svg, this.phase, this.buttons,
      element("p", { class: "note" }, NOTE));
  }

  clicked(event) {
    const box = this.svg.getBoundingClientRect();
    const x = X[0] + ((((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT)) * (X[1] - X[0]);
    const y = Y[1] - ((((event.clientY - box.top) / box.height) * HEIGHT - TOP) / (HEIGHT - TOP - BOTTOM)) * (Y[1] - Y[0]);
    this.chosen({ ...this.now, gamma: snap(x, X), rate: snap(y, Y) });
  }

  moved(event) {
    const step = { ArrowLeft: [-GRID, 0], ArrowRight: [GRID, 0], ArrowUp: [0, GRID], ArrowDown: [0, -GRID] }[event.key];
    if (!step) return;
    event.preventDefault();
    this.chosen({ ...this.now, gamma: snap(this.now.gamma + step[0], X), rate: snap(this.now.rate + step[1], Y) });
  }

  draw(state) {
    this.now = this.place(state);
    const { d, gamma, u, w, rate } = this.now, size = d + Math.max(u, w);
    const corner = [-size, size];
    // frozen below y = min(-x, -2x - size); the lines meet in the corner
    const border = [[X[0], -X[0]], corner, [X[1], -2 * X[1] - size]];
    const line = (points) => points.map(([x, y]) => `${px(x)},${py(y)}`).join(" ");
    const close = (v, target) => Math.abs(v - target) < 0.2;
    const table = POINTS.map(([label, name, row]) => ({ label, ...TABLE_1[name][row] }));
    const frame = { x: LEFT, y: TOP, width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM };
    const clip = shape("clipPath", { id: "plane-clip" }, shape("rect", frame));
    this.svg.replaceChildren(clip, shape("g", { "clip-path": "url(#plane-clip)" },
      shape("rect", { x: LEFT, y: TOP, width: WIDTH, height: HEIGHT, class: "unstable" }),
      shape("polygon", { points: line([...border, [X[1], -9], [X[0], -9]]), class: "frozen" }),
      shape("polyline", { points: line(border.slice(0, 2)), class: "learning" }),
      shape("polyline", { points: line(border.slice(1)), class: "kernel" }),
      word("unstable", 0.9, 1.9), word("frozen", -1.4, -1.9),
      word("learning", (X[0] + corner[0]) / 2 - 0.1, (-X[0] + corner[1]) / 2 + 0.12, "start", "word learning"),
      word("kernel", corner[0] + 0.2, corner[1] - 0.4 + 0.12, "start", "word kernel")),
    ...this.axes(),
    ...table.filter((c) => close(c.d + Math.max(c.u, c.w), size)).flatMap(named),
    shape("circle", { cx: px(inside(gamma, X)), cy: py(inside(rate, Y)), r: 8, class: "here" }));
    const rounded = { d: 0, u: size, w: size, gamma: Math.round(gamma * 50) / 50, rate: Math.round(rate * 50) / 50 };
    this.phase.textContent = `You are at (${rounded.gamma}, ${rounded.rate}): ${WORDS[classify({ ...rounded, u: Math.round(size * 50) / 50, w: -9 })]}`;
  }

  axes() {
    const tick = (text, place) => shape("text", { "text-anchor": "middle", class: "tick", ...place }, String(text).replace("-", "−"));
    return [
      ...[-2, -1, 0, 1].map((v) => tick(v, { x: px(v), y: HEIGHT - BOTTOM + 15 })),
      ...[-2, -1, 0, 1, 2].map((v) => tick(v, { x: LEFT - 6, y: py(v) + 4, "text-anchor": "end" })),
      tick("power of the output scale", { x: (WIDTH + LEFT) / 2, y: HEIGHT - 6 }),
      tick("power of the learning rates", { transform: `translate(12 ${(HEIGHT - BOTTOM) / 2}) rotate(-90)` }),
    ];
  }
}

function word(text, x, y, anchor = "middle", kind = "word") {
  return shape("text", { x: px(x), y: py(y), "text-anchor": anchor, class: kind }, text);
}

/** A scaling of Table 1: its point and its name. */
function named({ label, gamma, rate }) {
  const left = label.startsWith("mean field") || label === "Xavier⁻";
  const name = left ? word(label, gamma - 0.13, rate - 0.2, "end", "word table") : word(label, gamma + 0.13, rate + 0.06, "start", "word table");
  return [shape("circle", { cx: px(gamma), cy: py(rate), r: 5, class: "table" }), name];
}
