/** Trains networks of the page and prints their weights and measurements before and after: node networks.mjs < settings.json */
import { readFileSync } from "node:fs";
import { RUNS } from "../../src/featlearn/explorer/static/networks/index.mjs";

/** Weights by name, from wherever a run keeps them. */
function weights(run) {
  const network = run.network ?? run;
  const named = { u: network.u, W: network.W, V: network.V, x: network.x?.flat?.(), mixtureW: run.mixture?.W, mixtureV: run.mixture?.V, mixtureX: run.mixture?.inputs };
  (network.weights ?? []).forEach((W, l) => { named[`layer${l}`] = W; });
  return Object.fromEntries(Object.entries(named).filter(([, value]) => value).map(([key, value]) => [key, Array.from(value)]));
}

const found = JSON.parse(readFileSync(0, "utf8")).map(({ topic, setting, steps }) => {
  const run = new RUNS[topic](setting);
  const before = { weights: weights(run), points: run.measure() };
  for (let i = 0; i < steps; i++) run.advance();
  return { before, after: { weights: weights(run), points: run.measure() } };
});
process.stdout.write(JSON.stringify(found));
