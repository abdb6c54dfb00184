/** Two linear layers on one sample, exactly (Xu & Ziyin 2024): `featlearn.theory.latent` and `theory.phases`. */
import { dot, norm } from "./arrays.mjs";

/**
 * @typedef {object} LatentPath
 * @property {number[]} output @property {number[]} loss @property {number[]} ntk @property {number[]} layerAlignment
 * @property {number[]} normU @property {number[]} normWx @property {number} timeScale @property {number} featureShare
 * @property {number} finalKernel K(x, x) at the end @property {string} mechanism
 */

/**
 * f = scale u . v with v = W x, loss (f - y)^2, du/dt = -rate_u dL/du, dW/dt = -rate_w dL/dW; both rates > 0.
 * @param {number[]} u @param {number[]} v @param {number} rho length of x @param {number} y @param {number[]} times
 * @param {number} scale @param {number} rateU @param {number} rateW @returns {LatentPath}
 */
export function solve(u, v, rho, y, times, scale, rateU, rateW) {
  const rootU = Math.sqrt(rateU), rootW = Math.sqrt(rateW);
  const p = u.map((value, i) => ((rootU * v[i]) / rho + rootW * value) / 2);
  const q = u.map((value, i) => ((rootU * v[i]) / rho - rootW * value) / 2);
  const a = (scale * rho * norm(p)) ** 2, b = (scale * rho * norm(q)) ** 2, s = scale * rho * rootU * rootW * y;
  const omega = Math.hypot(s, 2 * Math.sqrt(a * b));
  const residual = scale * dot(u, v) - y;
  const path = { output: [], loss: [], ntk: [], layerAlignment: [], normU: [], normWx: [] };
  for (const t of times) {
    const { alpha, decay } = growth(t, a, b, s, omega);
    const root = Math.sqrt(alpha);
    const grown = p.map((value) => times0(value, root)), faded = q.map((value) => times0(value, 1 / root));
    const readout = grown.map((value, i) => (value - faded[i]) / rootW);
    const hidden = grown.map((value, i) => (rho * (value + faded[i])) / rootU);
    const sizes = [norm(readout), norm(hidden)];
    path.output.push(y + residual * decay);
    path.loss.push((residual * decay) ** 2);
    path.ntk.push(2 * (times0(a, alpha) + times0(b, 1 / alpha)));
    path.layerAlignment.push(dot(readout, hidden) / (sizes[0] * sizes[1]));
    path.normU.push(sizes[0]);
    path.normWx.push(sizes[1]);
  }
  return { ...path, timeScale: 1 / omega, featureShare: (s / omega) ** 2, finalKernel: 2 * omega, mechanism: mechanism(p, q, y, residual) };
}

/** alpha = N / D and (f - y) / (f(0) - y): N = (Omega + s) + (Omega - s) E + 2 b F, D with s -> -s and a for b. */
function growth(t, a, b, s, omega) {
  const E = Math.exp(-4 * omega * t), F = -Math.expm1(-4 * omega * t);
  // the smaller of Omega + s and Omega - s is 4 a b divided by the larger
  const larger = omega + Math.abs(s), smaller = (4 * a * b) / larger;
  const [plus, minus] = s >= 0 ? [larger, smaller] : [smaller, larger];
  const N = plus + minus * E + 2 * b * F, D = minus + plus * E + 2 * a * F;
  // on the way into a saddle the smaller one is 2 Omega E, and vanishes with E
  const fading = Math.min(N, D) > 0 ? E / Math.min(N, D) : 1 / (2 * omega);
  return { alpha: N / D, decay: (4 * omega * omega * fading) / Math.max(N, D) };
}

/** What is not there at the start never grows: zero times infinity is zero. */
function times0(value, factor) {
  return value === 0 ? 0 : value * factor;
}

function mechanism(p, q, y, residual) {
  if (Math.abs(residual) < 1e-12) return "stationary";
  const sizes = [norm(p), norm(q)];
  const parallel = Math.min(...sizes) === 0 || Math.abs(Math.abs(dot(p, q)) / (sizes[0] * sizes[1]) - 1) < 1e-13;
  if (parallel) return "rescaling";
  return y * residual < 0 ? "alignment" : "disalignment";
}

/** @typedef {"frozen" | "unstable" | "kernel" | "learning"} Phase */

/**
 * Powers of kappa: width d, scale gamma, variances u and w, both learning rates.
 * @typedef {object} Exponents
 * @property {number} d @property {number} gamma @property {number} u @property {number} w @property {number} rate
 */

/** @param {Exponents} c @returns {number} A: power of the part of the squared speed that the target brings */
export function featureTerm(c) {
  return 2 * c.gamma + 2 * c.rate;
}

/** @param {Exponents} c @returns {number} B: power of the initial kernel */
export function kernelTerm(c) {
  return 2 * c.gamma + c.d + c.rate + Math.max(c.u, c.w);
}

/** @param {Exponents} c @returns {Phase} of a start with P / Q -> 1 (Theorem 2) */
export function classify(c) {
  const A = featureTerm(c), B = kernelTerm(c), top = Math.max(A, B);
  if (top < -1e-9) return "frozen";
  if (top > 1e-9) return "unstable";
  return A < -1e-9 ? "kernel" : "learning";
}

/** Table 1, equal rates; `plus` and `minus` are the scalings of Corollaries 2 and 3. */
export const TABLE_1 = {
  ntk: scaling("NTK", { d: 1, gamma: -0.5, u: 0, w: 0 }, 0),
  mean_field: scaling("mean field", { d: 1, gamma: -1, u: 0, w: 0 }, 0),
  xavier: scaling("Xavier", { d: 1, gamma: 0, u: -1, w: -1 }, -2),
  kaiming: scaling("Kaiming", { d: 1, gamma: 0, u: -1, w: 0 }, -1),
  lazy: scaling("lazy", { d: 0, gamma: 1, u: 0, w: 0 }, -2),
};

/** @returns {{label: string, plain: Exponents, stable: Exponents, learning: Exponents, kernel: Exponents}} */
function scaling(label, start, kernelRate) {
  const size = start.d + Math.max(start.u, start.w);
  return {
    label,
    plain: { ...start, rate: 0 },
    stable: { ...start, rate: Math.min(-start.gamma, -2 * start.gamma - size) },
    learning: { ...start, gamma: -size, rate: size },
    kernel: { ...start, gamma: -(size + kernelRate) / 2, rate: kernelRate },
  };
}
