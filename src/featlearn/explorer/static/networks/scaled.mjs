/** Two layers of ReLU neurons, times an output scale, less their start: a large scale is lazy, a small one rich. */
import { Random } from "../mathematics/random.mjs";

/** Steps of this share of the largest stable rate, so that lazy and rich networks train equally fast. */
const SHARE = 0.2;

/** @param {number} count @param {number} dimension @param {number} seed @returns {{x: Float64Array[], y: Float64Array}} the sign of x1 x2, in four clouds, with further inputs that do not matter */
export function clouds(count, dimension, seed) {
  const random = new Random(seed), x = [], y = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    const [a, b] = [[1, 1], [-1, -1], [1, -1], [-1, 1]][Math.floor(4 * i / count)]; // sorted by class
    const row = random.normals(dimension, 1);
    row[0] = 0.7 * a + 0.25 * row[0];
    row[1] = 0.7 * b + 0.25 * row[1];
    x.push(row);
    y[i] = a * b;
  }
  return { x, y };
}

export class ScaledNetwork {
  /** @param {{scale: number, width: number, dimension: number, seed: number}} settings */
  constructor({ scale, width, dimension, seed }) {
    const random = new Random(seed);
    Object.assign(this, { scale, width, dimension, steps: 0 });
    this.w = Array.from({ length: width }, () => random.normals(dimension + 1, 1 / Math.sqrt(dimension))); // the last is the bias
    for (const one of this.w) one[dimension] *= 0.5;
    this.a = Float64Array.from({ length: width }, (_, i) => (i % 2 ? -1 : 1) / Math.sqrt(width));
    this.first = { w: this.w.map((one) => one.slice()), a: this.a.slice() };
  }

  /** @param {ArrayLike<number>} x @returns {Float64Array} what enters each ReLU */
  inputs(x) {
    const { dimension: d } = this, found = new Float64Array(this.width);
    for (let n = 0; n < this.width; n++) {
      const row = this.w[n];
      let sum = row[d];
      for (let k = 0; k < d; k++) sum += row[k] * x[k];
      found[n] = sum;
    }
    return found;
  }

  /** @param {ArrayLike<number>} x @param {{w: Float64Array[], a: Float64Array}} [weights] @returns {number} before scale and centering */
  plain(x, weights = this) {
    const { dimension: d } = this;
    let value = 0;
    for (let n = 0; n < this.width; n++) {
      const row = weights.w[n];
      let sum = row[d];
      for (let k = 0; k < d; k++) sum += row[k] * x[k];
      if (sum > 0) value += weights.a[n] * sum;
    }
    return value;
  }

  /** @param {ArrayLike<number>} x @returns {number} */
  output(x) {
    return this.scale * (this.plain(x) - this.plain(x, this.first));
  }

  /** @param {Float64Array[]} x @returns {number[][]} the tangent kernel */
  kernel(x) {
    const inputs = x.map((row) => this.inputs(row)), s2 = this.scale ** 2;
    return x.map((p, i) => x.map((q, j) => {
      let product = 1, sum = 0;
      for (let k = 0; k < this.dimension; k++) product += p[k] * q[k];
      for (let n = 0; n < this.width; n++)
        if (inputs[i][n] > 0 && inputs[j][n] > 0) sum += inputs[i][n] * inputs[j][n] + this.a[n] ** 2 * product;
      return s2 * sum;
    }));
  }

  /** One step of gradient descent. @param {{x: Float64Array[], y: Float64Array}} data @returns {number} the loss before it */
  step({ x, y }) {
    const residuals = y.map((target, i) => target - this.output(x[i]));
    if (this.steps % (x.length > 100 ? 25 : 5) === 0) this.rate = SHARE / largest(this.kernel(x));
    const da = new Float64Array(this.width), dw = this.w.map((row) => new Float64Array(row.length));
    x.forEach((row, p) => {
      const inputs = this.inputs(row), force = this.scale * this.rate * residuals[p];
      for (let n = 0; n < this.width; n++) {
        if (inputs[n] <= 0) continue;
        da[n] += force * inputs[n];
        for (let k = 0; k < this.dimension; k++) dw[n][k] += force * this.a[n] * row[k];
        dw[n][this.dimension] += force * this.a[n];
      }
    });
    da.forEach((v, n) => { this.a[n] += v; });
    dw.forEach((row, n) => row.forEach((v, k) => { this.w[n][k] += v; }));
    this.steps += 1;
    return residuals.reduce((sum, r) => sum + r * r, 0) / y.length;
  }

  /** @returns {number} the mean angle, in degrees, by which the lines of the neurons turned */
  turned() {
    const angles = this.w.map((row, n) => {
      const start = this.first.w[n], dot = (p, q) => p.reduce((sum, v, k) => (k < this.dimension ? sum + v * q[k] : sum), 0);
      return Math.acos(Math.min(1, Math.max(-1, dot(row, start) / Math.sqrt(dot(row, row) * dot(start, start)))));
    });
    return angles.reduce((sum, v) => sum + v, 0) / angles.length * 180 / Math.PI;
  }

  /** @param {{x: Float64Array[], y: Float64Array}} data @returns {number} the share of wrong signs */
  error({ x, y }) {
    return x.filter((row, i) => this.output(row) * y[i] <= 0).length / y.length;
  }
}

/** The largest eigenvalue of a kernel, from above within a few percent. @param {number[][]} kernel @returns {number} */
function largest(kernel) {
  let vector = kernel.map(() => 1), size = 0;
  for (let i = 0; i < 12; i++) {
    const next = kernel.map((row) => row.reduce((sum, v, j) => sum + v * vector[j], 0));
    size = Math.hypot(...next) / Math.hypot(...vector);
    const scale = Math.hypot(...next) || 1;
    vector = next.map((v) => v / scale);
  }
  return 1.1 * size || 1;
}

/** @param {number[][]} kernel @returns {number[][]} cosines of the centered gradients */
export function cosines(kernel) {
  const means = kernel.map((row) => row.reduce((sum, v) => sum + v, 0) / row.length);
  const mean = means.reduce((sum, v) => sum + v, 0) / means.length;
  const centered = kernel.map((row, i) => row.map((v, j) => v - means[i] - means[j] + mean));
  return centered.map((row, i) => row.map((v, j) => v / Math.sqrt(Math.max(centered[i][i] * centered[j][j], 1e-300))));
}
