/** Ordinary differential equations: the method of Dormand and Prince with steps of adapted size. */

const NODES = [
  [1 / 5],
  [3 / 40, 9 / 40],
  [44 / 45, -56 / 15, 32 / 9],
  [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729],
  [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656],
  [35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
];
const ERROR = [71 / 57600, 0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40];

/**
 * The solution of dx/dt = velocity(x), which does not depend on time, at increasing times from `times[0]` on.
 * @param {(state: Float64Array, out: Float64Array) => void} velocity
 * @param {ArrayLike<number>} start the state at times[0]
 * @param {number[]} times
 * @param {number} [tolerance] relative; a thousandth of it absolute
 * @returns {Float64Array[]} a state for each time
 */
export function integrate(velocity, start, times, tolerance = 1e-9) {
  const size = start.length;
  const slopes = Array.from({ length: 7 }, () => new Float64Array(size));
  const trial = new Float64Array(size);
  let state = Float64Array.from(start);
  const found = [Float64Array.from(state)];
  let now = times[0], step = (times[times.length - 1] - now) / 1000 || 1;
  velocity(state, slopes[0]);
  for (const end of times.slice(1)) {
    while (now < end) {
      const size_ = Math.min(step, end - now);
      const error = attempt(velocity, state, slopes, trial, size_, tolerance);
      if (error <= 1 || size_ < 1e-14 * Math.max(1, Math.abs(end))) {
        now = size_ === end - now ? end : now + size_;
        state = Float64Array.from(trial);
        [slopes[0], slopes[6]] = [slopes[6], slopes[0]]; // the last slope is the first of the next step
        if (size_ === step || error > 1e-3) step = size_ * Math.min(5, 0.9 * (error || 1e-10) ** -0.2);
      } else step = size_ * Math.max(0.1, 0.9 * error ** -0.2);
    }
    found.push(Float64Array.from(state));
  }
  return found;
}

/** One step into `trial`; returns its error in units of the tolerance. */
function attempt(velocity, state, slopes, trial, step, tolerance) {
  for (let stage = 0; stage < 6; stage++) {
    for (let i = 0; i < state.length; i++) {
      let moved = 0;
      for (let k = 0; k <= stage; k++) moved += NODES[stage][k] * slopes[k][i];
      trial[i] = state[i] + step * moved;
    }
    velocity(trial, slopes[stage + 1]);
  }
  let worst = 0;
  for (let i = 0; i < state.length; i++) {
    let error = 0;
    for (let k = 0; k < 7; k++) error += ERROR[k] * slopes[k][i];
    const size = tolerance * (1e-3 + Math.max(Math.abs(state[i]), Math.abs(trial[i])));
    worst = Math.max(worst, Math.abs(step * error) / size);
  }
  return Number.isFinite(worst) ? worst : 1e10;
}
