/** Results that depend on few settings, kept so that sliders move at once. */

const KEPT = new Map();

/** @template T @param {string} key @param {() => T} make @returns {T} */
export function kept(key, make) {
  if (!KEPT.has(key)) KEPT.set(key, make());
  if (KEPT.size > 400) KEPT.delete(KEPT.keys().next().value);
  return KEPT.get(key);
}
