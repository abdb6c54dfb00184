/** The topics, in the order of the page. */
import { features } from "./features.mjs";
import { growth } from "./growth.mjs";
import { mechanism } from "./mechanism.mjs";
import { rich } from "./rich.mjs";
import { silent } from "./silent.mjs";
import { transfer } from "./transfer.mjs";

/**
 * A question with its picture: `controls` of the theory and of the network, `theory(state)` what is drawn, `python(state)`
 * the code that draws the same, `experiment(state)` what trains in the worker.
 * @typedef {object} Topic
 * @property {string} key @property {string} question @property {string} lead
 * @property {import("../interface/controls.mjs").Control[]} controls
 * @property {import("../interface/controls.mjs").Control[]} networkControls
 * @property {import("../interface/chart.mjs").ChartSpec[]} charts
 * @property {{label: string, set: object, say: string}[]} examples @property {string} formula @property {string} fails
 * @property {(state: any) => {charts: Record<string, import("../interface/chart.mjs").Picture>, said: string}} theory
 * @property {(state: any) => string} python @property {(state: any) => object} experiment
 * @property {(set: (values: object) => void) => {figure: HTMLElement, draw: (state: any) => void}} [extra] a picture of its own
 */

/** @type {Record<string, Topic>} */
export const TOPICS = { rich, silent, mechanism, growth, features, transfer };
