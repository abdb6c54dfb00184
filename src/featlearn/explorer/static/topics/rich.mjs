/** How rich is rich? Optimal feature evolution (Shan & Bordelon 2021). */
import { linspace, logspace } from "../mathematics/arrays.mjs";
import { basis, finalAlignment, infiniteWidthKernel, solve, threshold, topOverlap } from "../mathematics/ofe.mjs";
import { INPUTS, SAMPLES, X, labels } from "../networks/rich.mjs";
import { displayed, inline } from "./formula.mjs";
import { kept } from "./kept.mjs";
import { normals, number, script } from "./python.mjs";

const POINTS = 101, RATES = 81;
const K0 = infiniteWidthKernel(X), shares = logspace(0.01, 30, RATES);

/** All that does not depend on gamma. */
function task(flips) {
  return kept(`task ${flips}`, () => {
    const y = labels(flips), start = basis(K0, y), star = threshold(start);
    // long enough for a frozen kernel to learn nine tenths
    let end = 1;
    while (end < 400 && start.power.reduce((t, p, k) => t + p * Math.exp((-2 * start.values[k] * end) / SAMPLES), 0) > 0.02 * SAMPLES) end *= 1.1;
    const times = linspace(0, Number(end.toPrecision(2)), POINTS);
    return {
      y, start, star, times, end: times[POINTS - 1], frozen: solve(K0, y, 0, times, 1 / SAMPLES, start),
      tops: shares.map((s) => topOverlap(start, s * star)), ends: shares.map((s) => finalAlignment(K0, y, s * star)),
    };
  });
}

function theory({ share, flips }) {
  const { y, start, star, times, frozen, tops, ends } = task(flips);
  const rich = solve(K0, y, share * star, times, 1 / SAMPLES, start);
  const ranks = linspace(1, SAMPLES, SAMPLES), mean = (values) => values.map((v) => v / SAMPLES);
  const marks = [{ at: 1, label: "threshold γ*" }, ...(Math.abs(Math.log(share)) > 0.9 ? [{ at: share, label: "here" }] : [])];
  return {
    charts: {
      loss: { x: times, lines: [{ name: "loss", label: "theory", color: 0, y: mean(rich.loss) }, { name: "frozen loss", label: "frozen kernel, γ = 0", color: 6, dash: true, y: mean(frozen.loss) }] },
      alignment: { x: times, lines: [{ name: "alignment", label: "theory", color: 1, y: rich.alignment }, { name: "frozen alignment", label: "frozen kernel", color: 6, dash: true, y: frozen.alignment }] },
      gamma: { x: shares, marks, lines: [
        { name: "top overlap", label: "task in the top eigenvector", color: 2, y: tops },
        { name: "final alignment", label: "final alignment", color: 1, y: ends }] },
      spectrum: { x: ranks, lines: [{ name: "spectrum", label: "after", color: 3, y: rich.eigenvalues }, { name: "first spectrum", label: "before", color: 6, dash: true, y: start.values }] },
    },
    said: sentence(share, rich),
  };
}

function sentence(share, rich) {
  const from = rich.alignment[0].toPrecision(2), to = rich.alignment[POINTS - 1].toPrecision(2), held = Math.round(100 * rich.overlaps[0]);
  const where = share < 0.5 ? "Below the threshold the task stays <strong>hidden inside the spectrum</strong>: the top eigenvector" : share > 2 ? "Above the threshold the task is <strong>on top</strong>: the top eigenvector" : "Near the threshold the task <strong>crosses the top mode</strong>: the top eigenvector";
  return `${where} holds ${held} % of it. The alignment goes from ${from} to ${to}.`;
}

function python({ share, flips }) {
  const { star, end } = task(flips);
  return script(`P, D, flips = ${SAMPLES}, ${INPUTS}, ${flips}
${normals(1, SAMPLES, INPUTS)}
y = normal[:, 0].sign()
y[:flips] *= -1
K0 = fl.theory.infinite_width.ntk(normal, hidden_layers=1)
star = fl.theory.ofe.threshold(K0, y)  # ${Number(star.toPrecision(4))}
gamma = ${number(share)} * float(star)
times = torch.linspace(0, ${number(end)}, ${POINTS}, dtype=torch.float64)
path = fl.theory.ofe.solve(K0, y, gamma, times, rate=1 / P)
frozen = fl.theory.ofe.solve(K0, y, 0.0, times, rate=1 / P)
shares = torch.logspace(-2, torch.tensor(30.0).log10(), ${RATES}, dtype=torch.float64)
ranks = torch.arange(1, P + 1)
curves = {
    "loss": (times, path.loss / P),
    "frozen loss": (times, frozen.loss / P),
    "alignment": (times, path.alignment),
    "frozen alignment": (times, frozen.alignment),
    "top overlap": (shares, fl.theory.ofe.top_overlap(K0, y, shares * star)),
    "final alignment": (shares, fl.theory.ofe.final_alignment(K0, y, shares * star)),
    "spectrum": (ranks, fl.theory.ofe.spike(K0, y, gamma).eigenvalues),
    "first spectrum": (ranks, torch.linalg.eigvalsh(K0).flip(0)),
}`);
}

