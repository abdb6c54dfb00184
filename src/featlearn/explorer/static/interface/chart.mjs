/** A chart of theory as lines and of the network as points on them. */
import { element, written } from "./elements.mjs";

/**
 * @typedef {object} Axis @property {string} label @property {boolean} [log]
 * @property {number[]} [least] what is always shown @property {number} [most] the highest value shown
 * @typedef {object} ChartSpec
 * @property {string} key @property {string} title @property {Axis} x @property {Axis} y @property {string} caption
 * @property {{label: string, color: number}[]} [series] of the network; by default one for each solid line, in its color
 * @typedef {object} Line
 * @property {string} name in the Python code @property {string} label @property {number[]} y
 * @property {number} color @property {boolean | number[]} [dash] @property {boolean} [steps] drawn as points
 * @typedef {object} Picture
 * @property {number[]} x @property {Line[]} lines @property {{at: number, label: string}[]} [marks]
 * @property {{at: number, label: string}[]} [levels] @property {{from: number, to: number, label: string}} [window]
 * @typedef {Map<number, {x: number[], y: number[], error: number[]}>} Points by series
 */

const { uPlot } = /** @type {any} */ (globalThis); // a script of its own
const FONT = "12px system-ui, sans-serif";
const DASH = [6, 5];

let colors = new Map();
/** Colors are read once, and again after the scheme has changed. */
export function forgetColors() {
  colors = new Map();
}
const color = (name) => {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colors.get(name);
};

export class Chart {
  /** @param {ChartSpec} spec */
  constructor(spec) {
    this.spec = spec;
    this.box = element("div", { class: "chart", role: "img" });
    this.legend = element("div", { class: "keys", "aria-hidden": true });
    this.readout = element("p", { class: "readout", "aria-hidden": true });
    this.figure = element("figure", { id: `figure-${spec.key}` },
      element("figcaption", {}, element("h3", {}, spec.title)), this.box, this.legend, this.readout,
      element("p", { class: "note", html: spec.caption }));
    /** @type {Picture} */
    this.picture = { x: [], lines: [] };
    /** @type {Points} */
    this.points = new Map();
    this.shape = "";
  }

  /** @param {Picture} picture @param {Points} points */
  draw(picture, points) {
    this.picture = picture;
    this.points = points;
    const { log } = this.spec.y;
    const data = [picture.x, ...picture.lines.map(({ y }) => (log ? y.map((v) => (v > 0 ? v : null)) : y))];
    const shape = picture.lines.map(({ label, color, dash, steps }) => [label, color, dash, steps].join()).join("|");
    if (!this.plot || shape !== this.shape) this.build(data, shape);
    else this.plot.setData(data);
    this.say();
  }

  build(data, shape) {
    this.shape = shape;
    this.plot?.destroy();
    const { x, y } = this.spec;
    const grid = { stroke: () => color("--grid"), width: 1 };
    const axis = { stroke: () => color("--soft"), grid, ticks: grid, font: FONT, labelFont: FONT };
    const values = (u, splits) => splits.map((v) => (v === null ? "" : written(v)));
    this.plot = new uPlot({
      ...this.size(), padding: [this.picture.marks?.length || this.picture.window ? 24 : 10, 14, 0, 0],
      legend: { show: false }, cursor: { drag: { x: false, y: false }, y: false, points: { size: 6 } },
      scales: {
        x: { time: false, distr: x.log ? 3 : 1, range: () => this.extent() },
        y: { distr: y.log ? 3 : 1, range: () => this.range() },
      },
      axes: [
        { ...axis, label: x.label, labelSize: 20, size: 30, space: 60, values, ...(x.log ? { filter: decades } : {}) },
        { ...axis, label: y.label, labelSize: 20, size: 56, values, ...(y.log ? { filter: decades } : {}) },
      ],
      series: [{}, ...this.picture.lines.map((line) => ({
        label: line.label, width: line.steps ? 0 : 2, spanGaps: false, dash: Array.isArray(line.dash) ? line.dash : line.dash ? DASH : [],
        stroke: () => color(`--c${line.color}`), points: { show: Boolean(line.steps), size: 6, fill: () => color(`--c${line.color}`) },
      }))],
      hooks: { drawClear: [() => this.shade()], draw: [() => this.annotate(), () => this.dots()], setCursor: [() => this.read()] },
    }, data, this.box);
    this.legend.replaceChildren(...this.picture.lines.map(({ label, color: c, dash, steps }) => element("span", {},
      element("i", { class: `key c${c}${dash ? " dash" : ""}${steps ? " dot" : ""}` }), label)),
    ...(this.spec.series ?? [{ label: "network in this page", color: "" }]).map(({ label, color: c }) =>
      element("span", {}, element("i", { class: `key dot hollow c${c}` }), label)));
  }

