/** When do neural features match gradients? The early correlation (Beaglehole et al. 2024). */
import { linspace, logspace } from "../mathematics/arrays.mjs";
import { dataMatrices, derivativeCorrelation, expectedPtk, freeProbability, quadraticMoments } from "../mathematics/early.mjs";
import { INPUTS, SAMPLES, data } from "../networks/features.mjs";
import { displayed, inline } from "./formula.mjs";
import { kept } from "./kept.mjs";
import { normals, number, script } from "./python.mjs";

const decays = linspace(0, 4, 25), widths = [...new Set(logspace(4, 128, 21).map(Math.round))];

const variances = (hidden, width) => [1 / INPUTS, ...new Array(hidden).fill(1 / width)];

/** The first move, with the expected kernel in place of the network's own. */
function predicted(decay, width, { hidden, activation }) {
  const { X, y } = data(decay), layers = hidden === "1" ? 1 : 2;
  return derivativeCorrelation(X, y, expectedPtk(X, width, activation, layers, variances(layers, width)));
}

/** By free probability, which knows the width: one hidden layer of squares. */
function free(decay, width) {
  const { X, y } = data(decay), { A, B } = dataMatrices(X, y);
  return freeProbability(A, B, quadraticMoments(width, INPUTS));
}

function theory(state) {
  const { decay, width, hidden, activation, steps } = state, kind = `${hidden} ${activation}`;
  // the width matters to the expected kernel of two layers of squares alone
  const seen = kind === "2 quadratic" ? width : "any";
  const first = kept(`spectrum ${kind} ${seen}`, () => decays.map((d) => predicted(d, width, state)));
  const over = kept(`width ${kind} ${decay}`, () => (kind === "2 quadratic" ? widths.map((k) => predicted(decay, k, state)) : widths.map(() => 0).fill(predicted(decay, 8, state))));
  const now = predicted(decay, width, state);
  const wide = kind === "1 quadratic" ? [{ name: "free probability", label: "free probability", color: 3, dash: true, y: kept(`free ${width}`, () => decays.map((d) => free(d, width))) }] : [];
  const wideOver = kind === "1 quadratic" ? [{ name: "free probability over width", label: "free probability", color: 3, dash: true, y: kept(`free over ${decay}`, () => widths.map((k) => free(decay, k))) }] : [];
  return {
    charts: {
      spectrum: { x: decays, marks: [{ at: decay, label: "here" }], lines: [{ name: "over spectrum", label: "theory, first order", color: 0, y: first }, ...wide] },
      width: { x: widths, marks: [{ at: width, label: "here" }], lines: [{ name: "over width", label: "theory, first order", color: 2, y: over }, ...wideOver] },
      training: { x: [0, steps], lines: [{ name: "start", label: "theory: where the centered one starts", color: 1, y: [now, now] }] },
    },
    said: `At the first step the learned part of the weights and the gradients agree to <strong>${Number(now.toPrecision(3))}</strong> (1 is perfect). ${kind === "1 quadratic" && width < 4 * INPUTS ? "At this width the spread between networks counts too: free probability has it." : "Width does not enter as long as it is large."} Gradient descent keeps the random first weights, and they hide it in the plain correlation, until the learned part is the larger one; SLO makes the first layer move fast.`,
  };
}

function python(state) {
  const { decay, width, hidden, activation, steps } = state;
  const isFree = hidden === "1" && activation === "quadratic";
  return script(`n, d, width, hidden, activation = ${SAMPLES}, ${INPUTS}, ${width}, ${hidden}, "${activation}"
${normals(1, SAMPLES, INPUTS)}

def data(decay):
    size = 1 / (1 + torch.arange(1, d + 1, dtype=torch.float64) ** decay)
    X = normal * (size / size.mean()).sqrt()
    y = X[:, 0] * X[:, 1] + X[:, 1] * X[:, 2] + X[:, 2] * X[:, 0]
    return X, y / y.square().mean().sqrt()


def predicted(decay, width):
    X, y = data(decay)
    ptk = fl.theory.early.expected_ptk(X, width, activation, hidden, [1 / d] + hidden * [1 / width])
    return fl.theory.early.derivative_correlation(X, y, ptk)


decays, widths = torch.linspace(0, 4, ${decays.length}).tolist(), [${widths.join(", ")}]
now = predicted(${number(decay)}, width)
curves = {
    "over spectrum": (decays, torch.stack([predicted(decay, width) for decay in decays])),
    "over width": (widths, torch.stack([predicted(${number(decay)}, width) for width in widths])),
    "start": ([0, ${steps}], torch.stack([now, now])),
}
${isFree ? `

def free(decay, width):
    moments = fl.theory.early.quadratic_moments(width, d, 4)
    return torch.tensor(float(fl.theory.early.free_probability(*fl.theory.early.data_matrices(*data(decay)), moments).correlation))


curves["free probability"] = (decays, torch.stack([free(decay, width) for decay in decays]))
curves["free probability over width"] = (widths, torch.stack([free(${number(decay)}, width) for width in widths]))
` : ""}`);
}

