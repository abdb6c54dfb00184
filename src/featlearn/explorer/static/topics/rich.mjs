/** How rich is rich? Optimal feature evolution (Shan & Bordelon 2021). */
import { linspace, logspace } from "../mathematics/arrays.mjs";
import { basis, finalAlignment, infiniteWidthKernel, solve, spike, threshold, topOverlap } from "../mathematics/ofe.mjs";
import { circle, labels } from "../networks/circle.mjs";
import { displayed, inline } from "./formula.mjs";
import { number, script } from "./python.mjs";

const SAMPLES = 24, POINTS = 101, RATES = 81;
const K0 = infiniteWidthKernel(circle(SAMPLES));

/** All that does not depend on gamma, by the number of waves. */
const TASKS = new Map();
function task(waves) {
  if (!TASKS.has(waves)) {
    const y = labels(SAMPLES, waves), start = basis(K0, y), star = threshold(start);
    // long enough for a frozen kernel to learn nine tenths
    let end = 1;
    while (end < 400 && start.power.reduce((t, p, k) => t + p * Math.exp((-2 * start.values[k] * end) / SAMPLES), 0) > 0.1 * SAMPLES) end *= 1.1;
    TASKS.set(waves, { y, start, star, end: Number(end.toPrecision(2)) });
  }
  return TASKS.get(waves);
}

const shares = logspace(0.01, 30, RATES);

function theory({ share, waves }) {
  const { y, start, star, end } = task(waves), times = linspace(0, end, POINTS), gamma = share * star;
  const rich = solve(K0, y, gamma, times, 1 / SAMPLES, start), frozen = solve(K0, y, 0, times, 1 / SAMPLES, start);
  const ranks = linspace(1, SAMPLES, SAMPLES), mean = (values) => values.map((v) => v / SAMPLES);
  const marks = [{ at: 1, label: "threshold γ*" }, ...(Math.abs(Math.log(share)) > 0.9 ? [{ at: share, label: "here" }] : [])];
  const after = spike(K0, y, gamma);
  return {
    charts: {
      loss: { x: times, lines: [{ name: "loss", label: "theory", color: 0, y: mean(rich.loss) }, { name: "frozen loss", label: "frozen kernel, γ = 0", color: 6, dash: true, y: mean(frozen.loss) }] },
      alignment: { x: times, lines: [{ name: "alignment", label: "theory", color: 1, y: rich.alignment }, { name: "frozen alignment", label: "frozen kernel", color: 6, dash: true, y: frozen.alignment }] },
      gamma: { x: shares, marks, lines: [
        { name: "top overlap", label: "task in the top eigenvector", color: 2, y: shares.map((s) => topOverlap(start, s * star)) },
        { name: "final alignment", label: "final alignment", color: 1, y: shares.map((s) => finalAlignment(K0, y, s * star)) }] },
      spectrum: { x: ranks, lines: [{ name: "spectrum", label: "after", color: 3, y: after.eigenvalues }, { name: "first spectrum", label: "before", color: 6, dash: true, y: start.values }] },
    },
    said: sentence(share, rich, after),
  };
}

function sentence(share, rich, after) {
  const from = rich.alignment[0].toPrecision(2), to = rich.alignment[POINTS - 1].toPrecision(2), held = Math.round(100 * after.overlaps[0]);
  const where = share < 0.5 ? "Below the threshold the task stays <strong>hidden inside the spectrum</strong>" : share > 2 ? "Above the threshold the task is <strong>the top eigenvector</strong>" : "Near the threshold the task <strong>crosses the top mode</strong>";
  return `${where}, which holds ${held} % of it. The alignment goes from ${from} to ${to}.`;
}

