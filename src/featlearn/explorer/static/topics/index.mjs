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
 */

/** @type {Record<string, Topic>} */
export const TOPICS = { rich, silent, mechanism, growth, features, transfer };
