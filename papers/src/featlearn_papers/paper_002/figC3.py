"""Atanasov et al. 2022, Fig. C.3.

The strength of a two-layer linear network and its kernel along the teacher, over both phases, against closed forms.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

import featlearn as fl
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import BLUE, GRAY, GREEN, ORANGE, curve, panels, seed_curves
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.linear_networks import random_weights, whitened_task
from featlearn_papers.paper_002.silence import SEEN, two_classes


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Whitened inputs, X^T X / P a projector; loss 1/(2P) sum (f - y)^2."""

    samples: int = 50
    inputs: int = 25
    width: int = 10
    sigmas: tuple[float, ...] = (0.1, 0.01, 0.001)
    """of panel a: weights are N(0, sigma^2 / fan_in); the one of `sigma` is drawn"""
    data: str = "mnist"
    images: int = 1000
    image_width: int = 100
    cut: float = SEEN
    """directions with singular values below this share of the largest are dropped before whitening"""
    sigma: float = 0.01
    moments: int = 60

    def times(self) -> Tensor:
        """In units of 1/s: until learning at the smallest sigma is over."""
        end = 6 - numpy.log(min((*self.sigmas, self.sigma)))
        return torch.linspace(0, float(end), self.moments + 1, dtype=torch.float64)


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """q and r of networks and both closed forms, under "synthetic/..." (a row for each sigma) and "images/..."."""
    X, y, _ = whitened_task(setup.samples, setup.inputs, context.generator())
    rows = [path(X, y, sigma, setup.width, setup.times(), context) for sigma in setup.sigmas]
    found: dict[str, Numbers] = {f"synthetic/{name}": [row[name] for row in rows] for name in rows[0]}
    context.say("synthetic")
    task = two_classes(context, setup.data, setup.images, 0, cut=setup.cut)
    images = path(task.exact, task.y.double().cpu(), setup.sigma, setup.image_width, setup.times(), context)
    values = torch.linalg.eigvalsh(task.exact.T @ task.exact / setup.images)
    return (
        found
        | {f"images/{name}": value for name, value in images.items()}
        | {
            "images/inputs": task.exact.shape[1],
            "images/rank": int((values > 0.5).sum()),
        }
    )


def path(X: Tensor, y: Tensor, sigma: float, width: int, times: Tensor, context: Context) -> dict[str, Any]:
    """(2, T) each, q and r over s: of a network under gradient flow, of the closed form, and of that without r0.

    `times` are in units of 1/s. The network is integrated, not stepped: steps would add errors of the size of the
    learning rate, more than those that are looked for.
    """
    weights = fl.theory.deep_linear.minimum_norm(X, y)
    s = weights.norm()
    beta = weights / s
    layers = random_weights(X.shape[1], width, 2, sigma, context.generator(1))
    flow = fl.theory.deep_linear.flow(layers, X, y, times=times / s, rate=1 / len(X))
    assert flow.layers is not None
    forward, readout = flow.layers[0] @ beta, flow.layers[1][:, 0]  # (T, N) each
    q, r = (forward.square().sum(1) + readout.square().sum(1)) / 2, (forward * readout).sum(1)
    theory = fl.theory.deep_linear.two_layer(times / s, q[0], r[0], s)
    printed = fl.theory.deep_linear.two_layer(times / s, q[0], 0.0, s)
    start = fl.theory.deep_linear.initial_statistics(sigma, X.shape[1], width)
    return {
        "measured": torch.stack([q, r]) / s,
        "theory": torch.stack([theory.q, theory.r]) / s,
        "printed": torch.stack([printed.q, printed.r]) / s,
        "s": s,
        "start": q[0] / start.mean_q0,
    }


