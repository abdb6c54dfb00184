"""Shan & Bordelon 2021b, Fig. 4.

The kernel of a linear network turns to the task, and the kernels of its outputs do not specialize.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import BLACK, BLUE, COLORS, ORANGE, curve, panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_000 import specialization
from featlearn_papers.paper_000.linear_outputs import LINEAR_OUTPUTS
from featlearn_papers.paper_000.specialization import contrast

HIDDEN_LAYERS = 2
"""L of the paper, three weight layers"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Gaussian inputs, a linear teacher of length 1, loss P^-1 sum (f - y)^2, full batch."""

    samples: int = 80
    inputs: int = 50
    width: int = 50
    gains: tuple[float, ...] = (0.3, 1.0, 0.1)
    """weights are N(0, gain^2 / fan_in); the claims are about the first"""
    lr: float = 0.05
    steps: int = 400
    stride: int = 4
    """steps between measurements"""


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Gains first, from the same draws scaled: what `followed` finds, and what the theory says of the last kernel."""
    task = fl.data.linear_teacher(setup.samples, setup.inputs, generator=context.generator(), dtype=torch.float64)
    target: Any = task.target
    X, y, beta = task.x, task.y, target.weights
    final = fl.theory.deep_linear.final_ntk(X, y, HIDDEN_LAYERS + 1)
    found: dict[str, list[Any]] = {}
    for i, gain in enumerate(setup.gains):
        model = MLP(
            setup.inputs,
            None,
            width=setup.width,
            hidden_layers=HIDDEN_LAYERS,
            activation="linear",
            weight_variance=gain**2,
            generator=context.generator(1),
        ).double()
        first = fl.ntk(model, X)
        numbers, last = followed(model, X, y, beta, setup)
        numbers["final_distance"] = fl.metrics.kernel_distance(last, final)
        numbers["printed_distance"] = fl.metrics.kernel_distance(last, HIDDEN_LAYERS * torch.outer(y, y) + first)
        for name, values in numbers.items():
            found.setdefault(name, []).append(torch.as_tensor(values))
        context.progress(i + 1, len(setup.gains), gain=gain, loss=float(numbers["loss"][-1]))
    steps = torch.arange(0, setup.steps + 1, setup.stride)
    best = fl.theory.deep_linear.max_alignment(X, y, HIDDEN_LAYERS + 1)
    return {
        "steps": steps,
        "best": best,
        "best_top": top_cosine(final, y),
        **{name: torch.stack(values) for name, values in found.items()},
    }


def followed(model: MLP, X: Tensor, y: Tensor, beta: Tensor, setup: Setup) -> tuple[dict[str, Any], Tensor]:
    """Gradient descent, at the moments (T,), and the last kernel.

    Loss over that of f = 0; cosines with the teacher of the product of all weights (`teacher`) and of the first layer's
    leading direction (`first_layer`, its sign left out); alignment of the kernel with the task, and of its top
    eigenvector with y (`top`, its sign left out).
    """
    optimizer, session = torch.optim.SGD(model.parameters(), lr=setup.lr), fl.Session(model, X)
    rows: dict[str, list[float]] = {}
    for step in range(setup.steps + 1):
        residual = model(X) - y
        if step % setup.stride == 0:
            kernel: Any = session.ntk()
            first, second, readout = (weight.detach() for weight in model.parameters())
            leading = torch.linalg.svd(first).Vh[0]
            for name, value in {
                "loss": residual.detach().square().sum() / y.square().sum(),
                "teacher": fl.metrics.correlation((readout @ second @ first)[0], beta),
                "first_layer": fl.metrics.correlation(leading, beta).abs(),
                "alignment": fl.metrics.alignment(kernel, y),
                "top": top_cosine(kernel, y),
            }.items():
                rows.setdefault(name, []).append(float(value))
        optimizer.zero_grad()
        residual.square().mean().backward()
        optimizer.step()
    return dict(rows), kernel


def top_cosine(kernel: Tensor, y: Tensor) -> Tensor:
    """Of the top eigenvector with y, its sign left out."""
    return fl.metrics.correlation(torch.linalg.eigh(kernel).eigenvectors[:, -1], y).abs()


def claims(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Iterable[Claim]:
    """The caption and Sec. 5."""
    yield from _alignment(setups["teacher"], runs["teacher"])
    yield from _kernel(setups["teacher"], runs["teacher"])
    yield from _outputs(setups["outputs"], runs["outputs"])


def other_gains(setup: Setup, values: Any) -> list[Choice]:
    """What the other scales of the weights give; `values` (S, gains)."""
    made = f"weights of N(0, {setup.gains[0]:g}^2 / fan-in)"
    return [Choice(made=made, other=f"{gain:g}", values=values[:, i]) for i, gain in enumerate(setup.gains) if i > 0]


def _alignment(setup: Setup, runs: Runs) -> Iterable[Claim]:
    yield Claim(
        id="teacher",
        claim="The weights turn to the teacher (A): cosine of their product with it, at the end",
        paper=1.0,
        values=runs["teacher"][:, 0, -1],
        band=(0.99, None),
        band_from="theory",
        check=True,
        why="With more samples than inputs every network without error is the teacher.",
    )
    yield Claim(
        id="first-layer",
        claim="The first layer's leading direction is that of the teacher (Sec. 5.1): cosine, end",
        paper=1.0,
        values=runs["first_layer"][:, 0, -1],
        band=(0.95, None),
        band_from="theory",
        choices=other_gains(setup, runs["first_layer"][:, :, -1]),
        why="For small initial weights, as the theory assumes; the text does not say whether the experiment has them.",
    )
    rise = runs["alignment"][:, :, -1] / runs["alignment"][:, :, 0]
    yield Claim(
        id="aligns",
        claim="The kernel becomes more aligned with the task (B): end over start",
        paper="rises",
        values=rise[:, 0],
        band=(1.0, None),
        band_from="print",
        choices=other_gains(setup, rise),
    )
    share = runs["alignment"][:, :, -1] / runs["best"][:, None]
    yield Claim(
        id="maximum",
        claim="It ends at the alignment of Eq. 12, corrected (B): measured over theory",
        paper=1.0,
        values=share[:, 0],
        band=(0.9, 1.1),
        band_from="theory",
        choices=other_gains(setup, share),
        why="The formula is for weights that are infinitely small at the start.",
    )
    turned = runs["top"][:, :, -1] - runs["top"][:, :, 0]
    yield Claim(
        id="top",
        claim="The top eigenvector of the kernel turns to the target (C): cosine, end less start",
        paper="rises",
        values=turned[:, 0],
        band=(0.0, None),
        band_from="print",
        choices=other_gains(setup, turned),
    )
    off = runs["top"][:, :, -1] - runs["best_top"][:, None]
    yield Claim(
        id="top-end",
        claim="... as far as Eq. 12, corrected, says (C): cosine at the end, measured less theory",
        paper=0.0,
        values=off[:, 0],
        band=(-0.05, 0.05),
        band_from="theory",
        choices=other_gains(setup, off),
        why="Where y y^T is not much larger than the first eigenvalues of X X^T, the top eigenvector is a mixture.",
    )


def _kernel(setup: Setup, runs: Runs) -> Iterable[Claim]:
    yield Claim(
        id="final-kernel",
        claim="The last kernel is (L / s^2) y y^T + X X^T (Eq. 12, corrected): 1 - cosine",
        paper=0.0,
        values=runs["final_distance"][:, 0],
        band=(None, 0.02),
        band_from="theory",
        choices=other_gains(setup, runs["final_distance"]),
        why="L = 2 hidden layers, a teacher of length s = 1.",
    )
    yield Claim(
        id="final-kernel-printed",
        claim="The last kernel is L y y^T + K_0 (Eq. 12, as printed): 1 - cosine",
        paper=0.0,
        values=runs["printed_distance"][:, 0],
        band=(None, 0.02),
        band_from="print",
        choices=other_gains(setup, runs["printed_distance"]),
        known="The second term is X X^T, of the size that the teacher sets: K_0 is X X^T only up to a factor of about "
        "3 gain^4, which small weights make vanish.",
    )
    overshoot = 1 - runs["alignment"][:, :, -1] / runs["alignment"].max(2)
    yield Claim(
        id="asymptote",
        claim="The alignment increases to an asymptote, as in Fig. 1 (B; Sec. 5.1): fall from its "
        "highest value on the way",
        paper="none",
        values=overshoot[:, 0],
        band=(None, 0.02),
        band_from="choice",
        choices=other_gains(setup, overshoot),
        why="2 %, for none. On inputs that are not white the kernel first turns to X X^T y, and then to y.",
    )


def _outputs(setup: Any, runs: Runs) -> Iterable[Claim]:
    found = contrast(runs["classes"])  # (S, gains, T)
    farthest = numpy.take_along_axis(found, abs(found).argmax(2)[:, :, None], 2)[:, :, 0]

    def given(values: Any) -> dict[str, Any]:
        made, others = f"weights of gain {setup.gains[0]:g}", list(enumerate(setup.gains))[1:]
        choices = [Choice(made=made, other=f"{gain:g}", values=values[:, i]) for i, gain in others]
        return {"values": values[:, 0], "choices": choices, "band": (-0.02, 0.02)}

    yield Claim(
        id="no-specialization",
        claim="Kernels of ten outputs do not specialize (D): mean diagonal of the KSM less mean of the rest",
        paper=0.0,
        band_from="trial",
        **given(found[:, :, -1]),
        why="Up to 0.02, as finite networks break the symmetry of outputs that the proof assumes.",
    )
    yield Claim(
        id="no-specialization-ever",
        claim="... nor on the way (Sec. 5.2): the same where it is farthest from 0",
        paper=0.0,
        band_from="choice",
        **given(farthest),
    )


def plot(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Any:
    """The four panels of the paper, and beside them the first layer and the KSM along training."""
    figure, axes = panels(2, 3, height=2.2, titles=("A", "B", "first layer", "C", "D", "specialization"))
    setup, found = setups["teacher"], runs["teacher"]
    steps = found["steps"][0] + 0.5  # step 0 has a place on a logarithmic axis
    order = sorted(range(len(setup.gains)), key=lambda i: setup.gains[i])
    for ax, name, label in (
        (axes[0], "teacher", "cosine with the teacher"),
        (axes[1], "alignment", "kernel-task alignment"),
        (axes[2], "first_layer", r"$|\cos(r_1, \beta)|$"),
        (axes[3], "top", r"$|\cos(v_1, y)|$"),
    ):
        for i in order:
            # one legend is enough
            shown = f"{'' if ax is axes[2] else '_'}gain {setup.gains[i]:g}"
            curve(ax, steps, found[name][:, i], shown, color=COLORS[i], spread="standard error")
        ax.set(xscale="log", xlabel="step", ylabel=label)
    for ax, name in ((axes[1], "best"), (axes[3], "best_top")):
        ax.axhline(found[name].mean(), color=BLACK, linestyle="--", linewidth=0.8, label="theory, gain to 0")
    classes = runs["outputs"]["classes"]
    matrix = classes[:, 0, -1]
    specialization.draw(axes[4], matrix, span=max(0.05, specialization.span(matrix)))
    at = runs["outputs"]["steps"][0]
    for i, gain in enumerate(setups["outputs"].gains):
        color = ORANGE if gain == 1 else BLUE  # as in the other panels
        curve(axes[5], at, contrast(classes[:, i]), f"gain {gain:g}", color=color, spread="standard error")
    axes[5].axhline(0.0, color=BLACK, linewidth=0.5, label="_none")
    axes[5].set(xlabel="step", ylabel="KSM, diagonal less rest")
    for ax in (*axes[1:4], axes[5]):
        ax.legend()
    return figure


EXPERIMENT = Experiment(
    id="001/fig4",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(samples=24, inputs=12, width=20, steps=200, stride=20), seeds=1, seconds=1, mebibytes=10
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=5, seconds=4, mebibytes=20),
        Scale.PAPER: Size(setup=Setup(), seeds=5, seconds=4, mebibytes=20),
    },
    measure=measure,
)

FIG_4 = Reproduction(
    id="001/fig4",
    about=(
        "Linear networks: with two hidden layers and one output, on a linear teacher (A to C); with four weight layers "
        "and ten outputs, on ten of them, inputs on the unit sphere (D). The paper gives no sizes, learning rate or "
        "scale of the weights; here 50 Gaussian inputs, 50 hidden units and 80 samples, and weights of N(0, gain^2 / "
        "fan-in). The theory is for small weights: the claims are judged at a gain of 0.3, and beside it stand 0.1 and "
        "1, the usual scale, at which the kernel turns much less. D is the experiment of Shan & Bordelon 2021a, "
        "Fig. 4B. The right column is beyond the print: the leading direction of the first layer, by which the theory "
        "explains the kernel, and how the KSM goes along training."
    ),
    experiment={"teacher": EXPERIMENT, "outputs": LINEAR_OUTPUTS},
    plot=plot,
    claims=claims,
)
