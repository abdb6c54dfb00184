/** Prints what the page draws for states of its topics, and the Python code of each: node curves.mjs < states.json */
import { readFileSync } from "node:fs";
import { TOPICS } from "../../src/featlearn/explorer/static/topics/index.mjs";

const initial = ({ controls, networkControls }) => Object.fromEntries([...controls, ...networkControls].map(({ key, value }) => [key, value]));

const asked = JSON.parse(readFileSync(0, "utf8"));
const found = asked.map(({ topic, set }) => {
  const state = { ...initial(TOPICS[topic]), ...set };
  const { charts } = TOPICS[topic].theory(state);
  const curves = Object.fromEntries(Object.values(charts).flatMap(({ x, lines }) => lines.map(({ name, y }) => [name, { x, y }])));
  return { topic, set, python: TOPICS[topic].python(state), curves };
});
process.stdout.write(JSON.stringify(found));
