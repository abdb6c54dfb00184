/** Which part of a ReLU kernel turns? Growth along and across the labels, mixtures (Shan & Bordelon 2021). */
import { linspace, matrix } from "../mathematics/arrays.mjs";
import { mixtureRates, solve } from "../mathematics/relu.mjs";
import { alternating } from "../networks/growth.mjs";
import { displayed, inline } from "./formula.mjs";
import { kept } from "./kept.mjs";
import { number, script } from "./python.mjs";

const POINTS = 81, CLASSES = 3;

/** Kernels of a wide network on orthonormal inputs: (1/2, 1/2 pi) and 1/2 on the diagonal. */
function kernels({ samples, size, ratio }) {
  return { KV: matrix(samples, samples, (i, j) => (size * ratio) / (i === j ? 2 : 2 * Math.PI)), KW: matrix(samples, samples, (i, j) => (i === j ? size / 2 : 0)) };
}

/** Long enough for the loss to fall to a hundredth, in two digits. */
function end(state) {
  return kept(`end ${state.samples} ${state.size} ${state.ratio}`, () => {
    const { KV, KW } = kernels(state), times = linspace(0, 24 / state.size / (1 + state.ratio), 49);
    const { loss } = solve(KV, KW, alternating(state.samples), times, 1, 1e-6);
    const found = loss.findIndex((v) => v < 0.01 * state.samples);
    return Number(times[found < 0 ? times.length - 1 : Math.max(4, found)].toPrecision(2));
  });
}

function theory(state) {
  const { KV, KW } = kernels(state), times = linspace(0, end(state), POINTS);
  const path = kept(`path ${state.samples} ${state.size} ${state.ratio}`, () => solve(KV, KW, alternating(state.samples), times, 1));
  const grown = (values) => values.map((v) => v - values[0]);
  const outputs = linspace(0, 1, 51);
  // K_W of an output along its own class and along another one, for outputs p on the own class and 0 elsewhere
  const rates = outputs.map((p) => mixtureRates(matrix(CLASSES, CLASSES, (i, j) => (i === j ? p : 0)), state.perClass, 1, 1, 1 + state.noise)[0]);
  const last = (values) => values[POINTS - 1] - values[0];
  const ratio = last(path.readoutTask) / last(path.readoutMean);
  return {
    charts: {
      growth: { x: times, lines: [
        { name: "readout along", label: "readout part, along the labels", color: 0, y: grown(path.readoutTask) },
        { name: "readout mean", label: "readout part, average direction", color: 5, y: grown(path.readoutMean) },
        { name: "hidden along", label: "hidden part, along the labels", color: 1, dash: [10, 8], y: grown(path.hiddenTask) },
        { name: "hidden mean", label: "hidden part, average", color: 4, dash: [2, 7], y: grown(path.hiddenMean) }] },
      alignment: { x: times, lines: [{ name: "alignment", label: "theory", color: 2, y: path.alignment }] },
      loss: { x: times, lines: [{ name: "loss", label: "theory", color: 0, y: path.loss.map((v) => v / state.samples) }] },
      mixture: { x: outputs, lines: [
        { name: "own class", label: "its own class", color: 3, y: rates.map((r) => r[0]) }, { name: "other class", label: "another class", color: 4, y: rates.map((r) => r[1]) }] },
    },
    said: `The readout part grows <strong>${Number(ratio.toPrecision(2))} times</strong> more along the labels than in an average direction (${state.samples}/2 + 1/2 for ${state.samples} samples); the hidden part grows alike in all. So the kernel turns through its readout. With several classes, the hidden part of an output turns to its own class twice as fast as to others.`,
  };
}

function python(state) {
  return script(`P, size, ratio, n, noise = ${state.samples}, ${number(state.size)}, ${number(state.ratio)}, ${state.perClass}, ${number(state.noise)}
eye, ones = torch.eye(P, dtype=torch.float64), torch.ones(P, P, dtype=torch.float64)
y = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(P // 2)
K_V = size * ratio * (eye / 2 + (ones - eye) / (2 * torch.pi))  # a wide network on orthonormal inputs
K_W = size * eye / 2
times = torch.linspace(0, ${number(end(state))}, ${POINTS}, dtype=torch.float64)
path = fl.theory.relu.solve(K_V, K_W, y, times=times)
outputs = torch.linspace(0, 1, 51, dtype=torch.float64)
at_centers = outputs[:, None, None] * torch.eye(${CLASSES}, dtype=torch.float64)
rates = fl.theory.relu.mixture_rates(at_centers, n, square_norm=1 + noise)
curves = {
    "readout along": (times, path.readout_task - path.readout_task[0]),
    "readout mean": (times, path.readout_mean - path.readout_mean[0]),
    "hidden along": (times, path.hidden_task - path.hidden_task[0]),
    "hidden mean": (times, path.hidden_mean - path.hidden_mean[0]),
    "alignment": (times, path.alignment),
    "loss": (times, path.loss / P),
    "own class": (outputs, rates[:, 0, 0]),
    "other class": (outputs, rates[:, 0, 1]),
}`);
}