  size() {
    const width = Math.max(260, Math.floor(this.box.clientWidth || 320));
    return { width, height: Math.round(Math.min(300, Math.max(210, width * 0.56))) };
  }

  resize() {
    this.plot?.setSize(this.size());
  }

  /** @returns {[number, number]} */
  extent() {
    const { x } = this.picture;
    return [x[0], x[x.length - 1]];
  }

  /** What theory needs, with room for a network that leaves it by half of that; one that diverges leaves the chart. */
  range() {
    const { log, least, most = Infinity } = this.spec.y;
    let low = Infinity, high = -Infinity;
    const take = (v) => { if (Number.isFinite(v) && (!log || v > 0)) { low = Math.min(low, v); high = Math.max(high, v); } };
    for (const { y } of this.picture.lines) y.forEach(take);
    for (const { at } of this.picture.levels ?? []) take(at);
    least?.forEach(take);
    high = Math.min(high, most);
    if (!(low < high)) [low, high] = log ? [low / 2 || 0.1, high * 2 || 10] : [low - 0.5 || -0.5, high + 0.5 || 0.5];
    const to = log ? Math.log10 : (v) => v, from = log ? (v) => 10 ** v : (v) => v;
    let [bottom, top] = [to(low), to(high)];
    const room = top - bottom;
    for (const { y } of this.points.values())
      for (const v of y) {
        if (log && !(v > 0)) continue;
        bottom = Math.max(Math.min(bottom, to(v)), to(low) - room / 2);
        top = Math.min(Math.max(top, to(v)), to(high) + room / 2);
      }
    if (!log && low >= 0) bottom = Math.max(bottom, 0);
    const pad = 0.05 * (top - bottom);
    return [from(!log && bottom === 0 ? 0 : bottom - pad), from(top + pad)];
  }

  shade() {
    const u = this.plot, window_ = this.picture.window;
    if (!u || !window_) return;
    const left = u.valToPos(window_.from, "x", true), right = Math.min(u.valToPos(window_.to, "x", true), u.bbox.left + u.bbox.width);
    u.ctx.save();
    u.ctx.fillStyle = color("--window");
    u.ctx.fillRect(left, u.bbox.top, right - left, u.bbox.height);
    u.ctx.restore();
    this.write(window_.label, (left + right) / 2, u.bbox.top - 6 * devicePixelRatio, "center", right - left);
  }

  annotate() {
    const u = this.plot, ratio = devicePixelRatio, { left, top, width, height } = u.bbox;
    const ctx = u.ctx;
    ctx.save();
    ctx.strokeStyle = color("--soft");
    ctx.lineWidth = ratio;
    ctx.setLineDash([2 * ratio, 3 * ratio]);
    const stroke = (x0, y0, x1, y1) => { ctx.beginPath(); ctx.moveTo(x0, y0); ctx.lineTo(x1, y1); ctx.stroke(); };
    for (const { at, label } of this.picture.marks ?? []) {
      const place = u.valToPos(at, "x", true);
      if (!(place >= left && place <= left + width)) continue;
      stroke(place, top, place, top + height);
      this.write(label, place, top - 6 * ratio, place > left + width * 0.7 ? "right" : place < left + width * 0.3 ? "left" : "center");
    }
    for (const { at, label } of this.picture.levels ?? []) {
      const place = u.valToPos(at, "y", true);
      if (!(place >= top && place <= top + height)) continue;
      stroke(left, place, left + width, place);
      this.write(label, left + width - 4 * ratio, place - 5 * ratio, "right");
    }
    ctx.restore();
  }

