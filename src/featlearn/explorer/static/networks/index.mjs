/** The networks that train in the page, by the name of their topic. */
import { DeepLinearRun } from "./deep_linear.mjs";
import { FeatureRun } from "./features.mjs";
import { GrowthRun } from "./growth.mjs";
import { LatentRun } from "./latent.mjs";
import { RichRun } from "./rich.mjs";
import { TransferRun } from "./transfer.mjs";

/**
 * A run: `advance()` makes one step, `measure()` returns points of charts at the present `time`; it is over at `end`.
 * @typedef {object} Run
 * @property {number} step @property {number} time @property {number} end @property {number} parameters
 * @property {() => void} advance @property {() => Point[]} measure @property {() => string} [said] what a reader should know
 * @property {() => {label: string, set: object} | null} [suggested] values of the theory that fit it @property {boolean} [failed] it has diverged
 *
 * A point of a chart: at the present time unless it has its own x; `replace` the one at the same x, `fresh`: drop all others.
 * @typedef {{chart: string, series: number, y: number, x?: number, error?: number, replace?: boolean, fresh?: boolean}} Point
 */

/** @type {Record<string, new (setting: any) => Run>} */
export const RUNS = { rich: RichRun, silent: DeepLinearRun, mechanism: LatentRun, growth: GrowthRun, features: FeatureRun, transfer: TransferRun };

/** A loss above this, where 1 is that of f = 0, is that of a run that diverges. */
const FAILED = 20;

/** Largest number of measurements along a run. */
export const MEASUREMENTS = 48;

/** Times at which a run is measured: equally spaced from 0 to its end. */
export class Schedule {
  /** @param {Run} run */
  constructor(run) {
    this.run = run;
    this.next = 0;
  }

  /** Whether a measurement is due; asking moves on to the next. @returns {boolean} */
  due() {
    const { time, end } = this.run;
    if (time + 1e-12 < (this.next / MEASUREMENTS) * end) return false;
    this.next = Math.floor((time / end) * MEASUREMENTS + 1e-9) + 1;
    return true;
  }

  /** @returns {boolean} */
  get over() {
    return this.run.time >= this.run.end - 1e-12 || this.run.failed === true;
  }
}

/** What is measured now, each point at the present time unless it has its own place; diverged runs are marked. */
export function measured(run) {
  const points = run.measure().map((point) => ({ x: run.time, ...point }));
  const lost = points.some(({ chart, y }) => !Number.isFinite(y) || Math.abs(y) > 1e12 || (chart === "loss" && y > FAILED));
  if (lost) run.failed = true;
  return points.filter(({ y }) => Number.isFinite(y));
}
