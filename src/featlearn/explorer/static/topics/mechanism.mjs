/** Align, disalign or rescale? The exact two-layer solution and the phases of scaling (Xu & Ziyin 2024). */
import { Plane } from "../interface/plane.mjs";
import { linspace } from "../mathematics/arrays.mjs";
import { solve } from "../mathematics/latent.mjs";
import { displayed, inline } from "./formula.mjs";
import { list, number, script } from "./python.mjs";

const POINTS = 121;
/** Learning rate at kappa = 1: with it, the kernel of a limit that trains is about 0.02 a step. */
const FIRST_RATE = 0.01;

/** Two units hold every start: u along the first, W x at its angle. */
const start = ({ normU, normV, zeta }) => ({ u: [normU, 0], v: [normV * zeta, normV * Math.sqrt(1 - zeta * zeta)] });

function theory(state) {
  const { u, v } = start(state), times = linspace(0, state.steps, POINTS);
  const path = solve(u, v, 1, state.target, times, state.scale, state.rateU, state.rateW);
  return {
    charts: {
      zeta: { x: times, lines: [{ name: "layer alignment", label: "theory", color: 1, y: path.layerAlignment }] },
      output: { x: times, lines: [{ name: "output", label: "theory", color: 0, y: path.output }], levels: [{ at: state.target, label: "target" }] },
      kernel: { x: times, lines: [{ name: "kernel", label: "theory", color: 2, y: path.ntk }] },
      norms: { x: times, lines: [{ name: "norm of u", label: "readout |u|", color: 3, y: path.normU }, { name: "norm of Wx", label: "hidden |W x|", color: 4, y: path.normWx }] },
    },
    said: sentence(path, state),
  };
}

const ACTS = {
  alignment: "The output has to grow, so the layers <strong>turn toward each other</strong>: alignment",
  disalignment: "The output is too large, so the layers <strong>turn away from each other</strong>: disalignment",
  rescaling: "The layers are parallel and cannot turn: they only <strong>change their lengths</strong>, rescaling",
  stationary: "The output is right already: <strong>nothing moves</strong>",
};

function sentence(path, state) {
  const moved = path.finalKernel / path.ntk[0], share = Math.round(100 * path.featureShare);
  const kernel = Math.abs(moved - 1) < 0.05 ? "the kernel hardly moves: lazy" : `the kernel ends at ${Number(moved.toPrecision(3))} times its first size`;
  const late = 3 * path.timeScale / 8 > state.steps ? " In the steps that are shown it does not get there." : "";
  return `${ACTS[path.mechanism]}; ${kernel}. The target brings ${share} % of the squared speed, the first kernel the rest.${late}`;
}

function python(state) {
  const { u, v } = start(state);
  return script(`u = torch.tensor(${list(u)}, dtype=torch.float64)  # two units hold every start
W = torch.tensor([[${number(v[0])}], [${number(v[1])}]], dtype=torch.float64)
x = torch.ones(1, dtype=torch.float64)
times = torch.linspace(0, ${number(state.steps)}, ${POINTS}, dtype=torch.float64)
path = fl.theory.latent.solve(
    u, W, x, ${number(state.target)}, times=times,
    scale=${number(state.scale)}, rate_u=${number(state.rateU)}, rate_w=${number(state.rateW)},
)
print(path.mechanism, path.rescaling, float(path.time_scale), float(path.feature_share))
curves = {
    "layer alignment": (times, path.layer_alignment),
    "output": (times, path.output),
    "kernel": (times, path.ntk),
    "norm of u": (times, path.norms.u),
    "norm of Wx": (times, path.norms.Wx),
}`);
}

const experiment = (state) => ({
  scale: state.scale, rateU: state.rateU, rateW: state.rateW, normU: state.normU, normV: state.normV, zeta: state.zeta, target: state.target,
  width: state.width, activation: state.activation, off: state.off, end: state.steps, seed: state.seed,
});

/** Where the sliders are in the plane of exponents. */
function place({ scale, rateU, rateW, normU, normV, kappa }) {
  const power = (value) => Math.log(value) / Math.log(kappa);
  const rates = power(Math.sqrt(rateU * rateW) / FIRST_RATE);
  return { d: 0, gamma: power(scale), u: power(normU ** 2), w: power(normV ** 2), rate: rates };
}

/** The sliders of a point of that plane: d units of variance kappa^u have the squared norm kappa^(d + u). */
export function sliders({ d, gamma, u, w, rate }, kappa) {
  const round = (value) => Number(value.toPrecision(6));
  const eta = round(FIRST_RATE * kappa ** rate);
  return { scale: round(kappa ** gamma), rateU: eta, rateW: eta, normU: round(kappa ** ((d + u) / 2)), normV: round(kappa ** ((d + w) / 2)), zeta: 0 };
}

const steps = { label: "steps" };

