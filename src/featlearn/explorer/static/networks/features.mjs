/** Perceptrons whose first layer is watched: do its weights agree with the gradients of the network? */
import { derivativeCorrelation } from "../mathematics/early.mjs";
import { Random } from "../mathematics/random.mjs";
import { descend, multiply, multiplyLeft, multiplyRight, square } from "./dense.mjs";

export const SAMPLES = 48;
export const INPUTS = 12;
const DRAWS = 6;
const DECAYS = [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4];
const WIDTHS = [4, 8, 16, 32, 64, 128];

const NUMBERS = new Random(1).normals(SAMPLES * INPUTS);

/**
 * Gaussian inputs whose variances fall as 1 / (1 + k^decay), of mean 1, and the task x1 x2 + x2 x3 + x3 x1 of unit mean square.
 * @param {number} decay @returns {{X: number[][], y: number[]}}
 */
export function data(decay) {
  const raw = Array.from({ length: INPUTS }, (_, k) => 1 / (1 + (k + 1) ** decay));
  const total = raw.reduce((a, b) => a + b, 0), sizes = raw.map((v) => Math.sqrt((INPUTS * v) / total));
  const X = Array.from({ length: SAMPLES }, (_, m) => sizes.map((size, k) => size * NUMBERS[m * INPUTS + k]));
  const plain = X.map((x) => x[0] * x[1] + x[1] * x[2] + x[2] * x[0]);
  const length = Math.sqrt(plain.reduce((t, v) => t + v * v, 0) / SAMPLES);
  return { X, y: plain.map((v) => v / length) };
}

/** A network without biases and with one output. */
class Perceptron {
  /** @param {number[]} sizes inputs, hidden layers, 1 @param {number[]} deviations of each layer's weights */
  constructor(X, sizes, deviations, activation, random) {
    this.sizes = sizes;
    this.relu = activation === "relu";
    this.n = X.length;
    this.x = Float64Array.from(X.flat());
    this.weights = sizes.slice(1).map((rows, l) => random.normals(rows * sizes[l], deviations[l]));
    this.h = sizes.slice(1).map((size) => new Float64Array(this.n * size));
    this.phi = sizes.slice(1).map((size) => new Float64Array(this.n * size));
    this.rows = sizes.slice(1).map((size) => new Float64Array(this.n * size)); // df/dh
    this.gradients = this.weights.map((W) => new Float64Array(W.length));
    this.parameters = this.weights.reduce((t, W) => t + W.length, 0);
    this.run();
  }

  /** Outputs, and df/dh of every layer. */
  run() {
    const { sizes, n, h, phi, rows, weights } = this, last = weights.length - 1;
    weights.forEach((W, l) => {
      multiplyRight(h[l], l === 0 ? this.x : phi[l - 1], W, n, sizes[l], sizes[l + 1]);
      for (let i = 0; i < h[l].length; i++) phi[l][i] = this.relu ? Math.max(0, h[l][i]) : h[l][i] ** 2;
    });
    rows[last].fill(1);
    for (let l = last - 1; l >= 0; l--) {
      multiply(rows[l], rows[l + 1], weights[l + 1], n, sizes[l + 2], sizes[l + 1]);
      for (let i = 0; i < rows[l].length; i++) rows[l][i] *= this.relu ? (h[l][i] > 0 ? 1 : 0) : 2 * h[l][i];
    }
  }

  get outputs() {
    return this.h[this.h.length - 1];
  }

  /** Gradients for dL/df (n). */
  backward(pull) {
    this.weights.forEach((W, l) => {
      const columns = this.sizes[l + 1], forced = this.rows[l].map((v, i) => v * pull[Math.floor(i / columns)]);
      multiplyLeft(this.gradients[l], forced, l === 0 ? this.x : this.phi[l - 1], columns, this.n, this.sizes[l]);
    });
  }

  /** J J^T of the first layer, (n, n). @returns {number[][]} */
  ptk() {
    const k = this.sizes[1], J = this.rows[0], K = multiplyRight(new Float64Array(this.n * this.n), J, J, this.n, k, this.n);
    return Array.from({ length: this.n }, (_, m) => Array.from(K.subarray(m * this.n, (m + 1) * this.n)));
  }
}

/** Weights as the theory has them: variances 1 / fan-in. */
function drawn(X, width, hidden, activation, random) {
  const sizes = [INPUTS, ...new Array(hidden).fill(width), 1];
  return new Perceptron(X, sizes, sizes.slice(0, -1).map((fan) => 1 / Math.sqrt(fan)), activation, random);
}

