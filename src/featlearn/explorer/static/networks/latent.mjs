/** Two layers, f = scale u . phi(W x), on samples of a line, trained by gradient descent on the mean of (f - y)^2. */
import { Random } from "../mathematics/random.mjs";

const SAMPLES = 20, INPUTS = 4;

/**
 * @typedef {object} Setting
 * @property {number} scale @property {number} rateU @property {number} rateW @property {number} normU @property {number} normV of W x
 * @property {number} zeta cosine of u and W x at the start @property {number} target y @property {number} width
 * @property {"linear" | "relu"} activation @property {number} off size of the inputs across the line
 * @property {number} end steps @property {number} seed
 */

const size = (values) => Math.sqrt(values.reduce((total, v) => total + v * v, 0));

export class LatentRun {
  /** @param {Setting} setting */
  constructor(setting) {
    this.setting = setting;
    this.step = 0;
    this.first = null; // output at the start
    this.end = setting.end;
    const { width, normU, normV, zeta } = setting, random = new Random(setting.seed);
    const u = random.normals(width), v = random.normals(width);
    const lengthU = size(u), along = u.reduce((total, x, i) => total + (x * v[i]) / lengthU, 0);
    const across = v.map((x, i) => x - (along * u[i]) / lengthU), lengthAcross = size(across) || 1;
    this.u = u.map((x) => (normU * x) / lengthU);
    // the line is the first axis: W x is the first column; the others are not reached by it
    this.W = new Float64Array(width * INPUTS);
    for (let i = 0; i < width; i++) {
      this.W[i * INPUTS] = normV * ((zeta * u[i]) / lengthU + (Math.sqrt(Math.max(0, 1 - zeta * zeta)) * across[i]) / lengthAcross);
      for (let j = 1; j < INPUTS; j++) this.W[i * INPUTS + j] = (normV / Math.sqrt(width)) * random.normal();
    }
    const a = random.normals(SAMPLES), length = size(a) / Math.sqrt(SAMPLES);
    this.a = a.map((x) => x / length); // mean square 1: the line is one sample of length 1 with target y
    this.x = Array.from({ length: SAMPLES }, (_, m) => [this.a[m], ...random.normals(INPUTS - 1, setting.off)]);
    this.labels = this.x.map((x) => x.reduce((total, value) => total + value, 0)); // over the target; all inputs count
    this.parameters = width * (INPUTS + 1);
    this.hidden = new Float64Array(width);
    this.gradientU = new Float64Array(width);
    this.gradientW = new Float64Array(width * INPUTS);
  }

  get time() {
    return this.step;
  }

  /** phi(W x) into `hidden`. */
  forward(x) {
    const linear = this.setting.activation === "linear";
    for (let i = 0; i < this.hidden.length; i++) {
      let h = 0;
      for (let j = 0; j < INPUTS; j++) h += this.W[i * INPUTS + j] * x[j];
      this.hidden[i] = linear || h > 0 ? h : 0;
    }
    let total = 0;
    for (let i = 0; i < this.hidden.length; i++) total += this.u[i] * this.hidden[i];
    return this.setting.scale * total;
  }

  advance() {
    const { scale, rateU, rateW, target, activation } = this.setting, linear = activation === "linear";
    this.gradientU.fill(0);
    this.gradientW.fill(0);
    this.x.forEach((x, m) => {
      const pull = (2 * scale * (this.forward(x) - target * this.labels[m])) / SAMPLES;
      for (let i = 0; i < this.hidden.length; i++) {
        this.gradientU[i] += pull * this.hidden[i];
        if (linear || this.hidden[i] > 0) for (let j = 0; j < INPUTS; j++) this.gradientW[i * INPUTS + j] += pull * this.u[i] * x[j];
      }
    });
    for (let i = 0; i < this.u.length; i++) this.u[i] -= rateU * this.gradientU[i];
    for (let i = 0; i < this.W.length; i++) this.W[i] -= rateW * this.gradientW[i];
    this.step += 1;
  }

  measure() {
    const { scale, rateU, rateW } = this.setting;
    const output = this.forward([1, 0, 0, 0]);
    if (Math.abs(output) > 20 * (1 + Math.abs(this.setting.target) + Math.abs(this.first ??= output))) this.failed = true;
    const normU = size(this.u), normV = size(this.hidden);
    let open = 0;
    for (let i = 0; i < this.u.length; i++) if (this.setting.activation === "linear" || this.hidden[i] > 0) open += this.u[i] ** 2;
    return [
      { chart: "zeta", series: 0, y: output / (scale * normU * normV) }, { chart: "output", series: 0, y: output },
      { chart: "kernel", series: 0, y: scale * scale * (rateU * normV * normV + rateW * open) },
      { chart: "norms", series: 0, y: normU }, { chart: "norms", series: 1, y: normV },
    ];
  }
}