function python({ share, waves }) {
  const { star, end } = task(waves);
  return script(`P = ${SAMPLES}
angle = 2 * torch.pi * torch.arange(P, dtype=torch.float64) / P
x = torch.stack([angle.cos(), angle.sin(), torch.ones_like(angle)], 1)
y = torch.where((${waves} * angle).cos() + 0.2 > 0, 1.0, -1.0).double()
K0 = fl.theory.infinite_width.ntk(x, hidden_layers=1)
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
  samples: SAMPLES, waves: state.waves, width: state.width, richness: state.richness, rate: state.rate, end: task(state.waves).end,
  threshold: task(state.waves).star, seed: state.seed,
});

const time = { label: "time (steps × learning rate)" };

export const rich = {
  key: "rich",
  question: "How rich is rich?",
  lead: "Suppose that features move so as to lower the loss after the next step. Then one number, the feature rate γ, says how rich training is. How far does the kernel turn, and when does the task come out on top of its spectrum?",
  controls: [
    { key: "share", label: "Feature rate, in thresholds", symbol: "γ/γ*", min: 0.01, max: 30, log: true, value: 2, hint: "0 would be a frozen kernel" },
    { key: "waves", label: "Waves of the task on the circle", min: 1, max: 4, whole: true, value: 2, hint: "more waves: harder for the first kernel" },
  ],
  networkControls: [
    { key: "richness", label: "Output divided by", min: 0.1, max: 100, log: true, value: 10, hint: "larger is richer" },
    { key: "width", label: "Width", symbol: "N", min: 8, max: 800, log: true, whole: true, value: 400 },
    { key: "rate", label: "Learning rate", symbol: "η", min: 0.01, max: 3, log: true, value: 0.1 },
    { key: "seed", label: "Seed", min: 0, max: 99, whole: true, value: 0 },
  ],
  charts: [
    { key: "loss", title: "Rich learns faster", x: time, y: { label: "mean squared error", least: [0, 1] }, caption: "Dashed: the same kernel, frozen." },
    { key: "alignment", title: "The kernel turns to the task", x: time, y: { label: "kernel-task alignment", least: [0, 1] }, caption: "It turns as long as there is a residual to turn it." },
    { key: "gamma", title: "A threshold", x: { label: "feature rate γ/γ*", log: true }, y: { label: "share", least: [0, 1] },
      series: [{ label: "network: task in the top", color: 2 }, { label: "network: alignment", color: 1 }],
      caption: "Alignment rises smoothly. The top eigenvector changes its mind at γ*: there the task overtakes the constant mode." },
    { key: "spectrum", title: "One eigenvalue rises", x: { label: "rank" }, y: { label: "eigenvalue of the kernel", log: true }, caption: "K∞ = K₀ + γ y yᵀ: the task lifts one eigenvalue; nearly all others stay." },
  ],
  examples: [
    { label: "lazy", set: { share: 0.05, richness: 0.1 }, say: "Hardly any feature rate, and a network whose output is multiplied: both follow the frozen kernel." },
    { label: "at the threshold", set: { share: 1, richness: 8 }, say: "The task just overtakes the constant mode of the kernel." },
    { label: "very rich", set: { share: 10, richness: 60 }, say: "The kernel becomes little more than the task itself." },
    { label: "harder task", set: { waves: 4, share: 2, richness: 30 }, say: "The frozen kernel is slow on fine waves; features help most there." },
    { label: "narrow (fails)", set: { width: 12 }, say: "Twelve units: their first kernel is not that of the infinitely wide network from which the lines start." },
    { label: "too large a rate (fails)", set: { rate: 2.5 }, say: "As the kernel grows, the steps overshoot." },
  ],
  formula: `<p>Residual ${inline("\\Delta = f - y")}, kernel ${inline("K")}, and features that move down the next loss at the rate ${inline("\\gamma")}:</p>
${displayed("\\frac{d \\Delta}{d t} = - \\eta K \\Delta , \\quad K(t) + \\gamma \\Delta \\Delta^{\\top} = \\text{const}")}
<p>The second equation is a conserved matrix. At the end the residual is gone, and what it held is in the kernel:</p>
${displayed("K_{\\infty} = K_0 + \\gamma y y^{\\top} , \\quad \\frac{1}{\\gamma^{*}} = \\sum_{i>1} \\frac{(u_i \\cdot y)^2}{\\lambda_1 - \\lambda_i}")}
<p>The exact path, not in the papers, is ${inline("\\Delta(t) = e^{- \\eta C t} \\Delta_0 / \\sqrt{D(t)}")} with ${inline("C = K_0 + \\gamma \\Delta_0 \\Delta_0^{\\top}")}. Shan &amp; Bordelon 2021, corrected.</p>`,
  fails: "<p>This is <em>not</em> a theory of networks: it says what features should do. A real network has no γ; the panel says which γ would turn the kernel as far as the network did. Set it, and see how well one number tells the whole path: its kernel also grows in directions that the task does not need. The lines start from the kernel of an infinitely wide network: narrow ones start elsewhere.</p>",
  theory, python, experiment,
};
