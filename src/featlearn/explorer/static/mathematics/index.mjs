/** All theories of the page under one name, for tests and for the console. */
import * as arrays from "./arrays.mjs";
import * as deepLinear from "./deep_linear.mjs";
import * as early from "./early.mjs";
import * as latent from "./latent.mjs";
import * as ofe from "./ofe.mjs";
import * as random from "./random.mjs";
import * as relu from "./relu.mjs";
import * as transfer from "./transfer.mjs";

export const mathematics = { arrays, deepLinear, early, latent, ofe, random, relu, transfer };
