/** Linear networks from small weights (Atanasov et al. 2022): `featlearn.theory.deep_linear`. Time: loss 1/(2P) sum, rate 1. */
import { sum } from "./arrays.mjs";
import { integrate } from "./integration.mjs";

/**
 * Strength of a mode that starts at c0 > 0, toward s > 0: dc/dt = L c^(2 - 2/L) (s - c).
 * @param {number[]} times increasing from 0 on @param {number} s @param {number} c0 @param {number} layers L >= 2
 * @returns {number[]}
 */
export function strength(times, s, c0, layers) {
  if (layers === 2) return times.map((t) => s / (1 + (s / c0 - 1) * Math.exp(-2 * s * t)));
  if (c0 >= s) {
    const path = integrate((c, out) => { out[0] = layers * c[0] ** (2 - 2 / layers) * (s - c[0]); }, [c0], times, 1e-12);
    return path.map((c) => c[0]);
  }
  // x = log(c / (s - c)) moves smoothly: dx/dt = L s c^(1 - 2/L)
  const share = (x) => 1 / (1 + Math.exp(-x));
  const speed = layers * s ** (2 - 2 / layers);
  const path = integrate((x, out) => { out[0] = speed * share(x[0]) ** (1 - 2 / layers); }, [Math.log(c0 / (s - c0))], times, 1e-12);
  return path.map((x) => s * share(x[0]));
}

/**
 * Time at which the loss of a mode is half of that of f = 0: c = s (1 - 1/sqrt 2); nan where the start is beyond.
 * @param {number} s @param {number} c0 @param {number} layers @returns {number}
 */
export function halfTime(s, c0, layers) {
  const wanted = s * (1 - Math.SQRT1_2);
  if (c0 >= wanted) return NaN;
  if (layers === 2) return Math.log((s / c0 - 1) * (Math.SQRT2 - 1)) / (2 * s);
  const logit = (c) => Math.log(c / (s - c));
  const speed = layers * s ** (2 - 2 / layers);
  // time as a function of x = log(c / (s - c)); the state carries x along
  const slope = (state, out) => { out[0] = 1; out[1] = (1 + Math.exp(-state[0])) ** (1 - 2 / layers) / speed; };
  const [, end] = integrate(slope, [logit(c0), 0], [logit(c0), logit(wanted)], 1e-11);
  return end[1];
}

/**
 * Half of the kernel along a mode, q, and its strength, r, of two layers from small weights; |r0| <= q0, s > 0.
 * @param {number[]} times @param {number} q0 @param {number} r0 @param {number} s
 * @returns {{q: number[], r: number[]}}
 */
export function twoLayer(times, q0, r0, s) {
  const aligned = (q0 + r0) / 2, opposed = (q0 - r0) / 2;
  const q = [], r = [];
  for (const t of times) {
    const decay = Math.exp(-2 * s * t);
    const below = decay - (aligned / s) * Math.expm1(-2 * s * t);
    const grown = aligned / below, fading = (opposed * decay * decay) / below;
    q.push(grown + fading);
    r.push(grown - fading);
  }
  return { q, r };
}

/** Averages over a_i ~ N(0, sigma^2 / N), W_ij ~ N(0, sigma^2 / D): the mean of q0. @returns {number} */
export function meanStart(sigma, inputs, width) {
  return (sigma * sigma / 2) * (1 + width / inputs);
}

/**
 * @typedef {object} LinearPath
 * @property {number[][]} strength one list for each mode
 * @property {number[]} loss |f - y|^2, of as many samples as inputs
 * @property {number[]} alignment kernel-task alignment @property {number[]} norm of the kernel
 */

/**
 * Modes of strengths s on whitened inputs X = sqrt(D) 1: everything that follows from their path.
 * @param {number[]} s @param {number} inputs D @param {number[][]} strengths one list for each mode
 * @param {(i: number) => {inside: number[], outside: number}} spectrum of M at times[i], along the modes and across
 * @param {number} count of times @returns {LinearPath}
 */
function path(s, inputs, strengths, spectrum, count) {
  const loss = [], alignment = [], norm = [];
  const power = Math.sqrt(sum(s.map((v) => v ** 4)));
  for (let i = 0; i < count; i++) {
    const { inside, outside } = spectrum(i);
    const size = Math.sqrt(sum(inside.map((v) => v * v)) + (inputs - s.length) * outside * outside);
    loss.push(inputs * sum(s.map((v, a) => (v - strengths[a][i]) ** 2)));
    alignment.push(sum(s.map((v, a) => v * v * inside[a])) / (size * power));
    norm.push(inputs * size);
  }
  return { strength: strengths, loss, alignment, norm };
}

/**
 * Two layers from the typical small start: every mode at the mean of q0, with r0 = 0; C = number of modes.
 * @param {number[]} times @param {number[]} s @param {number} sigma @param {number} inputs @param {number} width
 * @returns {LinearPath}
 */
export function typicalPath(times, s, sigma, inputs, width) {
  const q0 = meanStart(sigma, inputs, width), variance = sigma * sigma;
  const modes = s.map((size) => twoLayer(times, q0, 0, size));
  return path(s, inputs, modes.map((mode) => mode.r), (i) => {
    const grown = modes.map((mode) => mode.q[i] - q0);
    const readout = variance + sum(grown) / s.length;
    const outside = (variance * width) / inputs + readout;
    return { inside: grown.map((more) => outside + more), outside };
  }, times.length);
}

/**
 * A balanced network of any depth, every mode from c0 = sigma^L.
 * @param {number[]} times @param {number[]} s @param {number} sigma @param {number} inputs @param {number} layers
 * @returns {LinearPath}
 */
export function balancedPath(times, s, sigma, inputs, layers) {
  const c = s.map((size) => strength(times, size, sigma ** layers, layers));
  return path(s, inputs, c, (i) => tracedSpectrum(c.map((mode) => mode[i]), layers), times.length);
}

/** Eigenvalues of 1/C sum_c M^cc of a balanced network with C modes: along the modes, and across them. */
function tracedSpectrum(c, layers) {
  const trace = (k) => (k ? sum(c.map((v) => v ** ((2 * k) / layers))) / c.length : 1);
  const outside = trace(layers - 1);
  const inside = c.map((v) => {
    let total = outside;
    for (let layer = 2; layer <= layers; layer++) total += trace(layers - layer) * v ** ((2 * (layer - 1)) / layers);
    return total;
  });
  return { inside, outside };
}
