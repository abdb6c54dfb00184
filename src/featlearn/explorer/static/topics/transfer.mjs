/** Does a better kernel help with few samples? Transfer curves (Atanasov et al. 2022, App. F). */
import { linspace, logspace } from "../mathematics/arrays.mjs";
import { learningCurve } from "../mathematics/transfer.mjs";
import { displayed, inline } from "./formula.mjs";
import { kept } from "./kept.mjs";
import { number, script } from "./python.mjs";

const POINTS = 121;

const sizes = ({ dimension }) => [...new Set([0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.2, 1.5].map((share) => Math.max(1, Math.round(share * dimension))))];
const grid = ({ dimension }) => linspace(0, 1.5 * dimension, POINTS).map((v, i) => (i === 0 ? 0.5 : v));
const spikes = logspace(0.1, 100, 81);

function theory(state) {
  const { dimension, spike, overlap, ridge, noise, samples } = state;
  const error = (P, A, w = overlap) => learningCurve(P, dimension, A, w, ridge, noise).error;
  const place = `${dimension} ${ridge} ${noise}`;
  const finite = (values) => values.map((v) => (Number.isFinite(v) ? v : null));
  const over = (w) => kept(`over ${place} ${samples} ${w}`, () => finite(spikes.map((A) => error(samples, A, w))));
  const plain = () => kept(`plain ${place} ${overlap}`, () => finite(x.map((P) => error(P, 0))));
  const x = grid(state);
  return {
    charts: {
      curve: { x, marks: [{ at: dimension, label: "samples = inputs" }], lines: [
        { name: "error", label: "theory, kernel that knows β", color: 0, y: finite(x.map((P) => error(P, spike))) },
        { name: "plain error", label: "kernel that knows nothing, A = 0", color: 6, dash: true, y: plain() }] },
      spike: { x: spikes, marks: [{ at: Math.max(0.1, spike), label: "here" }], lines: [
        { name: "error over spike", label: `theory, ${samples} samples`, color: 1, y: over(overlap) },
        { name: "same task", label: "the same task, w = β", color: 2, dash: true, y: over(1) },
        { name: "other task", label: "a task across β", color: 3, dash: true, y: over(0) }] },
    },
    said: sentence(samples, error(samples, spike), error(samples, 0)),
  };
}

function sentence(samples, now, plain) {
  const digits = (value) => Number(value.toPrecision(3));
  if (!Number.isFinite(now)) return "As many samples as inputs, noisy labels and no ridge: the error has <strong>no bound</strong>.";
  if (plain === 0) return `${samples} samples determine all inputs: there is no error left, whatever the kernel knows.`;
  const less = `divides the error by <strong>${digits(plain / now)}</strong>`, more = `<strong>multiplies</strong> the error by ${digits(now / plain)}`;
  const change = Math.abs(now / plain - 1) < 0.02 ? "changes nothing" : now < plain ? less : more;
  const effect = `With ${samples} samples, what the kernel learned from the first task ${change}: from ${digits(plain)} to ${digits(now)}.`;
  return `${effect} A linear network of L layers, trained on the first task from small weights, ends with A = L − 1.`;
}

function python({ dimension, spike, overlap, ridge, noise, samples }) {
  return script(`D, A, overlap, ridge, noise, P = ${dimension}, ${number(spike)}, ${number(overlap)}, ${number(ridge)}, ${number(noise)}, ${samples}
sizes = torch.linspace(0, 1.5 * D, ${POINTS}, dtype=torch.float64)
sizes[0] = 0.5
spikes = torch.logspace(-1, 2, 81, dtype=torch.float64)
curve = fl.theory.transfer.learning_curve
curves = {
    "error": (sizes, curve(sizes, D, A, overlap, ridge, noise).error),
    "plain error": (sizes, curve(sizes, D, 0.0, overlap, ridge, noise).error),
    "error over spike": (spikes, curve(P, D, spikes, overlap, ridge, noise).error),
    "same task": (spikes, curve(P, D, spikes, 1.0, ridge, noise).error),
    "other task": (spikes, curve(P, D, spikes, 0.0, ridge, noise).error),
}`);
}

const experiment = (state) => ({
  dimension: state.dimension, spike: state.spike, overlap: state.overlap, ridge: state.ridge, noise: state.noise, samples: state.samples,
  sizes: sizes(state), descent: state.descent, draws: state.draws, seed: state.seed,
});

