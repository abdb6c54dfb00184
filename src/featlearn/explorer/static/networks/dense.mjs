/** Products of dense matrices, row by row in flat arrays, into arrays that are given: nothing is allocated in training. */

/** out (n, k) = A (n, m) B (m, k) @param {Float64Array} out */
export function multiply(out, A, B, n, m, k) {
  out.fill(0);
  for (let i = 0; i < n; i++)
    for (let l = 0; l < m; l++) {
      const factor = A[i * m + l];
      if (factor === 0) continue;
      for (let j = 0, to = i * k, from = l * k; j < k; j++) out[to + j] += factor * B[from + j];
    }
  return out;
}

/** out (n, k) = A^T B with A (m, n), B (m, k) */
export function multiplyLeft(out, A, B, n, m, k) {
  out.fill(0);
  for (let l = 0; l < m; l++)
    for (let i = 0; i < n; i++) {
      const factor = A[l * n + i];
      if (factor === 0) continue;
      for (let j = 0, to = i * k, from = l * k; j < k; j++) out[to + j] += factor * B[from + j];
    }
  return out;
}

/** out (n, k) = A B^T with A (n, m), B (k, m) */
export function multiplyRight(out, A, B, n, m, k) {
  for (let i = 0; i < n; i++)
    for (let j = 0; j < k; j++) {
      let total = 0;
      for (let l = 0, a = i * m, b = j * m; l < m; l++) total += A[a + l] * B[b + l];
      out[i * k + j] = total;
    }
  return out;
}

/** target -= rate * gradient */
export function descend(target, gradient, rate) {
  for (let i = 0; i < target.length; i++) target[i] -= rate * gradient[i];
}

/** Sum of the squares. @returns {number} */
export function square(A) {
  let total = 0;
  for (let i = 0; i < A.length; i++) total += A[i] * A[i];
  return total;
}

/** <K, y y^T> / (|K| |y|^2) of a flat kernel (P, P). @returns {number} */
export function flatAlignment(K, y) {
  return along(K, y) / Math.sqrt(square(K));
}

/** y^T K y / |y|^2 of a flat kernel. @returns {number} */
export function along(K, y) {
  let overlap = 0, size = 0;
  for (let i = 0; i < y.length; i++) {
    size += y[i] * y[i];
    for (let j = 0; j < y.length; j++) overlap += y[i] * K[i * y.length + j] * y[j];
  }
  return overlap / size;
}

/** Trace of a flat kernel. @returns {number} */
export function trace(K) {
  const size = Math.sqrt(K.length);
  let total = 0;
  for (let i = 0; i < size; i++) total += K[i * (size + 1)];
  return total;
}
