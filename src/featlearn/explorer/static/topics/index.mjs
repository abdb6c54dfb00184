/** The topics, in the order of the page. */
import { mechanism } from "./mechanism.mjs";
import { silent } from "./silent.mjs";

/**
 * A question with its picture: `controls` of the theory and of the network, `theory(state)` what is drawn, `python(state)`
 * the code that draws the same, `experiment(state)` what trains in the worker.
 * @typedef {object} Topic
 */

/** @type {Record<string, Topic>} */
export const TOPICS = { silent, mechanism };