export const transfer = {
  key: "transfer",
  question: "Does a better kernel help with few samples?",
  lead: "A network has learned one task, and its kernel has turned toward it. Now it meets a new task with few samples. If the tasks are alike, it needs far fewer; if they are not, it would have been better off without.",
  controls: [
    { key: "spike", label: "How much the kernel learned", symbol: "A", min: 0, max: 50, value: 5, hint: "strength of the direction β in the kernel" },
    { key: "overlap", label: "How alike the tasks are", symbol: "w·β", min: 0, max: 1, value: 0.9 },
    { key: "samples", label: "Samples", symbol: "P", min: 2, max: 90, whole: true, value: 15 },
    { key: "dimension", label: "Inputs", symbol: "D", min: 10, max: 100, whole: true, value: 60 },
    { key: "ridge", label: "Ridge", symbol: "λ", min: 0, max: 20, value: 0.5 },
    { key: "noise", label: "Noise of the labels", symbol: "s²", min: 0, max: 0.5, value: 0 },
  ],
  networkControls: [
    { key: "descent", label: "Steps of descent, at most", min: 3, max: 3000, log: true, whole: true, value: 2000, hint: "the theory is for training to the end" },
    { key: "draws", label: "Training sets", min: 10, max: 400, log: true, whole: true, value: 40 },
    { key: "seed", label: "Seed", min: 0, max: 99, whole: true, value: 0 },
  ],
  charts: [
    { key: "curve", title: "Error against samples", x: { label: "samples P" }, y: { label: "error on new inputs", least: [0, 1], most: 3 }, caption: "Points: readouts trained in this page on random training sets, mean and standard error." },
    { key: "spike", title: "Error against what the kernel knows", x: { label: "strength A", log: true }, y: { label: "error on new inputs", least: [0, 1] }, caption: "Down for the same task, up for another one: features are a bet on the next task." },
  ],
  examples: [
    { label: "the same task", set: { overlap: 1 }, say: "What was learned is all that is needed: a handful of samples suffice." },
    { label: "another task", set: { overlap: 0, spike: 20 }, say: "The kernel looks in the wrong direction and learns more slowly than one that knows nothing." },
    { label: "noisy labels", set: { noise: 0.3, ridge: 0 }, say: "Without a ridge the error explodes where samples and inputs are as many: double descent." },
    { label: "ridge against noise", set: { noise: 0.3, ridge: 15 }, say: "The ridge takes the peak away." },
    { label: "small problem (fails)", set: { dimension: 12, samples: 3, ridge: 0, overlap: 1, spike: 20, draws: 400 }, say: "The theory is for many inputs and samples. Here one direction holds the whole task, and a handful of samples decide: the points lie above the line." },
    { label: "stopped early (fails)", set: { descent: 10 }, say: "Ten steps of descent: weak directions are not learned yet, as if there were a ridge." },
  ],
  formula: `<p>Kernel ${inline("K = x^{\\top} (A \\beta \\beta^{\\top} + 1) x'")}, new task ${inline("w")}. Its modes ${inline("\\lambda_k")} are ${inline("1 + A")} once and 1 for the others. Averaged over training sets,</p>
${displayed("E = \\frac{1}{1 - g} ( \\sum_k \\frac{\\kappa^2 a_k^2}{(\\lambda_k P + \\kappa)^2} + s^2 g ) , \\quad \\kappa = \\lambda + \\kappa \\sum_k \\frac{\\lambda_k}{\\lambda_k P + \\kappa}")}
<p>A mode is learned once ${inline("\\lambda_k P")} exceeds ${inline("\\kappa")}: with ${inline("A")} the direction ${inline("\\beta")} needs ${inline("1 + A")} times fewer samples, and the others pay for it through ${inline("\\kappa")}. Atanasov et al. 2022, App. F, with the factor ${inline("\\kappa^2")} that the print leaves out; the noise is ours.</p>`,
  fails: "<p>The formula is exact for many inputs and samples together. With few, or near P = D without a ridge, single training sets scatter widely and their mean leaves the line. Training that stops early is another predictor than the one at the end of training.</p>",
  theory, python, experiment,
};
