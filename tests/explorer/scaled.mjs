/** Trains the networks of question 0 and prints weights, kernels and outputs: node scaled.mjs < settings.json */
import { readFileSync } from "node:fs";
import { ScaledNetwork, clouds, cosines } from "../../src/featlearn/explorer/static/networks/scaled.mjs";

const found = JSON.parse(readFileSync(0, "utf8")).map(({ samples, steps, ...settings }) => {
  const data = clouds(samples, settings.dimension, 5), network = new ScaledNetwork(settings);
  const rates = [], losses = [];
  for (let i = 0; i < steps; i++) {
    losses.push(network.step(data));
    rates.push(network.rate);
  }
  return {
    x: data.x.map((row) => [...row]), y: [...data.y], first: { w: network.first.w.map((row) => [...row]), a: [...network.first.a] },
    w: network.w.map((row) => [...row]), a: [...network.a], kernel: network.kernel(data.x), cosines: cosines(network.kernel(data.x)),
    outputs: data.x.map((row) => network.output(row)), turned: network.turned(), error: network.error(data), rates, losses,
  };
});
process.stdout.write(JSON.stringify(found));