const experiment = (state) => ({
  decay: state.decay, width: state.width, hidden: Number(state.hidden), activation: state.activation, size: state.size, optimizer: state.optimizer,
  speed: state.speed, rate: state.rate, end: state.steps, seed: state.seed,
});

export const features = {
  key: "features",
  question: "When do neural features match gradients?",
  lead: "The weights of a layer, WᵀW, often come to look like the gradients of the network, averaged over the data: the neural feature ansatz. Why, and when? Look at what training adds to the weights, at the very first step.",
  controls: [
    { key: "decay", label: "Decay of the input spectrum", symbol: "α", min: 0, max: 4, value: 1, hint: "0: all directions alike" },
    { key: "width", label: "Width", symbol: "k", min: 4, max: 128, log: true, whole: true, value: 64 },
    { key: "hidden", label: "Hidden layers", value: "2", options: [["1", "one"], ["2", "two"]] },
    { key: "activation", label: "Activation", value: "relu", options: [["relu", "ReLU"], ["quadratic", "quadratic"]] },
  ],
  networkControls: [
    { key: "size", label: "Size of the first layer", min: 0.01, max: 2, log: true, value: 1 },
    { key: "optimizer", label: "Optimizer", value: "descent", options: [["descent", "gradient descent"], ["slo", "SLO: set the speed of each layer"]] },
    { key: "speed", label: "SLO: speed of the first layer", min: 1, max: 500, log: true, value: 30 },
    { key: "rate", label: "Learning rate", symbol: "η", min: 0.001, max: 2, log: true, value: 0.1 },
    { key: "steps", label: "Steps shown", min: 50, max: 2000, log: true, whole: true, value: 300 },
    { key: "seed", label: "Seed", min: 0, max: 99, whole: true, value: 0 },
  ],
  charts: [
    { key: "training", title: "Along training", x: { label: "steps" }, y: { label: "correlation", least: [0, 1] },
      series: [{ label: "network: what training added (centered)", color: 1 }, { label: "network: all weights (plain)", color: 0 }],
      caption: "What training adds matches the gradients from the first step. All weights match only once the learned part is the larger one." },
    { key: "spectrum", title: "Against the spectrum of the inputs", x: { label: "decay α" }, y: { label: "correlation at the first step", least: [0.7, 1] },
      caption: "Highest where one direction holds the data; lower in between. Points: six random networks each, mean and error." },
    { key: "width", title: "Against the width", x: { label: "width k", log: true }, y: { label: "correlation at the first step", least: [0.7, 1] },
      caption: "The first-order theory is for wide networks: narrow ones leave the line." },
  ],
  examples: [
    { label: "large first layer", set: { size: 1 }, say: "The random first weights hide the match: the plain correlation stays low." },
    { label: "small first layer", set: { size: 0.05 }, say: "Nothing hides it: the plain correlation rises to the centered one." },
    { label: "SLO", set: { optimizer: "slo", rate: 0.03 }, say: "The first layer moves thirty times faster, the others slower: its features are learned even from large first weights." },
    { label: "one hidden layer of squares", set: { hidden: "1", activation: "quadratic", width: 12, rate: 0.01, steps: 600 }, say: "As many units as inputs: the spread between networks counts, and free probability predicts it." },
    { label: "narrow (fails)", set: { width: 5 }, say: "Five units: the kernel of one network is not that of the average." },
    { label: "too large a rate (fails)", set: { activation: "quadratic", rate: 0.5 }, say: "Squares of squares: one large step and everything diverges." },
  ],
  formula: `<p>With ${inline("X")} the inputs of the layer, ${inline("L")} the diagonal of the residuals and ${inline("\\kappa = J J^{\\top}")} the products of the gradients ${inline("J = df/dh")}, the first step adds ${inline("\\Delta W = - \\eta J^{\\top} L X")}. Hence</p>
${displayed("\\Delta W^{\\top} \\Delta W \\propto X^{\\top} L \\kappa L X , \\quad \\Delta W^{\\top} J^{\\top} J \\Delta W \\propto X^{\\top} L \\kappa^2 L X")}
<p>The left one is what the features become, the right one the gradients. Both hold the same ${inline("L X")}: they match as far as ${inline("\\kappa")} and ${inline("\\kappa^2")} do, perfectly where ${inline("\\kappa")} is a projection. Their cosine, with the mean of ${inline("\\kappa")} over networks, is the line. Beaglehole et al. 2024, Eq. 6, corrected.</p>`,
  fails: "<p>The line replaces the kernel of one network by its mean over networks, and its square by the square of the mean: right for wide networks. It speaks of the <em>first</em> step; later the kernel moves too. And it speaks of what training added: the plain correlation also holds the random first weights.</p>",
  theory, python, experiment,
};
