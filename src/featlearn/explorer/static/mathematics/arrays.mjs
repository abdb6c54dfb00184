/** Grids, vectors and small dense matrices; a matrix is an array of rows. */

/** @typedef {number[][]} Matrix */

/** @param {number} from @param {number} to @param {number} count @returns {number[]} equally spaced numbers */
export function linspace(from, to, count) {
  return Array.from({ length: count }, (_, i) => (i === count - 1 ? to : from + ((to - from) * i) / (count - 1)));
}

/** @param {number} from @param {number} to @param {number} count @returns {number[]} equally spaced logarithms */
export function logspace(from, to, count) {
  return linspace(Math.log(from), Math.log(to), count).map(Math.exp);
}

/** @param {number[]} values @returns {number} */
export function sum(values) {
  let total = 0;
  for (const value of values) total += value;
  return total;
}

/** @param {ArrayLike<number>} a @param {ArrayLike<number>} b @returns {number} */
export function dot(a, b) {
  let total = 0;
  for (let i = 0; i < a.length; i++) total += a[i] * b[i];
  return total;
}

/** @param {ArrayLike<number>} a @returns {number} Euclidean length */
export function norm(a) {
  return Math.sqrt(dot(a, a));
}

/** @param {number} rows @param {number} columns @param {(i: number, j: number) => number} entry @returns {Matrix} */
export function matrix(rows, columns, entry) {
  return Array.from({ length: rows }, (_, i) => Array.from({ length: columns }, (_, j) => entry(i, j)));
}

/** @param {Matrix} A @returns {Matrix} */
export function transpose(A) {
  return matrix(A[0].length, A.length, (i, j) => A[j][i]);
}

/** @param {Matrix} A @param {Matrix} B @returns {Matrix} A B */
export function product(A, B) {
  const columns = B[0].length;
  return A.map((row) => {
    const out = new Array(columns).fill(0);
    for (let k = 0; k < row.length; k++) {
      const factor = row[k], other = B[k];
      if (factor !== 0) for (let j = 0; j < columns; j++) out[j] += factor * other[j];
    }
    return out;
  });
}

/** @param {Matrix} A @param {ArrayLike<number>} x @returns {number[]} A x */
export function apply(A, x) {
  return A.map((row) => dot(row, x));
}

/** @param {Matrix} A @returns {Matrix} A A^T */
export function gram(A) {
  const out = matrix(A.length, A.length, () => 0);
  for (let i = 0; i < A.length; i++) for (let j = 0; j <= i; j++) out[i][j] = out[j][i] = dot(A[i], A[j]);
  return out;
}

/** @param {Matrix} A @param {Matrix} B @returns {number} sum of the products of all entries */
export function inner(A, B) {
  let total = 0;
  for (let i = 0; i < A.length; i++) total += dot(A[i], B[i]);
  return total;
}

/** @param {Matrix} A @param {Matrix} B @returns {number} cosine of two matrices */
export function cosine(A, B) {
  return inner(A, B) / Math.sqrt(inner(A, A) * inner(B, B));
}

/** @param {Matrix} K @param {ArrayLike<number>} y @returns {number} y^T K y */
export function quadratic(K, y) {
  return dot(y, apply(K, y));
}

/** @param {Matrix} K @param {number[]} y @returns {number} kernel-task alignment y^T K y / (|K| |y|^2) */
export function alignment(K, y) {
  return quadratic(K, y) / (Math.sqrt(inner(K, K)) * dot(y, y));
}
