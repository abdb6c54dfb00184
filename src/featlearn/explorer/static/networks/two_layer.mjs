/** Two-layer ReLU networks f = b V relu(a W x) with several outputs, and the two parts of their tangent kernel. */

export class TwoLayer {
  /**
   * @param {number[][]} inputs (P, D) @param {number} width @param {number} outputs C
   * @param {import("../mathematics/random.mjs").Random} random
   * @param {{hidden?: number, readout?: number, deviationW?: number, deviationV?: number, mirrored?: boolean}} options a, b and sizes of the
   * first weights; mirrored: the second half of the units is the first with the opposite readout, so that f = 0 at the start
   */
  constructor(inputs, width, outputs, random, { hidden = 1, readout = 1, deviationW = 1, deviationV = 1, mirrored = false }) {
    this.inputs = inputs;
    this.width = width;
    this.outputs = outputs;
    this.hidden = hidden;
    this.readout = readout;
    const [P, D] = [inputs.length, inputs[0].length];
    this.W = random.normals(width * D, deviationW);
    this.V = random.normals(outputs * width, deviationV);
    if (mirrored) this.mirror();
    this.h = new Float64Array(P * width);
    this.f = new Float64Array(P * outputs);
    this.gradientW = new Float64Array(width * D);
    this.gradientV = new Float64Array(outputs * width);
    this.parameters = this.W.length + this.V.length;
    this.forward();
  }

  mirror() {
    const { width, W, V, outputs } = this, half = width >> 1, D = this.inputs[0].length;
    W.copyWithin(half * D, 0, half * D);
    for (let c = 0; c < outputs; c++) for (let i = 0; i < half; i++) V[c * width + half + i] = -V[c * width + i];
  }

  forward() {
    const { inputs, width, outputs, W, V, h, f } = this, D = inputs[0].length;
    this.f.fill(0);
    inputs.forEach((x, m) => {
      for (let i = 0; i < width; i++) {
        let value = 0;
        for (let j = 0; j < D; j++) value += W[i * D + j] * x[j];
        const out = (h[m * width + i] = this.hidden * value);
        if (out > 0) for (let c = 0; c < outputs; c++) f[m * outputs + c] += this.readout * V[c * width + i] * out;
      }
    });
  }

  /** One step against `pull` (P, C) = dL/df. @param {Float64Array} pull @param {number} rate */
  descend(pull, rate) {
    const { inputs, width, outputs, W, V, h, gradientW, gradientV } = this, D = inputs[0].length;
    gradientW.fill(0);
    gradientV.fill(0);
    inputs.forEach((x, m) => {
      for (let i = 0; i < width; i++) {
        const out = h[m * width + i];
        if (!(out > 0)) continue;
        let back = 0;
        for (let c = 0; c < outputs; c++) {
          const force = this.readout * pull[m * outputs + c];
          gradientV[c * width + i] += force * out;
          back += force * V[c * width + i];
        }
        back *= this.hidden;
        for (let j = 0; j < D; j++) gradientW[i * D + j] += back * x[j];
      }
    });
    for (let i = 0; i < W.length; i++) W[i] -= rate * gradientW[i];
    for (let i = 0; i < V.length; i++) V[i] -= rate * gradientV[i];
    this.forward();
  }

  /** K_V (P, P), the same for every output, and K_W of output c with itself. @returns {{readout: Float64Array, hidden: Float64Array}} */
  kernels(c = 0) {
    const { inputs, width, V, h } = this, P = inputs.length;
    const readout = new Float64Array(P * P), hidden = new Float64Array(P * P);
    for (let m = 0; m < P; m++)
      for (let n = 0; n <= m; n++) {
        let features = 0, gates = 0, inner = 0;
        for (let i = 0; i < width; i++)
          if (h[m * width + i] > 0 && h[n * width + i] > 0) {
            features += h[m * width + i] * h[n * width + i];
            gates += V[c * width + i] ** 2;
          }
        for (let j = 0; j < inputs[m].length; j++) inner += inputs[m][j] * inputs[n][j];
        readout[m * P + n] = readout[n * P + m] = this.readout ** 2 * features;
        hidden[m * P + n] = hidden[n * P + m] = (this.readout * this.hidden) ** 2 * inner * gates;
      }
    return { readout, hidden };
  }

  /** Which units are open for which sample. @returns {boolean[]} */
  gates() {
    return Array.from(this.h, (value) => value > 0);
  }
}
