/** A linear network of any depth, trained by gradient descent on the mean of |f - y|^2 / 2. */
import { Random } from "../mathematics/random.mjs";
import { descend, multiply, multiplyLeft, multiplyRight, square } from "./dense.mjs";

/**
 * @typedef {object} Setting
 * @property {number} inputs D, as many samples @property {number} width @property {number} layers
 * @property {number[]} modes singular values of the teacher @property {number} sigma size of the initial weights
 * @property {number} spread 0: whitened; inputs have variances k^-spread @property {number} rate @property {number} end time
 * @property {number} seed @property {"random" | "balanced"} start
 */

/** Orthonormal vectors along which the teacher acts: cosines of rising frequency. @returns {number[][]} */
export function teacherDirections(count, inputs) {
  return Array.from({ length: count }, (_, a) => Array.from({ length: inputs }, (_, i) => {
    const size = a === 0 ? Math.sqrt(1 / inputs) : Math.sqrt(2 / inputs);
    return size * Math.cos((Math.PI * a * (i + 0.5)) / inputs);
  }));
}

/** Variances of the inputs, of mean 1. @returns {number[]} */
export function inputVariances(inputs, spread) {
  const raw = Array.from({ length: inputs }, (_, i) => (i + 1) ** -spread);
  const mean = raw.reduce((a, b) => a + b, 0) / inputs;
  return raw.map((v) => v / mean);
}

export class DeepLinearRun {
  /** @param {Setting} setting */
  constructor(setting) {
    this.setting = setting;
    this.step = 0;
    const { inputs, width, layers, modes, spread } = setting;
    this.sizes = [inputs, ...new Array(layers - 1).fill(width), modes.length];
    this.variances = inputVariances(inputs, spread);
    this.directions = teacherDirections(modes.length, inputs);
    this.teacher = Float64Array.from(this.directions.flatMap((v, a) => v.map((x) => modes[a] * x)));
    const shape = (l) => this.sizes[l] * this.sizes[l + 1];
    this.weights = setting.start === "balanced" ? this.balanced() : this.random();
    this.gradients = this.weights.map((_, l) => new Float64Array(shape(l)));
    this.products = this.weights.map((_, l) => new Float64Array(this.sizes[l + 1] * inputs)); // W^l ... W^1
    this.deltas = this.weights.map((_, l) => new Float64Array(this.sizes[l + 1] * inputs));
    this.parameters = this.weights.reduce((total, W) => total + W.length, 0);
    this.time = 0;
    this.end = setting.end;
    this.forward();
  }

  random() {
    const random = new Random(this.setting.seed);
    return this.sizes.slice(1).map((rows, l) =>
      random.normals(rows * this.sizes[l], this.setting.sigma / Math.sqrt(this.sizes[l])));
  }

  /** W^l = sigma sum_a r_(l+1)^a r_l^aT: along the teacher, unit vectors in between. */
  balanced() {
    const { modes, sigma, layers } = this.setting;
    return this.sizes.slice(1).map((rows, l) => {
      const columns = this.sizes[l], W = new Float64Array(rows * columns);
      modes.forEach((_, a) => {
        const left = (i) => (i === a ? 1 : 0);
        const right = (j) => (l === 0 ? this.directions[a][j] : j === a ? 1 : 0);
        for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) W[i * columns + j] += sigma * left(i) * right(j);
      });
      return W;
    });
  }

  forward() {
    const D = this.setting.inputs;
    this.weights.forEach((W, l) => {
      if (l === 0) this.products[0].set(W);
      else multiply(this.products[l], W, this.products[l - 1], this.sizes[l + 1], this.sizes[l], D);
    });
  }

  advance() {
    const D = this.setting.inputs, last = this.weights.length - 1, function_ = this.products[last];
    const top = this.deltas[last];
    for (let i = 0; i < top.length; i++) top[i] = (function_[i] - this.teacher[i]) * this.variances[i % D];
    for (let l = last; l >= 0; l--) {
      const [rows, columns] = [this.sizes[l + 1], this.sizes[l]];
      if (l === 0) this.gradients[0].set(this.deltas[0]);
      else {
        multiplyRight(this.gradients[l], this.deltas[l], this.products[l - 1], rows, D, columns);
        multiplyLeft(this.deltas[l - 1], this.weights[l], this.deltas[l], columns, rows, D);
      }
    }
    this.weights.forEach((W, l) => descend(W, this.gradients[l], this.setting.rate));
    this.forward();
    this.step += 1;
    this.time = this.step * this.setting.rate;
  }

  /** 1/C sum_c M^cc (D, D), K(x, x') = x^T M x': of each layer, what is above times what is below. */
  metric() {
    const D = this.setting.inputs, C = this.setting.modes.length, M = new Float64Array(D * D);
    let above = null; // W^L ... W^(l+1), (C, N_l)
    for (let l = this.weights.length - 1; l >= 0; l--) {
      const factor = above ? square(above) / C : 1, N = this.sizes[l];
      if (l === 0) for (let i = 0; i < D; i++) M[i * (D + 1)] += factor;
      else {
        const below = multiplyLeft(new Float64Array(D * D), this.products[l - 1], this.products[l - 1], D, N, D);
        for (let i = 0; i < M.length; i++) M[i] += factor * below[i];
      }
      above = above ? multiply(new Float64Array(C * N), above, this.weights[l], C, this.sizes[l + 1], N) : this.weights[l];
    }
    return M;
  }

  measure() {
    const { inputs: D, modes } = this.setting, C = modes.length, M = this.metric();
    const function_ = this.products[this.weights.length - 1];
    let loss = 0, overlap = 0, size = 0;
    for (let i = 0; i < function_.length; i++) loss += D * this.variances[i % D] * (function_[i] - this.teacher[i]) ** 2;
    // K = X M X^T and Y Y^T with X = sqrt(D variances) along the axes
    const scale = this.variances.map((v) => D * v);
    for (let i = 0; i < D; i++)
      for (let j = 0; j < D; j++) {
        size += scale[i] * M[i * D + j] ** 2 * scale[j];
        let task = 0;
        for (let c = 0; c < C; c++) task += this.teacher[c * D + i] * this.teacher[c * D + j];
        overlap += scale[i] * M[i * D + j] * task * scale[j];
      }
    let task = 0;
    for (let a = 0; a < C; a++)
      for (let b = 0; b < C; b++) {
        let inside = 0;
        for (let i = 0; i < D; i++) inside += this.teacher[a * D + i] * scale[i] * this.teacher[b * D + i];
        task += inside ** 2;
      }
    let power = 0;
    for (let i = 0; i < this.teacher.length; i++) power += D * this.variances[i % D] * this.teacher[i] ** 2;
    const points = this.directions.map((v, a) => {
      let strength = 0;
      for (let i = 0; i < D; i++) strength += function_[a * D + i] * v[i];
      return { chart: "strength", series: a, y: strength };
    });
    return [...points, { chart: "loss", series: 0, y: loss / power },
      { chart: "alignment", series: 0, y: overlap / Math.sqrt(size * task) }, { chart: "norm", series: 0, y: Math.sqrt(size) }];
  }
}
