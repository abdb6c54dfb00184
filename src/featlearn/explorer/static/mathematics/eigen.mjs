/** Eigenvalues of small symmetric matrices. */

/** @typedef {import("./arrays.mjs").Matrix} Matrix */

/**
 * Jacobi's method: rotations in pairs of axes until nothing is left off the diagonal.
 * @param {Matrix} symmetric
 * @returns {{values: number[], vectors: Matrix}} values descend; vectors[k] belongs to values[k]
 */
export function eigen(symmetric) {
  const size = symmetric.length;
  const A = symmetric.map((row) => Float64Array.from(row));
  const V = Array.from({ length: size }, (_, i) => Float64Array.from({ length: size }, (_, j) => (i === j ? 1 : 0)));
  let scale = 0;
  for (const row of A) for (const entry of row) scale += entry * entry;
  for (let sweep = 0; sweep < 60; sweep++) {
    let off = 0;
    for (let p = 0; p < size; p++) for (let q = p + 1; q < size; q++) off += A[p][q] * A[p][q];
    if (off <= 1e-30 * scale) break;
    for (let p = 0; p < size; p++) for (let q = p + 1; q < size; q++) rotate(A, V, p, q);
  }
  const order = [...V.keys()].sort((i, j) => A[j][j] - A[i][i]);
  return { values: order.map((k) => A[k][k]), vectors: order.map((k) => Array.from(V[k])) };
}

/** @param {Float64Array[]} A @param {Float64Array[]} V rows are the axes @param {number} p @param {number} q */
function rotate(A, V, p, q) {
  const off = A[p][q];
  if (off === 0) return;
  const theta = (A[q][q] - A[p][p]) / (2 * off);
  const t = (theta >= 0 ? 1 : -1) / (Math.abs(theta) + Math.sqrt(theta * theta + 1));
  const c = 1 / Math.sqrt(t * t + 1), s = t * c;
  for (let k = 0; k < A.length; k++) {
    const a = A[k][p], b = A[k][q];
    A[k][p] = c * a - s * b;
    A[k][q] = s * a + c * b;
  }
  const P = A[p], Q = A[q], U = V[p], W = V[q];
  for (let k = 0; k < A.length; k++) {
    const a = P[k], b = Q[k], u = U[k], w = W[k];
    P[k] = c * a - s * b;
    Q[k] = s * a + c * b;
    U[k] = c * u - s * w;
    W[k] = s * u + c * w;
  }
}
