/** Why is a network silent before it learns? Deep linear networks (Atanasov et al. 2022). */
import { linspace, sum } from "../mathematics/arrays.mjs";
import { balancedPath, halfTime, meanStart, typicalPath } from "../mathematics/deep_linear.mjs";
import { displayed, inline } from "./formula.mjs";
import { list, number, script } from "./python.mjs";

const INPUTS = 32, POINTS = 121;

/** @returns {number[]} strengths of the modes, largest first */
const modes = ({ modes: count, gap }) => Array.from({ length: count }, (_, a) => gap ** a);

/** Whether the lines start from random weights: two layers can; deeper ones have a theory for balanced weights alone. */
const random = ({ layers, start }) => layers === 2 && start === "random";

/** Strength from which the first mode starts: q0 / 2 of a random start, sigma^L of a balanced one. */
const start = (state) => (random(state) ? meanStart(state.sigma, INPUTS, state.width) / 2 : state.sigma ** state.layers);

/** When half of the first mode's loss is gone; 0 if it is gone from the start. */
const silentTime = (state) => halfTime(1, start(state), state.layers) || 0;

/** The last time of the charts: twice the silent time, and long enough for the last mode. */
function end(state) {
  const s = modes(state), last = halfTime(s[s.length - 1], start(state), state.layers) || 0;
  return Number((Math.max(2 * silentTime(state), 1.25 * last, 1, 25 * state.rate) + 1.5 / s[s.length - 1]).toPrecision(3));
}

function path(state) {
  const times = linspace(0, end(state), POINTS), s = modes(state);
  const found = random(state) ? typicalPath(times, s, state.sigma, INPUTS, state.width)
    : balancedPath(times, s, state.sigma, INPUTS, state.layers);
  return { times, s, ...found };
}

function theory(state) {
  const { times, s, strength, loss, alignment, norm } = path(state);
  const silent = silentTime(state), whole = INPUTS * sum(s.map((v) => v * v));
  const window = silent > 0.02 * times[POINTS - 1] ? { from: 0, to: silent, label: "silent" } : undefined;
  const best = alignment[POINTS - 1];
  const aligned = times[alignment.findIndex((a) => a >= 0.9 * best)];
  const picture = (lines, more = {}) => ({ x: times, lines, window, ...more });
  return {
    charts: {
      loss: picture([{ name: "loss", label: "theory", color: 0, y: loss.map((v) => v / whole) }]),
      alignment: picture([{ name: "alignment", label: "theory", color: 1, y: alignment }]),
      norm: picture([{ name: "norm", label: "theory", color: 2, y: norm }]),
      strength: picture(s.map((size, a) => ({ name: `strength ${a + 1}`, label: `mode of size ${Number(size.toPrecision(3))}`, color: [0, 1, 2][a], y: strength[a] }))),
    },
    said: `${sentence(state, silent, aligned)}`,
    end: times[POINTS - 1],
  };
}

function sentence(state, silent, aligned) {
  const time = (t) => Number(t.toPrecision(3));
  if (!(silent > 0)) return "With weights as large as this there is <strong>no silence</strong>: the loss falls from the first step.";
  const begin = `Small weights make a small kernel, and a small kernel learns slowly: the loss stays for <strong>${time(silent)}</strong> units of time, then halves.`;
  const size = state.layers === 2 ? "With two layers, weights ten times smaller add only a constant, log 10 ≈ 2.3." : `With ${state.layers} layers, weights ten times smaller make the silence about ${10 ** (state.layers - 2)} times longer.`;
  const turn = random(state) ? ` By then the kernel has long turned: nine tenths of its alignment are reached at <strong>${time(aligned)}</strong>.`
    : state.start === "balanced" ? " The layers are in line with the task from the start: nothing is left to turn." : " The theory starts from layers that are in line already; those of the network have to turn first, and do so in the silence: look at the points of the alignment.";
  return `${begin}${turn} ${size}`;
}

function python(state) {
  const common = `D, N, sigma, layers = ${INPUTS}, ${state.width}, ${number(state.sigma)}, ${state.layers}  # inputs, width, size of weights, depth
s = torch.tensor(${list(modes(state))}, dtype=torch.float64)  # strengths of the teacher's modes
X = D**0.5 * torch.eye(D, dtype=torch.float64)  # whitened
Y = X[:, : len(s)] * s
times = torch.linspace(0, ${number(end(state))}, ${POINTS}, dtype=torch.float64)
`;
  const two = `start = fl.theory.deep_linear.initial_statistics(sigma, D, N)
q, r = fl.theory.deep_linear.two_layer(times[:, None], start.mean_q0, 0.0, s)
grown = torch.nn.functional.pad(q - start.mean_q0, (0, D - len(s)))  # of the kernel along each input
across = sigma**2 * N / D + sigma**2 + grown.sum(1, keepdim=True) / len(s)
kernels = D * torch.diag_embed(across + grown)
curves = {
    "loss": (times, (s - r).square().sum(1) / s.square().sum()),
    "alignment": (times, torch.stack([fl.metrics.alignment(K, Y) for K in kernels])),
    "norm": (times, torch.linalg.matrix_norm(kernels)),
    **{f"strength {a + 1}": (times, r[:, a]) for a in range(len(s))},
}
silent = fl.theory.deep_linear.half_time(s[0], start.mean_q0 / 2, layers)
`;
  const deep = `path = fl.theory.deep_linear.solve(X, Y, times=times, c0=sigma**layers, weight_layers=layers, rate=1 / D)
curves = {
    "loss": (times, path.loss / Y.square().sum()),
    "alignment": (times, path.alignment),
    "norm": (times, path.kernel_norm),
    **{f"strength {a + 1}": (times, path.strength[:, a]) for a in range(len(s))},
}
silent = fl.theory.deep_linear.half_time(s[0], sigma**layers, layers)
`;
  return script(common + (random(state) ? two : deep));
}

