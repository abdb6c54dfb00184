/** Learning curves of kernel regression (Atanasov et al. 2022, App. F, corrected): `featlearn.theory.transfer`. */

/**
 * Error on a task w . x of the kernel x^T (A beta beta^T + 1) x' trained on P samples; w . beta = overlap.
 * @param {number} samples P @param {number} dimension D @param {number} spike A > -1 @param {number} overlap
 * @param {number} ridge @param {number} noise variance of the labels' noise
 * @returns {{error: number, effectiveRidge: number, varianceShare: number}}
 */
export function learningCurve(samples, dimension, spike, overlap, ridge, noise) {
  const values = [1 + spike, 1], counts = [1, dimension - 1];
  const power = [overlap * overlap, 1 - overlap * overlap];
  const kappa = effectiveRidge(samples, values, counts, ridge);
  if (kappa === 0) {
    // samples suffice and there is no ridge: all is learned, noise is amplified
    const share = dimension / samples;
    return { error: noise === 0 ? 0 : (noise * share) / (1 - share), effectiveRidge: 0, varianceShare: share };
  }
  let share = 0, kept = ridge / kappa, wrong = 0;
  values.forEach((value, k) => {
    const below = value * samples + kappa;
    const left = kappa / below, learned = value / below;
    share += samples * counts[k] * learned * learned;
    kept += counts[k] * left * learned; // 1 - g, a sum of positive terms
    wrong += power[k] * left * left;
  });
  return { error: (wrong + noise * share) / kept, effectiveRidge: kappa, varianceShare: share };
}

/** The root of kappa = ridge + kappa sum_k n_k lambda_k / (lambda_k P + kappa) by bisection; 0 if there is none. */
function effectiveRidge(samples, values, counts, ridge) {
  const dimension = counts[0] + counts[1];
  if (ridge === 0 && samples >= dimension) return 0;
  let high = Math.log(ridge + values[0] * counts[0] + values[1] * counts[1]);
  let low = ridge > 0 ? Math.log(ridge) : high - 600;
  for (let i = 0; i < 80; i++) {
    const middle = (low + high) / 2, kappa = Math.exp(middle);
    let right = ridge / kappa;
    values.forEach((value, k) => { right += (counts[k] * value) / (value * samples + kappa); });
    if (right > 1) low = middle;
    else high = middle;
  }
  return Math.exp((low + high) / 2);
}
