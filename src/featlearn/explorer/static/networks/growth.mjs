/** Two-layer ReLU networks: one with one output on orthonormal inputs, one that learns a mixture of three classes. */
import { Random } from "../mathematics/random.mjs";
import { along, flatAlignment, trace } from "./dense.mjs";
import { TwoLayer } from "./two_layer.mjs";

const CLASSES = 3, NOISE_INPUTS = 12;
/** The mixture trains faster, to be learned in the same number of steps. */
const MIXTURE_RATE = 2.5;

/** Labels of alternating sign. @returns {number[]} */
export function alternating(count) {
  return Array.from({ length: count }, (_, m) => (m % 2 === 0 ? 1 : -1));
}

/**
 * @typedef {object} Setting
 * @property {number} samples P @property {number} size of the readout @property {number} ratio of the first layer to it @property {number} width @property {number} rate
 * @property {number} end time @property {number} perClass samples of a class @property {number} noise their variance @property {number} seed
 */

export class GrowthRun {
  /** @param {Setting} setting */
  constructor(setting) {
    this.setting = setting;
    this.step = 0;
    this.end = setting.end;
    const { samples, width, size, ratio, perClass, noise } = setting, random = new Random(setting.seed);
    // the theory starts from f = 0
    const scales = { deviationW: Math.sqrt((size * ratio) / width), deviationV: Math.sqrt(size / width), mirrored: true };
    this.y = alternating(samples);
    const axes = Array.from({ length: samples }, (_, m) => Array.from({ length: samples }, (_, j) => (j === m ? 1 : 0)));
    this.network = new TwoLayer(axes, width, 1, random, scales);
    const center = (m) => Array.from({ length: CLASSES }, (_, c) => (c === Math.floor(m / perClass) ? 1 : 0));
    const spread = Math.sqrt(noise / NOISE_INPUTS);
    const inputs = Array.from({ length: CLASSES * perClass }, (_, m) => [...center(m), ...random.normals(NOISE_INPUTS, spread)]);
    this.mixture = new TwoLayer(inputs, width, CLASSES, random, scales);
    this.parameters = this.network.parameters + this.mixture.parameters;
    this.pull = new Float64Array(samples);
    this.pulls = new Float64Array(inputs.length * CLASSES);
    this.gates = this.network.gates();
    this.first = this.parts();
    this.before = null;
  }

  get time() {
    return this.step * this.setting.rate;
  }

  parts() {
    const { readout, hidden } = this.network.kernels(), P = this.y.length;
    const whole = readout.map((value, i) => value + hidden[i]);
    const growth = [along(readout, this.y), trace(readout) / P, along(hidden, this.y), trace(hidden) / P];
    return { growth, alignment: flatAlignment(whole, this.y) };
  }

  advance() {
    const { rate, perClass } = this.setting;
    this.y.forEach((y, m) => { this.pull[m] = this.network.f[m] - y; });
    this.network.descend(this.pull, rate);
    for (let i = 0; i < this.pulls.length; i++) {
      const own = Math.floor(i / CLASSES / perClass) === i % CLASSES ? 1 : 0;
      this.pulls[i] = this.mixture.f[i] - own;
    }
    this.mixture.descend(this.pulls, MIXTURE_RATE * rate / perClass); // its kernel is larger by the samples of a class
    this.step += 1;
  }

  /** y_d^T K_W^cc y_d of own and of other classes, means; and the mean output for the own class. */
  classGrowth() {
    const { perClass } = this.setting, P = CLASSES * perClass;
    let own = 0, other = 0, output = 0;
    for (let c = 0; c < CLASSES; c++) {
      const { hidden } = this.mixture.kernels(c);
      for (let m = 0; m < P; m++)
        for (let n = 0; n < P; n++) {
          const d = Math.floor(m / perClass);
          if (d !== Math.floor(n / perClass)) continue;
          if (d === c) own += hidden[m * P + n] / CLASSES;
          else other += hidden[m * P + n] / (CLASSES * (CLASSES - 1));
        }
    }
    for (let m = 0; m < P; m++) output += this.mixture.f[m * CLASSES + Math.floor(m / perClass)] / P;
    return { own, other, output, at: (MIXTURE_RATE * this.time) / perClass };
  }

  measure() {
    const now = this.parts(), f = this.network.f;
    const loss = this.y.reduce((total, y, m) => total + (f[m] - y) ** 2, 0) / this.y.length;
    /** @type {import("./index.mjs").Point[]} */
    const points = now.growth.map((value, k) => ({ chart: "growth", series: k, y: value - this.first.growth[k] }));
    points.push({ chart: "loss", series: 0, y: loss }, { chart: "alignment", series: 0, y: now.alignment });
    const classes = this.classGrowth(), before = this.before;
    const middle = before && (before.output + classes.output) / 2;
    if (!before) this.before = classes;
    // a rate needs two measurements that differ
    else if (middle > 0 && middle < 1 && classes.output - before.output > 0.05) {
      const span = classes.at - before.at;
      const rates = [classes.own - before.own, classes.other - before.other].map((grown) => grown / span);
      rates.forEach((y, series) => points.push({ chart: "mixture", series, x: middle, y }));
      this.before = classes;
    }
    return points;
  }

  said() {
    const flipped = this.network.gates().filter((open, i) => open !== this.gates[i]).length / this.gates.length;
    return `${(100 * flipped).toPrecision(2)} % of the gates have flipped; the theory holds them fixed.`;
  }
}
