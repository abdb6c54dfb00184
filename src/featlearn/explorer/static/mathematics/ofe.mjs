/** Optimal feature evolution (Shan & Bordelon 2021): `featlearn.theory.ofe`, one output, positive kernels, f0 = 0. */
import { alignment, dot, inner, matrix, quadratic, sum } from "./arrays.mjs";
import { eigen } from "./eigen.mjs";

/** @typedef {import("./arrays.mjs").Matrix} Matrix */
/** @typedef {{values: number[], vectors: Matrix, power: number[]}} Basis eigenvalues of K0, and y^2 along each vector */

/** @param {Matrix} K0 @param {number[]} y @returns {Basis} */
export function basis(K0, y) {
  const { values, vectors } = eigen(K0);
  return { values, vectors, power: vectors.map((v) => dot(v, y) ** 2) };
}

/** @param {Matrix} K0 @param {number[]} y @param {number} gamma @returns {Matrix} K0 + gamma y y^T */
export function finalKernel(K0, y, gamma) {
  return matrix(y.length, y.length, (i, j) => K0[i][j] + gamma * y[i] * y[j]);
}

/**
 * Loss |f - y|^2 and kernel-task alignment along time, in closed form; eigenvalues of the final kernel, and the share of y in each.
 * @param {Matrix} K0 @param {number[]} y @param {number} gamma >= 0 @param {number[]} times @param {number} rate
 * @param {Basis} start `basis(K0, y)`
 * @returns {{loss: number[], alignment: number[], norm: number[], eigenvalues: number[], overlaps: number[]}}
 */
export function solve(K0, y, gamma, times, rate, start) {
  const C = finalKernel(K0, y, gamma);
  const { values: c, vectors } = eigen(C);
  const d = vectors.map((v) => dot(v, y)), size = dot(y, y);
  const rest = 1 / (1 + gamma * sum(start.power.map((p, k) => p / start.values[k])));
  const along = quadratic(C, y), square = inner(C, C);
  const found = { loss: [], alignment: [], norm: [], eigenvalues: c, overlaps: d.map((v) => (v * v) / size) };
  for (const t of times) {
    const decayed = d.map((v, k) => v * Math.exp(-rate * c[k] * t));
    const D = rest + gamma * sum(decayed.map((v, k) => (v * v) / c[k]));
    const loss = dot(decayed, decayed) / D;
    const overlap = dot(decayed, d) / Math.sqrt(D); // Delta . y up to its sign
    const curved = sum(decayed.map((v, k) => v * v * c[k])) / D;
    const norm = Math.sqrt(square - 2 * gamma * curved + (gamma * loss) ** 2);
    found.loss.push(loss);
    found.norm.push(norm);
    found.alignment.push((along - gamma * overlap * overlap) / (norm * size));
  }
  return found;
}

/** gamma* = 1 / sum_{i > 1} y_i^2 / (lambda_1 - lambda_i). @param {Basis} start @returns {number} */
export function threshold({ values, power }) {
  const below = values.map((value, k) => (values[0] - value > 1e-12 * values[0] ? power[k] / (values[0] - value) : 0));
  return 1 / sum(below);
}

/** @param {Matrix} K0 @param {number[]} y @param {number} gamma @returns {number} of K0 + gamma y y^T */
export function finalAlignment(K0, y, gamma) {
  const k = Math.sqrt(inner(K0, K0)), g = gamma * dot(y, y), A = alignment(K0, y);
  return (A * k + g) / Math.sqrt(k * k + 2 * A * k * g + g * g);
}

/**
 * (v . y)^2 / |y|^2 for the top eigenvector v of K0 + gamma y y^T: the largest root of 1 = gamma sum y_i^2 / (c - lambda_i).
 * @param {Basis} start @param {number} gamma > 0 @returns {number}
 */
export function topOverlap({ values, power }, gamma) {
  const total = sum(power);
  const pole = values.findIndex((_, k) => power[k] > 1e-24 * total);
  let low = 0, high = gamma * total; // distance of the root from its pole
  const value = (distance) => {
    let right = 0;
    for (let k = pole; k < values.length; k++) right += power[k] / (values[pole] + distance - values[k]);
    return gamma * right;
  };
  for (let i = 0; i < 100; i++) {
    const middle = (low + high) / 2;
    if (value(middle) > 1) low = middle;
    else high = middle;
  }
  const root = values[pole] + high;
  if (pole > 0 && root < values[0]) return 0;
  return 1 / (gamma * gamma * total * sum(values.map((v, k) => (k < pole ? 0 : power[k] / (root - v) ** 2))));
}

/** The gamma for which K0 + gamma y y^T has the alignment of K1: `featlearn.metrics.feature_rate`. @returns {number} */
export function featureRate(K0, K1, y) {
  const before = alignment(K0, y), after = alignment(K1, y);
  return (Math.sqrt(inner(K0, K0)) / dot(y, y)) * (after * Math.sqrt((1 - before ** 2) / (1 - after ** 2)) - before);
}

/**
 * Tangent kernel of an infinitely wide ReLU network with one hidden layer: `featlearn.theory.infinite_width.ntk`.
 * @param {Matrix} x (P, d) @returns {Matrix}
 */
export function infiniteWidthKernel(x) {
  const scale = 2 / x[0].length;
  const sizes = x.map((row) => scale * dot(row, row));
  return matrix(x.length, x.length, (i, j) => {
    const size = Math.sqrt(sizes[i] * sizes[j]), covariance = scale * dot(x[i], x[j]);
    const angle = i === j ? 0 : Math.acos(Math.min(1, Math.max(-1, covariance / size)));
    const first = (size * (Math.sin(angle) + (Math.PI - angle) * Math.cos(angle))) / Math.PI;
    return first + (covariance * (Math.PI - angle)) / Math.PI;
  });
}