const experiment = (state) => ({
  flips: state.flips, width: state.width, richness: state.richness, rate: state.rate, end: task(state.flips).end,
  threshold: task(state.flips).star, seed: state.seed,
});

const time = { label: "time (steps × learning rate)" };

export const rich = {
  key: "rich",
  question: "How rich is rich?",
  lead: "Suppose that features move so as to lower the loss after the next step. Then one number, the feature rate γ, says how rich training is. How far does the kernel turn, and when does the task come out on top of its spectrum?",
  controls: [
    { key: "share", label: "Feature rate, in thresholds", symbol: "γ/γ*", min: 0.01, max: 30, log: true, value: 0.1, hint: "far below 1: lazy; above: the task is on top" },
    { key: "flips", label: "Flipped labels, of 24", min: 0, max: 12, whole: true, value: 0, hint: "a task that the first kernel does not expect" },
  ],
  networkControls: [
    { key: "richness", label: "Output divided by", min: 0.1, max: 100, log: true, value: 10, hint: "larger is richer: weights have to move further" },
    { key: "width", label: "Width", symbol: "N", min: 8, max: 800, log: true, whole: true, value: 400 },
    { key: "rate", label: "Learning rate", symbol: "η", min: 0.01, max: 5, log: true, value: 0.05 },
    { key: "seed", label: "Seed", min: 0, max: 99, whole: true, value: 0 },
  ],
  charts: [
    { key: "loss", title: "Rich learns faster", x: time, y: { label: "mean squared error", least: [0, 1] }, caption: "Dashed: the same kernel, frozen." },
    { key: "alignment", title: "The kernel turns to the task", x: time, y: { label: "kernel-task alignment", least: [0, 0.4] }, caption: "It turns as long as there is a residual to turn it." },
    { key: "gamma", title: "A threshold", x: { label: "feature rate γ/γ*", log: true }, y: { label: "share", least: [0, 1] },
      series: [{ label: "network: task in the top", color: 2 }, { label: "network: alignment", color: 1 }],
      caption: "Alignment rises smoothly. The top eigenvector changes its mind at γ*: there the task overtakes the top mode of the first kernel." },
    { key: "spectrum", title: "One eigenvalue rises", x: { label: "rank" }, y: { label: "eigenvalue of the kernel", log: true }, caption: "K∞ = K₀ + γ y yᵀ: the task lifts one eigenvalue; nearly all others stay." },
  ],
  examples: [
    { label: "lazy", set: { share: 0.01, richness: 0.3 }, say: "Hardly any feature rate, and a network whose weights hardly have to move: both follow the frozen kernel." },
    { label: "rich", set: { share: 0.19, richness: 30 }, say: "The network learns faster than its first kernel would. Part of it is the turn, which the theory has." },
    { label: "at the threshold", set: { share: 1, richness: 30 }, say: "Here the task overtakes the constant mode of the kernel. A network of two layers does not get there: look for its point." },
    { label: "very rich theory", set: { share: 10, richness: 30 }, say: "The kernel becomes little more than the task itself." },
    { label: "flipped labels", set: { flips: 8, share: 0.15 }, say: "The frozen kernel is slow on a task that it does not expect; features help most there." },
    { label: "richer than the theory (fails)", set: { share: 0.22, richness: 100 }, say: "This kernel also grows in all directions, which optimal features would not: the network is faster than any turn explains." },
    { label: "narrow (fails)", set: { width: 10 }, say: "Ten units: their first kernel is not that of the infinitely wide network from which the lines start." },
    { label: "too large a rate (fails)", set: { rate: 3, richness: 30 }, say: "As the kernel grows, the steps overshoot." },
  ],
  formula: `<p>Residual ${inline("\\Delta = f - y")}, kernel ${inline("K")}, and features that move down the next loss at the rate ${inline("\\gamma")}:</p>
${displayed("\\frac{d \\Delta}{d t} = - \\eta K \\Delta , \\quad K(t) + \\gamma \\Delta \\Delta^{\\top} = \\text{const}")}
<p>The second equation is a conserved matrix. At the end the residual is gone, and what it held is in the kernel:</p>
${displayed("K_{\\infty} = K_0 + \\gamma y y^{\\top} , \\quad \\frac{1}{\\gamma^{*}} = \\sum_{i>1} \\frac{(u_i \\cdot y)^2}{\\lambda_1 - \\lambda_i}")}
<p>The exact path, not in the papers, is ${inline("\\Delta(t) = e^{- \\eta C t} \\Delta_0 / \\sqrt{D(t)}")} with ${inline("C = K_0 + \\gamma \\Delta_0 \\Delta_0^{\\top}")}. Shan &amp; Bordelon 2021, corrected.</p>`,
  fails: "<p>This is <em>not</em> a theory of networks: it says what features should do. A real network has no γ; the panel says which γ would turn the kernel as far as the network did. Set it by the button in the panel, and see how well one number tells the whole path. Where the output is divided by much, the kernel also grows in directions that the task does not need, and the loss falls faster than the line. The lines start from the kernel of an infinitely wide network: narrow ones start elsewhere.</p>",
  theory, python, experiment,
};