export const mechanism = {
  key: "mechanism",
  question: "Align, disalign or rescale?",
  lead: "Two linear layers on data along one line: the smallest network that can be lazy or rich, solved exactly at every width. There are three ways to learn: turn the layers toward each other, turn them apart, or change their lengths.",
  controls: [
    { key: "scale", label: "Scale of the output", symbol: "γ", min: 5e-6, max: 2e5, log: true, value: 0.01, hint: "larger is lazier" },
    { key: "rateU", label: "Rate of the readout", symbol: "ηu", min: 1e-8, max: 1e4, log: true, value: 1 },
    { key: "rateW", label: "Rate of the first layer", symbol: "ηw", min: 1e-8, max: 1e4, log: true, value: 1 },
    { key: "normU", label: "Length of the readout", symbol: "|u|", min: 0.1, max: 50, log: true, value: 10 },
    { key: "normV", label: "Length of the hidden layer", symbol: "|Wx|", min: 0.1, max: 50, log: true, value: 10 },
    { key: "zeta", label: "Layer alignment at the start", symbol: "ζ", min: -1, max: 1, value: 0 },
    { key: "target", label: "Target", symbol: "y", min: -3, max: 3, value: 2 },
    { key: "steps", label: "Steps shown", min: 20, max: 2000, log: true, whole: true, value: 60 },
    { key: "kappa", label: "Size parameter of the plane", symbol: "κ", min: 10, max: 200, log: true, value: 100, hint: "a click sets scale, rates and lengths to powers of it" },
  ],
  networkControls: [
    { key: "width", label: "Width", symbol: "d", min: 2, max: 500, log: true, whole: true, value: 200 },
    { key: "activation", label: "Activation", value: "linear", options: [["linear", "linear, as in the theory"], ["relu", "ReLU"]] },
    { key: "off", label: "Inputs off the line", min: 0, max: 1, value: 0, hint: "0: all on one line, as the theory assumes" },
    { key: "seed", label: "Seed", min: 0, max: 99, whole: true, value: 0 },
  ],
  charts: [
    { key: "zeta", title: "The angle between the layers", x: steps, y: { label: "layer alignment ζ", least: [0, 1] }, caption: "0: at random, 1: in line. Up is alignment, down is disalignment, flat is lazy or rescaling." },
    { key: "output", title: "The output reaches the target", x: steps, y: { label: "output f" }, caption: "It always moves one way." },
    { key: "kernel", title: "Does the kernel move?", x: steps, y: { label: "kernel K(x, x)", least: [0, 0.001] }, caption: "A flat line is a kernel machine." },
    { key: "norms", title: "Lengths of the layers", x: steps, y: { label: "length", least: [0, 1] }, caption: "They grow and shrink together." },
  ],
  examples: [
    { label: "align", set: {}, say: "Mean field: the output is divided by the width, the rates multiplied by it. The layers turn." },
    { label: "disalign", set: { zeta: 0.99, normU: 15, normV: 40, rateU: 0.2, rateW: 0.2, steps: 200 }, say: "Nearly parallel layers give three times too large an output: they turn apart, and shrink." },
    { label: "rescale", set: { zeta: 1, normU: 5, normV: 8, rateU: 0.5, rateW: 0.5, steps: 100 }, say: "Exactly parallel layers can only stretch." },
    { label: "lazy", set: { scale: 0.1, rateU: 0.01, rateW: 0.01, steps: 200 }, say: "NTK scaling: the target is reached, and angle and kernel hardly move." },
    { label: "unequal rates", set: { rateU: 5, rateW: 0.05 }, say: "One layer moves, the other waits: the learning rates are part of the scaling." },
    { label: "too large a rate (fails)", set: { rateU: 60, rateW: 60, steps: 40 }, say: "The kernel is above one: every step overshoots. This is what the unstable side of the plane means." },
    { label: "off the line (fails)", set: { off: 0.7, steps: 200 }, say: "The target depends on other inputs too: more than one sample in truth, and the layers are pulled elsewhere." },
    { label: "ReLU (fails)", set: { activation: "relu" }, say: "Half of the units are closed for every input. The mechanism is the same, the numbers are not." },
  ],
  formula: `<p>${inline("f = \\gamma u \\cdot W x")}, loss ${inline("(f - y)^2")}. In the sum and the difference of the layers, ${inline("p = (\\sqrt{\\eta_u} W x / \\rho + \\sqrt{\\eta_w} u)/2")} and ${inline("q")} with a minus, training is one function of time:</p>
${displayed("p(t) = p(0) \\sqrt{\\alpha} , \\quad q(t) = \\frac{q(0)}{\\sqrt{\\alpha}} , \\quad \\frac{d \\alpha}{d t} = -4 (a \\alpha^2 - s \\alpha - b)")}
<p>with ${inline("a = \\gamma^2 \\rho^2 |p(0)|^2")}, ${inline("b = \\gamma^2 \\rho^2 |q(0)|^2")}, ${inline("s = \\gamma \\rho \\sqrt{\\eta_u \\eta_w} y")}. The speed is</p>
${displayed("\\Omega = \\sqrt{s^2 + 4 a b} , \\quad K_{\\infty} = 2 \\Omega")}
<p>The target brings ${inline("s^2")}, the first kernel ${inline("4ab")}. Where ${inline("s^2")} wins, ${inline("\\alpha")} leaves 1 and features are learned; where it is small, ${inline("\\alpha = 1")}: the kernel regime. Xu &amp; Ziyin 2024, corrected.</p>`,
  fails: "<p>The solution is exact at <em>every</em> width: narrow networks do not leave the lines. What breaks it: inputs off the line, an activation that is not linear, and steps so large that gradient descent is no gradient flow.</p>",
  theory, python, experiment,
  extra: (set) => {
    let kappa = 100;
    const plane = new Plane((exponents) => set(sliders(exponents, kappa)), place);
    return { figure: plane.figure, draw: (state) => { kappa = state.kappa; plane.draw(state); } };
  },
};
