/** A readout on features that know one direction, trained by gradient descent on few samples of a new task, again and again. */
import { Random } from "../mathematics/random.mjs";

/**
 * @typedef {object} Setting
 * @property {number} dimension @property {number} spike @property {number} overlap @property {number} ridge @property {number} noise
 * @property {number} samples of the second chart @property {number[]} sizes of the first @property {number} descent steps @property {number} draws of training sets
 * @property {number} seed
 */

export class TransferRun {
  /** @param {Setting} setting */
  constructor(setting) {
    this.setting = setting;
    this.step = 0;
    this.time = 0;
    this.end = setting.draws;
    this.random = new Random(setting.seed);
    this.parameters = setting.dimension;
    this.found = new Map();
    this.unfinished = 0;
  }

  /** One training set of every size. */
  advance() {
    for (const samples of new Set([...this.setting.sizes, this.setting.samples])) {
      if (!this.found.has(samples)) this.found.set(samples, []);
      this.found.get(samples).push(this.train(samples));
    }
    this.time += 1;
  }

  /** Descent on |y - Phi theta|^2 + ridge |theta|^2 from theta = 0; returns the error |w - w_hat|^2 on new inputs. */
  train(samples) {
    const { dimension: D, spike, overlap, ridge, noise, descent } = this.setting;
    const target = new Float64Array(D);
    target[0] = overlap;
    target[1] = Math.sqrt(Math.max(0, 1 - overlap * overlap));
    const phi = new Float64Array(samples * D), y = new Float64Array(samples), stretch = Math.sqrt(1 + spike);
    for (let m = 0; m < samples; m++) {
      for (let j = 0; j < D; j++) {
        const x = this.random.normal();
        y[m] += x * target[j];
        phi[m * D + j] = j === 0 ? stretch * x : x;
      }
      y[m] += Math.sqrt(noise) * this.random.normal();
    }
    const theta = new Float64Array(D), slope = new Float64Array(D), rate = 1 / (largest(phi, samples, D) + ridge);
    let count = 0, size = Infinity, first = 0;
    for (; count < descent && size > 1e-10 * first; count++) {
      gradient(slope, phi, y, theta, samples, D);
      size = 0;
      for (let j = 0; j < D; j++) {
        slope[j] += ridge * theta[j];
        theta[j] -= rate * slope[j];
        size += slope[j] * slope[j];
      }
      first ||= size;
    }
    this.step += count;
    if (count === descent) this.unfinished += 1;
    return target.reduce((total, w, j) => total + (w - (j === 0 ? stretch : 1) * theta[j]) ** 2, 0);
  }

  measure() {
    const points = [];
    for (const [samples, errors] of this.found) {
      const mean = errors.reduce((a, b) => a + b, 0) / errors.length;
      const squares = errors.reduce((total, e) => total + (e - mean) ** 2, 0);
      const point = { series: 0, y: mean, error: errors.length > 1 ? Math.sqrt(squares / (errors.length - 1) / errors.length) : 0 };
      points.push({ ...point, chart: "curve", x: samples, replace: true });
      if (samples !== this.setting.samples) continue;
      points.push({ ...point, chart: "spike", x: Math.max(0.1, this.setting.spike), fresh: true });
    }
    return points;
  }

  said() {
    const share = this.unfinished / Math.max(1, this.time * this.found.size);
    const late = share > 0.05 ? ` ${Math.round(100 * share)} % of the trainings ran out of steps before they were done: the theory assumes that they end.` : "";
    return `Means of ${this.time} training sets, with standard errors.${late}`;
  }
}

/** slope = Phi^T (Phi theta - y) */
function gradient(slope, phi, y, theta, samples, D) {
  slope.fill(0);
  for (let m = 0; m < samples; m++) {
    let residual = -y[m];
    for (let j = 0, at = m * D; j < D; j++) residual += phi[at + j] * theta[j];
    for (let j = 0, at = m * D; j < D; j++) slope[j] += residual * phi[at + j];
  }
}

/** A bound on the largest eigenvalue of Phi^T Phi: the power method, with some room. */
function largest(phi, samples, D) {
  let v = new Float64Array(D).fill(1), size = 1;
  const none = new Float64Array(samples);
  for (let i = 0; i < 20; i++) {
    const next = new Float64Array(D);
    gradient(next, phi, none, v, samples, D);
    size = Math.sqrt(next.reduce((t, x) => t + x * x, 0));
    v = next.map((x) => x / size);
  }
  return 1.1 * size;
}
