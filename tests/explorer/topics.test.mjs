/** `node --test`: no place of the sliders breaks a line, a sentence or a network. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { fitted } from "../../src/featlearn/explorer/static/interface/controls.mjs";
import { Random } from "../../src/featlearn/explorer/static/mathematics/random.mjs";
import { RUNS, measured } from "../../src/featlearn/explorer/static/networks/index.mjs";
import { TOPICS } from "../../src/featlearn/explorer/static/topics/index.mjs";

const PLACES = 24;

/** A random value of a control: often one of its ends. */
function value(control, random) {
  const { options, min, max, log } = control, share = random.uniform();
  if (options) return options[Math.floor(share * options.length)][0];
  const place = share < 0.25 ? 0 : share > 0.75 ? 1 : random.uniform();
  return fitted(control, log ? min * (max / min) ** place : min + (max - min) * place);
}

for (const topic of Object.values(TOPICS))
  test(topic.key, () => {
    const random = new Random(3), controls = [...topic.controls, ...topic.networkControls];
    for (let i = 0; i < PLACES; i++) {
      const state = Object.fromEntries(controls.map((control) => [control.key, value(control, random)])), said = JSON.stringify(state);
      const { charts, said: sentence } = topic.theory(state);
      assert.deepEqual(Object.keys(charts).sort(), topic.charts.map(({ key }) => key).sort());
      for (const { x, lines } of Object.values(charts))
        for (const { name, y } of lines) {
          assert.equal(y.length, x.length, `${name} ${said}`);
          assert.ok(y.every((v) => v === null || Number.isFinite(v)), `${name} ${said}: ${y}`);
        }
      assert.ok(!/NaN|undefined|Infinity|null/.test(sentence), `${sentence} ${said}`);
      assert.ok(!/NaN|undefined|Infinity/.test(topic.python(state)), said);
      if (i % 12) continue;
      const run = new RUNS[topic.key](topic.experiment(state));
      for (let step = 0; step < 3 && !run.failed; step++) {
        assert.ok(measured(run).every(({ x, y }) => Number.isFinite(x) && Number.isFinite(y)), said);
        run.advance();
      }
    }
  });
