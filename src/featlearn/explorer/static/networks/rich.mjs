/** A wide ReLU network on random inputs, its output divided by a number: how far does its kernel turn to the task? */
import { eigen } from "../mathematics/eigen.mjs";
import { featureRate } from "../mathematics/ofe.mjs";
import { Random } from "../mathematics/random.mjs";
import { flatAlignment, square } from "./dense.mjs";
import { TwoLayer } from "./two_layer.mjs";

export const SAMPLES = 24;
export const INPUTS = 32;

/** Random inputs, the same in every run. */
export const X = (() => {
  const random = new Random(1);
  return Array.from({ length: SAMPLES }, () => Array.from(random.normals(INPUTS)));
})();

/** The sign of the first input; some of the labels are flipped, one after the other. @param {number} flips @returns {number[]} */
export function labels(flips) {
  return X.map(([first], m) => (first > 0 === m >= flips ? 1 : -1));
}

/**
 * @typedef {object} Setting
 * @property {number} flips of labels @property {number} width @property {number} richness divisor of the output
 * @property {number} rate @property {number} end time @property {number} threshold gamma* of the theory @property {number} seed
 */

export class RichRun {
  /** @param {Setting} setting */
  constructor(setting) {
    this.setting = setting;
    this.step = 0;
    this.end = setting.end;
    this.y = labels(setting.flips);
    // every layer is multiplied by sqrt(2 / fan-in), as in the infinitely wide network
    const scales = { hidden: Math.sqrt(2 / INPUTS), readout: Math.sqrt(2 / setting.width) };
    this.network = new TwoLayer(X, setting.width, 1, new Random(setting.seed), scales);
    this.parameters = this.network.parameters;
    this.first = Float64Array.from(this.network.f);
    this.pull = new Float64Array(SAMPLES);
    this.kernel0 = this.kernel();
  }

  get time() {
    return this.step * this.setting.rate;
  }

  /** Kernel of f; that of the divided output, at the rate that makes up for the division. @returns {Float64Array} */
  kernel() {
    const { readout, hidden } = this.network.kernels();
    return readout.map((value, i) => value + hidden[i]);
  }

  /** (f - f0) / richness - y @returns {Float64Array} */
  residual() {
    return this.pull.map((_, m) => (this.network.f[m] - this.first[m]) / this.setting.richness - this.y[m]);
  }

  advance() {
    const { rate, richness } = this.setting;
    // d/df of 1/2 |g - y|^2 is (g - y) / richness, and the rate is multiplied by its square
    this.network.descend(this.residual(), (rate * richness) / SAMPLES);
    this.step += 1;
  }

  measure() {
    const P = SAMPLES, K = this.kernel();
    const rows = (flat) => Array.from({ length: P }, (_, m) => Array.from(flat.subarray(m * P, (m + 1) * P)));
    const loss = this.residual().reduce((total, v) => total + v * v, 0);
    const { values, vectors } = eigen(rows(K));
    const overlap = vectors[0].reduce((total, v, m) => total + v * this.y[m], 0) ** 2 / P;
    const aligned = flatAlignment(K, this.y);
    this.gamma = featureRate(rows(this.kernel0), rows(K), this.y);
    this.growth = Math.sqrt(square(K) / square(this.kernel0));
    const points = [{ chart: "loss", series: 0, y: loss / P }, { chart: "alignment", series: 0, y: aligned }];
    const x = Math.min(30, this.gamma / this.setting.threshold);
    if (x > 0.01) [overlap, aligned].forEach((y, series) => points.push({ chart: "gamma", series, x, y, fresh: true }));
    values.forEach((value, k) => points.push({ chart: "spectrum", series: 0, x: k + 1, y: value, fresh: k === 0 }));
    return points;
  }

  said() {
    const share = this.gamma / this.setting.threshold;
    const turned = `Its kernel has turned as far as a feature rate of ${share.toPrecision(2)} γ* would turn it`;
    return `${turned}, and has become ${this.growth.toPrecision(3)} times as large.`;
  }

  /** The feature rate of the theory that turns the kernel as far. */
  suggested() {
    const share = this.gamma / this.setting.threshold;
    return share > 0 ? { label: "Set γ to that of the network", set: { share: Math.min(30, Math.max(0.01, Number(share.toPrecision(3)))) } } : null;
  }
}
