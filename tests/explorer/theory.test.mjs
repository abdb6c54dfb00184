/** `node --test`: the mathematics of the page against vectors written by the Python theory, in the file VECTORS. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { mathematics } from "../../src/featlearn/explorer/static/mathematics/index.mjs";
import { called, difference } from "./comparison.mjs";

const { vectors, table, normals } = JSON.parse(readFileSync(process.env.VECTORS, "utf8"));

for (const [i, vector] of vectors.entries())
  test(`${vector.call.join(".")} ${i}`, () => assert.equal(difference(called(mathematics, vector), vector.expected), ""));

test("Table 1", () => assert.equal(difference(mathematics.latent.TABLE_1, table), ""));

for (const { seed, numbers } of normals)
  test(`random numbers of seed ${seed}`, () => {
    const random = new mathematics.random.Random(seed);
    assert.equal(difference(numbers.map(() => random.normal()), numbers), "");
  });

test("a wrong number is found", () => {
  assert.notEqual(difference({ a: [1, 2.00001] }, { a: [1, 2] }), "");
  assert.notEqual(difference([1], [1, 2]), "");
  assert.notEqual(difference([NaN], [1]), "");
});