const experiment = (state) => ({
  samples: state.samples, size: state.size, ratio: state.ratio, width: state.width, rate: (2 * state.rate) / state.size / (1 + state.ratio), end: end(state), perClass: state.perClass, noise: state.noise, seed: state.seed,
});

const time = { label: "time (steps × learning rate)" };

export const growth = {
  key: "growth",
  question: "Which part of a ReLU kernel turns?",
  lead: "The kernel of a two-layer ReLU network is a sum: one part comes from the readout, one from the hidden weights. Both grow. Only one of them learns the labels.",
  controls: [
    { key: "samples", label: "Samples", symbol: "P", min: 4, max: 16, whole: true, value: 12, even: true },
    { key: "size", label: "Size of the readout's weights", min: 0.03, max: 10, log: true, value: 0.3, hint: "small is rich, large is lazy" },
    { key: "ratio", label: "First layer over readout", min: 1, max: 30, log: true, value: 15, hint: "large: gates seldom flip, as the theory assumes" },
    { key: "perClass", label: "Samples of a class in the mixture", symbol: "n", min: 1, max: 6, whole: true, value: 3 },
    { key: "noise", label: "Noise of the mixture", symbol: "σ²", min: 0, max: 2, value: 0.05 },
  ],
  networkControls: [
    { key: "width", label: "Width", symbol: "M", min: 10, max: 600, log: true, even: true, value: 400 },
    { key: "rate", label: "Learning rate × size", symbol: "η", min: 0.002, max: 1, log: true, value: 0.005 },
    { key: "seed", label: "Seed", min: 0, max: 99, whole: true, value: 0 },
  ],
  charts: [
    { key: "growth", title: "Growth along and across the labels", x: time, y: { label: "growth of the kernel", least: [0, 0.01] },
      series: [{ label: "network: readout, along", color: 0 }, { label: "readout, average", color: 5 }, { label: "hidden, along", color: 1 }, { label: "hidden, average", color: 4 }],
      caption: "Along the labels both parts grow alike. In an average direction the readout part hardly grows, the hidden part grows as much as along the labels: three lines are one." },
    { key: "alignment", title: "So the kernel aligns", x: time, y: { label: "kernel-task alignment" }, caption: "More with a small first kernel: what has grown counts for more." },
    { key: "mixture", title: "Classes: its own twice as fast", x: { label: "output for the own class" }, y: { label: "growth rate of the hidden part", least: [0, 0.1] },
      series: [{ label: "network: own class", color: 3 }, { label: "other classes", color: 4 }],
      caption: "The hidden part of one output, along its own class and along another. It stops when the class is learned." },
    { key: "loss", title: "The loss", x: time, y: { label: "mean squared error", least: [0, 1] }, caption: "Predicted from the first kernel alone." },
  ],
  examples: [
    { label: "lazy", set: { size: 5 }, say: "The kernel is large from the start: what grows is little beside it, and the alignment stays." },
    { label: "rich", set: { size: 0.05 }, say: "The kernel grows to several times its size, and aligns. More gates flip: the points begin to leave the lines." },
    { label: "two samples of each sign", set: { samples: 4 }, say: "With few samples an average direction is nearly along the labels: the parts differ less." },
    { label: "gates flip (fails)", set: { size: 0.1, ratio: 1 }, say: "The weights move further than they were large: which units are open changes, and the theory holds that fixed." },
    { label: "noisy mixture (fails)", set: { noise: 2, perClass: 6 }, say: "Noise larger than the classes themselves: samples of a class no longer share their gates." },
    { label: "narrow (fails)", set: { width: 12 }, say: "Twelve units: averages over units mean nothing yet." },
  ],
  formula: `<p>Readout part ${inline("K_V = \\phi^{\\top} \\phi")}, hidden part ${inline("K_W")}, outputs ${inline("f")}, orthonormal inputs. Along a direction ${inline("z")} of length one:</p>
${displayed("\\frac{d}{d t} z^{\\top} K_V z = \\eta ( \\sum_{\\mu} (y-f)_{\\mu} z_{\\mu}^2 f_{\\mu} + [(y-f) \\cdot z] [z \\cdot f] )")}
${displayed("\\frac{d}{d t} z^{\\top} K_W z = \\eta ( \\sum_{\\mu} (y-f)_{\\mu} z_{\\mu}^2 f_{\\mu} + (y-f) \\cdot f )")}
<p>The last term of the first line needs ${inline("z")} to point along the labels; that of the second is the same for all ${inline("z")}. For a mixture the hidden part of output ${inline("c")} grows along class ${inline("d")} as ${inline("2 \\eta n^3 f_c(c) (1 - f_c(c))")} times 1 for ${inline("d = c")} and 1/2 for others. Shan &amp; Bordelon 2021, Sec. 6, corrected.</p>`,
  fails: "<p>Gates are held fixed, and the gates of one sample are taken as independent of the features of another. Networks of this size flip a few percent of their gates, and grow 10 to 20 % less than the lines; small first kernels flip more. The ratios hold better than the sizes.</p>",
  theory, python, experiment,
};