const experiment = (state) => ({
  inputs: INPUTS, width: state.width, layers: state.layers, modes: modes(state), sigma: state.sigma, spread: state.spread,
  rate: state.rate, end: end(state), seed: state.seed, start: state.start,
});

const time = { label: "time (steps × learning rate)" };

export const silent = {
  key: "silent",
  question: "Why is a network silent before it learns?",
  lead: "Start a linear network from small weights: the loss does not move for a long time, then it falls at once. Nothing seems to happen in the silence. Look at the kernel.",
  controls: [
    { key: "sigma", label: "Size of the first weights", symbol: "σ", min: 0.01, max: 1, log: true, value: 0.02, hint: "small weights make it silent" },
    { key: "layers", label: "Layers", symbol: "L", min: 2, max: 4, whole: true, value: 2 },
    { key: "modes", label: "Modes of the task", min: 1, max: 3, whole: true, value: 1 },
    { key: "gap", label: "Size of each mode over the one before", min: 0.3, max: 0.9, value: 0.5, hint: "with two modes or three" },
    { key: "start", label: "First weights", value: "random", options: [["random", "random"], ["balanced", "in line with the task (balanced)"]] },
  ],
  networkControls: [
    { key: "width", label: "Width", symbol: "N", min: 4, max: 96, whole: true, value: 64 },
    { key: "spread", label: "Unwhitened inputs", min: 0, max: 1.5, value: 0, hint: "0: all directions alike, as the theory assumes" },
    { key: "rate", label: "Learning rate", symbol: "η", min: 0.005, max: 3, log: true, value: 0.02 },
    { key: "seed", label: "Seed", min: 0, max: 99, whole: true, value: 0 },
  ],
  charts: [
    { key: "loss", title: "The loss: silent, then a fall", x: time, y: { label: "share of the first loss", least: [0, 1] }, caption: "The shaded time is the silent time, until half of the loss is gone." },
    { key: "alignment", title: "Meanwhile the kernel turns", x: time, y: { label: "kernel-task alignment", least: [0, 0.5] }, caption: "It reaches its height inside the shaded time: <em>silent alignment</em>." },
    { key: "norm", title: "The kernel grows when the loss falls", x: time, y: { label: "norm of the kernel", least: [0, 1] }, caption: "Speed of learning is the size of the kernel, and that is small at first." },
    { key: "strength", title: "What has been learned", x: time, y: { label: "strength of each mode", least: [0, 1] }, caption: "Modes are learned one after the other, the largest first." },
  ],
  examples: [
    { label: "larger weights", set: { sigma: 0.3 }, say: "The silence is short: the kernel is not small any more." },
    { label: "large weights (fails)", set: { sigma: 0.9 }, say: "No silence: the kernel is large from the start, and turns less. The lines are for small weights and no longer hold." },
    { label: "tiny weights", set: { sigma: 0.01 }, say: "A hundredth of the size: the silence grows by a constant for each factor of ten." },
    { label: "three layers", set: { layers: 3, sigma: 0.1, rate: 0.05 }, say: "With depth the silence grows as a power of the size: two out of three factors are tiny in every gradient." },
    { label: "three modes", set: { modes: 3 }, say: "A silence before every mode: the loss falls in steps." },
    { label: "unwhitened data (fails)", set: { spread: 1 }, say: "Directions of large variance are learned first; the kernel turns to them, not to the task, and turns again later. The lines are for whitened inputs." },
    { label: "too large a rate (fails)", set: { rate: 1.3 }, say: "Once the kernel has grown, the steps overshoot, and go on overshooting. The theory is gradient flow: it knows no step size. From a rate of 2 on, everything diverges." },
    { label: "narrow (fails)", set: { width: 4 }, say: "Four hidden units, one draw: the start is far from the average that the lines assume. Try other seeds." },
  ],
  formula: `<p>A mode of strength ${inline("s")}, learned up to ${inline("c")}, in a network of ${inline("L")} layers:</p>
${displayed("\\frac{d c}{d t} = L c^{2 - 2/L} (s - c)")}
<p>The factor before the bracket is the kernel. It vanishes with ${inline("c")}: <strong>small weights make a small kernel, and a small kernel learns slowly</strong>. The silent time is</p>
${displayed("t_{1/2} \\approx \\frac{1}{2s} \\text{log} \\frac{0.41 s}{c_0} \\quad (L = 2) , \\quad t_{1/2} \\approx \\frac{\\sigma^{2-L}}{s (L-2)} \\quad (L > 2)")}
<p>For two layers the kernel in the silence is ${inline("M_0 + (q - q_0)(1 + \\beta \\beta^{\\top})")}: it turns toward the task ${inline("\\beta")} as soon as ${inline("q - q_0")} exceeds its tiny first value, long before the output ${inline("c")} is of size ${inline("s")}. Atanasov et al. 2022, with the factor L that the print leaves out.</p>`,
  fails: "<p>The lines hold for whitened inputs, small steps, and weights small enough that only the average start matters. Move <em>Unwhitened inputs</em>, <em>Learning rate</em> and <em>Width</em> and watch the points leave the lines. The lines take the average of random weights, alike in all directions; real ones are not, and their kernel starts less aligned, the narrower the more. From three layers on, the lines start balanced: the random network is a little later, by a factor that does not depend on the size.</p>",
  theory, python, experiment,
};