  write(words, x, y, side, room = Infinity) {
    const { ctx } = this.plot;
    ctx.save();
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.fillStyle = color("--soft");
    ctx.textAlign = side;
    if (ctx.measureText(words).width <= room) ctx.fillText(words, x, y);
    ctx.restore();
  }

  /** The network; a point beyond the chart is a triangle at its edge. */
  dots() {
    const u = this.plot, ctx = u.ctx, ratio = devicePixelRatio, { left, top, width, height } = u.bbox;
    const own = this.spec.series ?? this.picture.lines.filter(({ dash }) => !dash);
    ctx.save();
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.rect(left - 5 * ratio, top - 5 * ratio, width + 10 * ratio, height + 10 * ratio);
    ctx.clip();
    for (const [series, { x, y, error }] of this.points) {
      ctx.strokeStyle = color(`--c${own[series % own.length]?.color ?? 7}`);
      ctx.fillStyle = color("--paper");
      ctx.lineWidth = 1.6 * ratio;
      x.forEach((at, i) => {
        const px = u.valToPos(at, "x", true), py = y[i] > 0 || !this.spec.y.log ? u.valToPos(y[i], "y", true) : Infinity;
        const inside = Math.min(Math.max(py, top + 3 * ratio), top + height - 3 * ratio);
        ctx.beginPath();
        if (error[i] > 0) {
          ctx.moveTo(px, u.valToPos(y[i] + error[i], "y", true));
          ctx.lineTo(px, u.valToPos(y[i] - error[i], "y", true));
          ctx.stroke();
          ctx.beginPath();
        }
        if (Math.abs(py - inside) < 6 * ratio) ctx.arc(px, py, 3 * ratio, 0, 2 * Math.PI);
        else {
          const tip = py < inside ? -4 * ratio : 4 * ratio;
          ctx.moveTo(px, inside + tip);
          ctx.lineTo(px - 4 * ratio, inside - tip / 2);
          ctx.lineTo(px + 4 * ratio, inside - tip / 2);
          ctx.closePath();
        }
        ctx.fill();
        ctx.stroke();
      });
    }
    ctx.restore();
  }

  read() {
    const { idx } = this.plot.cursor;
    const { x, lines } = this.picture;
    this.readout.textContent = idx === null || idx === undefined ? ""
      : `${this.spec.x.label} ${written(x[idx])}: ${lines.map((l) => `${l.label} ${written(l.y[idx])}`).join(", ")}`;
  }

  /** The chart in words. */
  say() {
    const { x, lines, marks = [] } = this.picture;
    const ends = lines.slice(0, 4).map(({ label, y }) => `${label} from ${written(y[0])} to ${written(y[y.length - 1])}`);
    const said = marks.map(({ at, label }) => `${label} at ${written(at)}`);
    const span = `over ${this.spec.x.label} ${written(x[0])} to ${written(x[x.length - 1])}`;
    this.box.setAttribute("aria-label", `${this.spec.title}: ${[...ends, ...said].join("; ")}, ${span}.`);
  }
}

/** On a logarithmic axis: labels at 1, 2, 5 and their tens, on long axes at powers of ten alone. */
function decades(u, splits) {
  const long = splits[splits.length - 1] / splits[0] > 200;
  const digits = long ? [1] : [1, 2, 5];
  return splits.map((v) => (digits.includes(Number((v / 10 ** Math.floor(Math.log10(v) + 1e-9)).toPrecision(3))) ? v : null));
}
