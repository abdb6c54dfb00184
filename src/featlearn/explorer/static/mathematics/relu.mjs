/** Two-layer ReLU networks (Shan & Bordelon 2021): `featlearn.theory.relu`. */
import { dot, matrix, sum } from "./arrays.mjs";
import { integrate } from "./integration.mjs";

/** @typedef {import("./arrays.mjs").Matrix} Matrix */

/**
 * Growth of the readout part K_V and the hidden part K_W of the kernel, along y and on average (corrected).
 * @param {number[]} y @param {number[]} f outputs @param {number} rate
 * @returns {{readoutTask: number, readoutMean: number, hiddenTask: number, hiddenMean: number}}
 */
export function growthRates(y, f, rate) {
  const size = dot(y, y), residual = y.map((v, m) => v - f[m]), both = dot(residual, f);
  const weighted = sum(y.map((v, m) => v * v * residual[m] * f[m])) / size;
  return {
    readoutTask: rate * (weighted + (dot(residual, y) * dot(f, y)) / size),
    readoutMean: (2 * rate * both) / y.length,
    hiddenTask: rate * (weighted + both),
    hiddenMean: rate * (1 + 1 / y.length) * both,
  };
}

/**
 * Outputs and both parts of the kernel under the ansatz, from the initial kernel and f = 0.
 * @param {Matrix} KV @param {Matrix} KW @param {number[]} y @param {number[]} times from 0 on @param {number} rate
 * @param {number} [tolerance] of the integration
 * @returns {{loss: number[], readoutTask: number[], readoutMean: number[], hiddenTask: number[], hiddenMean: number[],
 *   alignment: number[]}}
 */
export function solve(KV, KW, y, times, rate, tolerance = 1e-9) {
  const P = y.length, size = dot(y, y);
  const rest = matrix(P, P, (i, j) => (i === j ? 0 : KW[i][j]));
  const start = new Float64Array(2 * P + P * P);
  for (let i = 0; i < P; i++) start[P + i] = KW[i][i];
  for (let i = 0; i < P; i++) for (let j = 0; j < P; j++) start[2 * P + i * P + j] = KV[i][j];
  const found = { loss: [], readoutTask: [], readoutMean: [], hiddenTask: [], hiddenMean: [], alignment: [] };
  for (const state of integrate(velocity(y, rest, rate), start, times, tolerance)) {
    const at = (i, j) => state[2 * P + i * P + j];
    const hidden = (i, j) => (i === j ? state[P + i] : rest[i][j]);
    let loss = 0, readout = 0, inner = 0, own = 0, trace = 0, square = 0;
    for (let i = 0; i < P; i++) {
      loss += (state[i] - y[i]) ** 2;
      own += at(i, i);
      trace += state[P + i];
      for (let j = 0; j < P; j++) {
        readout += y[i] * at(i, j) * y[j];
        inner += y[i] * hidden(i, j) * y[j];
        square += (at(i, j) + hidden(i, j)) ** 2;
      }
    }
    found.loss.push(loss);
    found.readoutTask.push(readout / size);
    found.readoutMean.push(own / P);
    found.hiddenTask.push(inner / size);
    found.hiddenMean.push(trace / P);
    found.alignment.push((readout + inner) / (size * Math.sqrt(square)));
  }
  return found;
}

/** The state is f (P), the diagonal of K_W (P), K_V (P^2); K_W moves on its diagonal alone. */
function velocity(y, rest, rate) {
  const P = y.length;
  return (state, out) => {
    let both = 0;
    for (let m = 0; m < P; m++) both += (y[m] - state[m]) * state[m];
    for (let i = 0; i < P; i++) {
      const residual = y[i] - state[i];
      let moved = state[P + i] * residual;
      for (let j = 0; j < P; j++) {
        const place = 2 * P + i * P + j;
        moved += (state[place] + rest[i][j]) * (y[j] - state[j]);
        out[place] = (rate / 2) * (residual * state[j] + state[i] * (y[j] - state[j]));
      }
      out[2 * P + i * P + i] += rate * residual * state[i];
      out[P + i] = rate * (residual * state[i] + both);
      out[i] = rate * moved;
    }
  };
}

/**
 * d/dt of y_d^T K_W^cc y_d for a mixture of classes: rows kernels c, columns one-hot targets d.
 * @param {Matrix} f outputs at the class centers, rows classes, columns outputs @param {number} samplesPerClass n
 * @param {number} overlap x . x' of two samples of a class @param {number} rate @param {number} squareNorm |x|^2
 * @returns {Matrix}
 */
export function mixtureRates(f, samplesPerClass, overlap, rate, squareNorm) {
  const factor = rate * samplesPerClass ** 2 * (squareNorm + (samplesPerClass - 1) * overlap);
  const pull = matrix(f.length, f.length, (c, e) => ((c === e ? 1 : 0) - f[e][c]) * f[e][c]);
  return pull.map((row) => row.map((own) => factor * (sum(row) + own)));
}
