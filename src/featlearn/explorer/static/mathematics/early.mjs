/** The first moments of neural features (Beaglehole et al. 2024): `featlearn.theory.early`. */
import { cosine, dot, gram, inner, matrix, norm, product, transpose } from "./arrays.mjs";

/** @typedef {import("./arrays.mjs").Matrix} Matrix */
/** @typedef {"relu" | "quadratic"} Activation */

/**
 * Expectation over networks of the first layer's pre-activation tangent kernel, (n, n).
 * @param {Matrix} X (n, d) @param {number} width of all hidden layers @param {Activation} activation
 * @param {1 | 2} hiddenLayers @param {number[]} variances of the weights, first layer first @returns {Matrix}
 */
export function expectedPtk(X, width, activation, hiddenLayers, variances) {
  return activation === "relu" ? relu(X, width, hiddenLayers, variances) : quadraticPtk(X, width, hiddenLayers, variances);
}

function relu(X, width, hiddenLayers, variances) {
  const unit = X.map((row) => { const size = norm(row); return row.map((v) => v / size); });
  const readout = variances[variances.length - 1];
  return matrix(X.length, X.length, (i, j) => {
    let apart = 0, together = 0;
    for (let k = 0; k < unit[i].length; k++) {
      apart += (unit[i][k] - unit[j][k]) ** 2;
      together += (unit[i][k] + unit[j][k]) ** 2;
    }
    const angle = 2 * Math.atan2(Math.sqrt(apart), Math.sqrt(together));
    const kernel = (width * readout * (1 - angle / Math.PI)) / 2;
    if (hiddenLayers === 1) return kernel;
    const gap = 2 * Math.sin(angle / 2) ** 2 - (Math.sin(angle) - angle * Math.cos(angle)) / Math.PI;
    const after = 2 * Math.asin(Math.sqrt(Math.min(1, Math.max(0, gap / 2))));
    return (kernel * width * variances[1] * (1 - after / Math.PI)) / 2;
  });
}

function quadraticPtk(X, width, hiddenLayers, variances) {
  const S = gram(X), own = S.map((row, i) => variances[0] * row[i]);
  const readout = variances[variances.length - 1];
  return matrix(X.length, X.length, (i, j) => {
    const covariance = variances[0] * S[i][j];
    if (hiddenLayers === 1) return 4 * width * readout * covariance;
    const sizes = own[i] * own[j];
    const pairs = covariance * (sizes + 2 * covariance ** 2), single = 9 * sizes * covariance + 6 * covariance ** 3;
    return 16 * readout * variances[1] ** 2 * width * (width * (width - 1) * pairs + 3 * width * single);
  });
}

/**
 * Cosine of X^T L calK L X and X^T L calK^2 L X: where the centered correlation of features and gradients starts (Eq. 6).
 * @param {Matrix} X @param {number[]} residual dL/df, or the targets where f = 0 @param {Matrix} ptk @returns {number}
 */
export function derivativeCorrelation(X, residual, ptk) {
  const weighted = X.map((row, i) => row.map((v) => residual[i] * v));
  const carried = transpose(product(ptk, weighted)), columns = transpose(weighted);
  return cosine(matrix(columns.length, columns.length, (i, j) => dot(columns[i], carried[j])), gram(carried));
}

/** A = (X^T Y X)^2 and B = X^T X. @param {Matrix} X @param {number[]} y @returns {{A: Matrix, B: Matrix}} */
export function dataMatrices(X, y) {
  const columns = transpose(X);
  const weighted = matrix(columns.length, columns.length, (i, j) => {
    let total = 0;
    for (let m = 0; m < y.length; m++) total += columns[i][m] * y[m] * columns[j][m];
    return total;
  });
  return { A: product(weighted, weighted), B: gram(columns) };
}

/** r_1 to r_4 of R = W^T diag(a^2) W for large width and dimension, from free cumulants. @returns {number[]} */
export function quadraticMoments(width, dimension) {
  const ratio = dimension / width;
  const [k1, k2, k3, k4] = [1, 3 * ratio, 15 * ratio ** 2, 105 * ratio ** 3];
  return [k1, k2 + k1 ** 2, k3 + 3 * k1 * k2 + k1 ** 3, k4 + 4 * k1 * k3 + 2 * k2 ** 2 + 6 * k1 ** 2 * k2 + k1 ** 4];
}

/**
 * The early correlation of a wide quadratic network with one hidden layer (App. E, Eq. 26 corrected).
 * @param {Matrix} A @param {Matrix} B @param {number[]} moments @returns {number}
 */
export function freeProbability(A, B, [r1, r2, r3, r4]) {
  const d = A.length;
  const centered = (M, mean) => M.map((row, i) => row.map((v, j) => (i === j ? v - mean : v)));
  const trace = (M) => M.reduce((total, row, i) => total + row[i], 0) / d;
  const a = trace(A), b = trace(B), Ab = centered(A, a), Bb = centered(B, b), both = product(Ab, Bb);
  const aa = inner(Ab, Ab) / d, bb = inner(Bb, Bb) / d, ab = inner(Ab, Bb) / d;
  const aab = inner(Ab, both) / d, abb = inner(both, Bb) / d, abab = inner(both, transpose(both)) / d;
  const numerator = a ** 2 * b * r3 + 2 * a * r1 * r2 * ab + b * r1 * r2 * aa + r1 ** 3 * aab;
  const first = aa * r1 ** 2 + a ** 2 * r2;
  const second = r1 ** 4 * abab + 2 * r1 ** 2 * (r2 - r1 ** 2) * ab ** 2 + 2 * r1 ** 2 * r2 * (b * aab + a * abb)
    + 4 * a * b * r1 * r3 * ab + a ** 2 * b ** 2 * r4 + (a ** 2 * bb + b ** 2 * aa) * r2 ** 2;
  return numerator / Math.sqrt(first * second);
}