/** cos(W^T W, W^T K W) with K = J^T J. */
function featureCorrelation(W, J, n, k, d) {
  const features = multiplyLeft(new Float64Array(d * d), W, W, d, k, d);
  const pushed = multiply(new Float64Array(n * d), J, W, n, k, d); // J W
  const products = multiplyLeft(new Float64Array(d * d), pushed, pushed, d, n, d);
  let both = 0;
  for (let i = 0; i < features.length; i++) both += features[i] * products[i];
  return both / Math.sqrt(square(features) * square(products));
}

/**
 * @typedef {object} Setting
 * @property {number} decay @property {number} width @property {1 | 2} hidden @property {"relu" | "quadratic"} activation
 * @property {number} size of the first layer's weights @property {"descent" | "slo"} optimizer @property {number} speed of the first layer
 * @property {number} rate @property {number} end steps @property {number} seed
 */

export class FeatureRun {
  /** @param {Setting} setting */
  constructor(setting) {
    this.setting = setting;
    this.step = 0;
    this.end = setting.end;
    const { X, y } = data(setting.decay), random = new Random(setting.seed);
    this.y = y;
    const sizes = [INPUTS, ...new Array(setting.hidden).fill(setting.width), 1];
    const deviations = sizes.slice(0, -1).map((fan) => 1 / Math.sqrt(fan));
    deviations[0] *= setting.size;
    deviations[deviations.length - 1] *= 0.01; // the output starts near 0, as the theory assumes
    this.network = new Perceptron(X, sizes, deviations, setting.activation, random);
    this.parameters = this.network.parameters;
    this.first = Float64Array.from(this.network.weights[0]);
    this.pull = new Float64Array(SAMPLES);
    this.waiting = [
      ...DECAYS.map((decay) => ({ chart: "spectrum", x: decay, decay, width: setting.width })),
      ...WIDTHS.map((width) => ({ chart: "width", x: width, decay: setting.decay, width })),
    ];
  }

  get time() {
    return this.step;
  }

  /** The first move of several random networks, exactly: mean and standard error. */
  sampled({ chart, x, decay, width }) {
    const { hidden, activation, seed } = this.setting, { X, y } = data(decay);
    const random = new Random(1000 + seed);
    const values = Array.from({ length: DRAWS }, () => derivativeCorrelation(X, y, drawn(X, width, hidden, activation, random).ptk()));
    const mean = values.reduce((a, b) => a + b, 0) / DRAWS;
    return { chart, series: 0, x, y: mean, error: Math.sqrt(values.reduce((t, v) => t + (v - mean) ** 2, 0) / (DRAWS - 1) / DRAWS) };
  }

  advance() {
    const { network } = this, { optimizer, speed, rate } = this.setting;
    for (let m = 0; m < SAMPLES; m++) this.pull[m] = (2 * (network.outputs[m] - this.y[m])) / SAMPLES;
    network.backward(this.pull);
    network.weights.forEach((W, l) => {
      // SLO: each layer's gradient divided by its own norm, the first layer fast, the others slow
      const factor = optimizer === "slo" ? (l === 0 ? speed : 1 / speed) / (0.1 + Math.sqrt(square(network.gradients[l]))) : 1;
      descend(W, network.gradients[l], rate * factor);
    });
    network.run();
    this.step += 1;
  }

  measure() {
    const { network } = this, W = network.weights[0], J = network.rows[0], k = network.sizes[1];
    const points = [{ chart: "training", series: 1, y: featureCorrelation(W, J, SAMPLES, k, INPUTS) }];
    const added = W.map((v, i) => v - this.first[i]);
    if (this.step > 0) points.push({ chart: "training", series: 0, y: featureCorrelation(added, J, SAMPLES, k, INPUTS) });
    if (!Number.isFinite(square(W))) points.push({ chart: "training", series: 0, y: NaN });
    points.push(...this.waiting.splice(0, 2).map((one) => this.sampled(one)));
    return points;
  }

  said() {
    const loss = this.y.reduce((t, y, m) => t + (this.network.outputs[m] - y) ** 2, 0) / SAMPLES;
    const moved = Math.sqrt(square(this.network.weights[0].map((v, i) => v - this.first[i])) / square(this.network.weights[0]));
    return `Loss ${loss.toPrecision(2)}; ${Math.round(100 * moved)} % of the first layer's weights are learned.`;
  }
}
