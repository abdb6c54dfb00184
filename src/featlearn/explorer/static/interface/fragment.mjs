/** The state of the page in the fragment of its address: #topic?key=value&... with what differs from the start. */
import { parsed } from "./controls.mjs";

/** @typedef {import("./controls.mjs").Control} Control */

/** @param {string} topic @param {Control[]} controls @param {Record<string, any>} state @returns {string} */
export function fragment(topic, controls, state) {
  const parts = controls.filter(({ key, value }) => state[key] !== value).map(({ key }) => `${key}=${encodeURIComponent(state[key])}`);
  return `#${topic}${parts.length ? `?${parts.join("&")}` : ""}`;
}

/** Values that a control does not allow are left out. @param {string} hash @param {Record<string, Control[]>} topics */
export function read(hash, topics) {
  const [topic, rest = ""] = hash.replace(/^#/, "").split("?");
  if (!(topic in topics)) return null;
  const given = new URLSearchParams(rest);
  const state = {};
  for (const control of topics[topic]) {
    const value = given.has(control.key) ? parsed(control, given.get(control.key)) : undefined;
    if (value !== undefined) state[control.key] = value;
  }
  return { topic, state };
}