def errors(runs: Runs, part: str, form: str) -> Array:
    """(S, ...): largest distance of a closed form from the network, over time and over q and r, in units of s."""
    largest: Array = abs(runs[f"{part}/measured"] - runs[f"{part}/{form}"]).max((-2, -1))
    return largest


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The caption, "exact up to O(sigma^2)" of App. C.5, and the start of Eq. 34."""
    drawn, rank = setup.sigmas.index(setup.sigma), runs["images/rank"].mean()
    bound = 10 * setup.sigma**2
    cut = Choice(
        made=f"a cut of {setup.cut:g}, which leaves {rank:.0f} of {runs['images/inputs'][0]:.0f} directions",
        other="a cut of 1e-6",
    )
    why = f"Errors of order sigma^2 = {setup.sigma**2:g}, with room for a factor of ten."
    synthetic, images = errors(runs, "synthetic", "theory"), errors(runs, "images", "theory")
    yield Claim(
        id="synthetic",
        claim="Exact and analytic q(t), r(t) overlay, r0 kept (a): largest difference over s",
        paper="overlay",
        values=synthetic[:, drawn],
        band=(None, bound),
        band_from="theory",
        why=why,
    )
    yield Claim(
        id="images",
        claim="The same on whitened images of two classes (b)",
        paper="overlay",
        values=images,
        band=(None, bound),
        band_from="theory",
        why=why,
        choices=[cut],
    )
    dropped = (
        "Eq. 50, 51 drop r0, which is of order q0 / sqrt(D) at any sigma: the strength grows from (q0 + r0) / 2, and "
        "the time of learning is off by log(1 + r0 / q0) / 2s."
    )
    for part, values in (
        ("synthetic", errors(runs, "synthetic", "printed")[:, drawn]),
        ("images", errors(runs, "images", "printed")),
    ):
        yield Claim(
            id=f"{part}-printed",
            claim=f"So do Eq. 50 and 51 as printed ({'a' if part == 'synthetic' else 'b'}), up to O(sigma^2)",
            paper="overlay",
            values=values,
            band=(None, bound),
            band_from="print",
            known=dropped,
        )
    logs = numpy.log(setup.sigmas)
    yield Claim(
        id="order",
        claim="Corrections are O(sigma^2) (App. C.5): exponent of the largest difference in sigma (a)",
        paper=2.0,
        values=[numpy.polyfit(logs, numpy.log(row), 1)[0] for row in synthetic],
        band=(1.7, 2.3),
        band_from="print",
        why=f"Over sigma from {setup.sigmas[0]:g} to {setup.sigmas[-1]:g}.",
    )
    ends = runs["images/measured"][:, :, -1]
    yield Claim(
        id="end",
        claim="Both come to s (b): largest distance at the end",
        paper="s",
        values=abs(ends - 1).max(1),
        band=(None, 0.01),
        band_from="theory",
    )
    yield Claim(
        id="start",
        claim="q0 is sigma^2 / 2 (1 + N / D) (Eq. 34, b): ratio",
        paper=1.0,
        values=runs["images/start"],
        band=(0.75, 1.25),
        band_from="theory",
        why="Two standard deviations of one draw, 0.126 at these sizes.",
        least=Scale.LAPTOP,
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """Panels a and b, of the first seed since seeds start from different q0 and r0; below, the differences of all."""
    names = (
        f"a  synthetic, D = {setup.inputs}, N = {setup.width}",
        f"b  {setup.data}, rank {runs['images/rank'][0]:.0f} of D = {runs['images/inputs'][0]:.0f}, "
        f"N = {setup.image_width}",
    )
    figure, axes = panels(2, 2, height=2.1, titles=(*names, "a  differences (not in the paper)", "b  differences"))
    times, drawn = setup.times(), setup.sigmas.index(setup.sigma)
    for column, part in enumerate(("synthetic", "images")):
        above, below = axes[column], axes[2 + column]
        rows = {form: runs[f"{part}/{form}"] for form in ("measured", "theory", "printed")}
        if part == "synthetic":
            rows = {form: row[:, drawn] for form, row in rows.items()}
        for i, (name, color) in enumerate((("q", BLUE), ("r", ORANGE))):
            curve(above, times, rows["measured"][0, i], f"{name}, network", color=color, linewidth=3 - 2 * i)
        for form, label, style in (("theory", "theory, r₀ kept", "--"), ("printed", "as printed, r₀ = 0", ":")):
            curve(above, times, rows[form][0, 0], f"q, {label}", color="black", style=style, linewidth=0.9)
            curve(above, times, rows[form][0, 1], f"_r, {label}", color="black", style=style, linewidth=0.9)
            off = abs(rows[form] - rows["measured"]).max(1)
            seed_curves(below, times, off + 1e-12, label, color=GREEN if form == "theory" else GRAY)
        above.set(xlabel="time × s", ylabel="q / s, r / s")
        below.set(xlabel="time × s", ylabel="largest of q and r", yscale="log", ylim=(1e-8, 1))
        above.legend()
        below.legend()
    return figure


EXPERIMENT = Experiment(
    id="002/figC3",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(
                samples=24,
                inputs=12,
                width=7,
                sigmas=(0.1, 0.01),
                data="digits",
                images=100,
                image_width=20,
                moments=40,
            ),
            seeds=1,
            seconds=2,
            mebibytes=10,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=60, mebibytes=100),
        Scale.PAPER: Size(setup=Setup(moments=120), seeds=10, seconds=90, mebibytes=100),
    },
    measure=measure,
)

FIG_C3 = Reproduction(
    id="002/figC3",
    about=(
        "Two-layer linear networks from small weights: q, half the kernel along the teacher, and r, the strength of "
        "the function, over both phases. Sizes are the paper's; it names no initial scale (ours: 0.01, in panel a also "
        "0.1 and 0.001), no samples (ours: 50, and 1000 images of 0 and 1) and no rank. Two-class MNIST does not span "
        "784 directions: those with singular values below 1/1000 of the largest are dropped, the others are whitened, "
        "and a target that they do not span stays in the loss and touches neither q nor r. Networks follow gradient "
        "flow, integrated from their own weights, so that no step size adds to the difference. The closed form keeps "
        "r0, which the print drops. Seeds start from other q0 and r0: drawn is the first."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
