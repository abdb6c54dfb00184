/** Compares what the mathematics of the page returns with what `featlearn.theory` wrote down. */

/** The largest number in a value, which sets the floor of relative errors. */
function scale(value) {
  if (typeof value === "number") return Math.abs(value);
  return value && typeof value === "object" ? Math.max(0, ...Object.values(value).map(scale)) : 0;
}

/** The first difference above 1e-6, as a sentence; an empty string for none. Only what is expected is looked at. */
export function difference(given, expected, floor = scale(expected), place = "result") {
  if (typeof expected === "number") {
    if (Number.isFinite(given) && Math.abs(given - expected) <= 1e-6 * (Math.abs(expected) + 1e-3 * floor)) return "";
    return `${place} is ${given}, expected ${expected}`;
  }
  if (typeof expected === "string") return given === expected ? "" : `${place} is ${given}, expected ${expected}`;
  if (Array.isArray(expected) && given?.length !== expected.length) return `${place} has ${given?.length} entries, expected ${expected.length}`;
  for (const [key, value] of Object.entries(expected)) {
    const found = difference(given?.[key], value, Array.isArray(expected) ? floor : scale(value), `${place}.${key}`);
    if (found) return found;
  }
  return "";
}

/** The result of a vector's call; an argument {basis: [K0, y]} stands for what ofe.basis returns. */
export function called(mathematics, { call: [module, name], arguments: given }) {
  const ready = given.map((one) => (one?.basis ? mathematics.ofe.basis(...one.basis) : one));
  return mathematics[module][name](...ready);
}

/** One sentence for each vector that fails. */
export function failures(mathematics, vectors) {
  return vectors.flatMap((vector, i) => {
    const found = difference(called(mathematics, vector), vector.expected);
    return found ? [`vector ${i}, ${vector.call.join(".")}: ${found}`] : [];
  });
}
