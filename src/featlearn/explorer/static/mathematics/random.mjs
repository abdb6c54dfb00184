/** Random numbers that Python repeats in three lines: the generator of Park and Miller, and normal numbers from it. */

const MODULUS = 2147483647; // 2^31 - 1; products with the multiplier stay below 2^53
const MULTIPLIER = 48271;

/** A seeded source of random numbers. */
export class Random {
  /** @param {number} seed a whole number >= 0 */
  constructor(seed) {
    this.state = 1 + ((seed * 7919) % (MODULUS - 1));
    for (let i = 0; i < 8; i++) this.uniform(); // neighboring seeds part
  }

  /** @returns {number} above 0 and below 1 */
  uniform() {
    this.state = (this.state * MULTIPLIER) % MODULUS;
    return this.state / MODULUS;
  }

  /** @returns {number} of mean 0 and variance 1 */
  normal() {
    const radius = Math.sqrt(-2 * Math.log(this.uniform()));
    return radius * Math.cos(2 * Math.PI * this.uniform());
  }

  /** @param {number} count @param {number} [deviation] @returns {Float64Array} */
  normals(count, deviation = 1) {
    return Float64Array.from({ length: count }, () => deviation * this.normal());
  }
}
