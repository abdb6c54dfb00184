"""Atanasov et al. 2022, Fig. E.1.

Linear networks of several depths on whitened inputs: loss, kernel-task alignment and first layer.
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
from featlearn_papers.frame.drawing import COLORS, curve, panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.linear_networks import dense_times, random_weights, rising, whitened_task
from featlearn_papers.paper_002.silence import first


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Whitened inputs, a linear teacher of length s = 1, loss 1/(2P) sum (f - y)^2."""

    samples: int = 60
    inputs: int = 30
    width: int = 50
    depths: tuple[int, ...] = (2, 3, 4, 5)
    """L, weight matrices"""
    sigma: float = 0.1
    """of the curves: weights are N(0, sigma^2 / fan_in)"""
    others: tuple[float, ...] = (0.05, 0.07)
    """smaller ones, for the power of t_1/2"""
    moments: int = 200

    @property
    def sigmas(self) -> tuple[float, ...]:
        """All, that of the curves last."""
        return (*self.others, self.sigma)


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Half times (depths, sigmas), and for the last sigma loss, alignment and cosine (depths, T) at their own times."""
    X, y, beta = whitened_task(setup.samples, setup.inputs, context.generator())
    found: dict[str, list[Numbers]] = {name: [] for name in ("times", "loss", "alignment", "cosine", "half_time")}
    for depth in setup.depths:
        halves = []
        for sigma in setup.sigmas:
            times = moments(setup, depth, sigma)
            layers = random_weights(setup.inputs, setup.width, depth, sigma, context.generator(depth))
            path = fl.theory.deep_linear.flow(layers, X, y, times=times, rate=1 / setup.samples)
            halves.append(fl.metrics.time_to(times, path.loss, 0.5, of="initial"))
            context.say(f"L={depth} sigma={sigma:g} half time {halves[-1]:.4g}")
        assert path.layers is not None
        found["half_time"].append(halves)
        found["times"].append(times)
        found["loss"].append(path.loss / path.loss[0])
        found["alignment"].append(path.alignment)
        found["cosine"].append(first_cosines(path.layers[0], beta))
    best = [float(fl.theory.deep_linear.whitened_max_alignment(depth, setup.inputs)) for depth in setup.depths]
    return {**{name: torch.as_tensor(numpy.array(values)) for name, values in found.items()}, "best": best}


def moments(setup: Setup, depth: int, sigma: float) -> Tensor:
    """Dense on a linear and on a logarithmic axis, until well after a balanced network of this size has learned."""
    end = 2.5 * float(fl.theory.deep_linear.half_time(1.0, sigma**depth, depth)) + 10
    return dense_times(0.03, end, setup.moments)


def first_cosines(W: Tensor, beta: Tensor) -> Tensor:
    """(T,): of W^T W with beta beta^T, for W (T, N, D)."""
    cosines: Tensor = (W @ beta).square().sum(1) / (W.mT @ W).flatten(1).norm(dim=1)
    return cosines


def exponent(setup: Setup, runs: Runs, i: int) -> Array:
    """(S,): slope of log t_1/2 against log sigma at the i-th depth."""
    return numpy.array([numpy.polyfit(numpy.log(setup.sigmas), numpy.log(row[i]), 1)[0] for row in runs["half_time"]])


def duration(runs: Runs, *, relative: bool) -> Array:
    """(S, depths): from nine tenths of the loss to one tenth, as a factor of time, or as a time."""
    found = []
    for times, losses in zip(runs["times"], runs["loss"], strict=True):
        ends = [
            [first(t, loss, share, "initial") for share in (0.9, 0.1)] for t, loss in zip(times, losses, strict=True)
        ]
        found.append([end / begin if relative else end - begin for begin, end in ends])
    return numpy.array(found)


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The sentences of the caption, in the order of its panels."""
    for i, depth in enumerate(setup.depths):
        if depth > 2:
            yield Claim(
                id=f"power-{depth}",
                claim=f"t_1/2 goes as sigma^(2-L) (a): exponent for L = {depth}",
                paper=2.0 - depth,
                values=exponent(setup, runs, i),
                band=(1.85 - depth, 2.15 - depth),
                band_from="trial",
                least=Scale.LAPTOP,
                why=f"-1.06 is known for L = 3 (Fig. 3). Here sigma goes from {max(setup.sigmas):g} to "
                f"{min(setup.sigmas):g}.",
            )
    yield Claim(
        id="sharper",
        claim="The loss decays more sharply with depth (a): time at a tenth over that at nine tenths "
        "falls from each depth to the next",
        paper="yes",
        values=rising(-duration(runs, relative=True)),
        band=(1, None),
        band_from="print",
        choices=[
            Choice(
                made="as a factor, on the paper's logarithmic axis",
                other="as a difference of times",
                values=rising(-duration(runs, relative=False)),
            ),
        ],
    )
    ends = runs["alignment"][:, :, -1]
    yield Claim(
        id="monotone",
        claim="The final alignment increases with depth (b)",
        paper="yes",
        values=rising(ends),
        band=(1, None),
        band_from="print",
    )
    yield Claim(
        id="maximum",
        claim="It is L / sqrt(L^2 - 1 + D) (b): largest difference",
        paper="overlay",
        values=abs(ends - runs["best"]).max(1),
        band=(None, 0.01),
        band_from="theory",
        why="The limit of small weights of App. E.2; at sigma = 0.05 and L = 3 0.001 is known.",
        least=Scale.LAPTOP,
    )
    far = fl.theory.deep_linear.whitened_max_alignment(1000, setup.inputs)
    yield Claim(
        id="limit",
        claim="It approaches 1 as L grows (b): the formula at L = 1000",
        paper=1.0,
        values=float(far),
        band=(0.999, 1.0),
        band_from="theory",
        check=True,
        why="1 - (D - 1) / (2 L^2) for large L.",
    )
    yield Claim(
        id="first-layer",
        claim="The first layer comes to the teacher at all depths (c): smallest cosine of W1^T W1 "
        "with beta beta^T at the end",
        paper=1.0,
        values=runs["cosine"][:, :, -1].min(1),
        band=(0.98, 1.0),
        band_from="choice",
        least=Scale.LAPTOP,
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """The three panels of the paper, of the first seed; d, final alignment over depth, is ours."""
    figure, axes = panels(2, 2, height=2.2, titles=("a", "b", "c", "d  end of b over depth (not in the paper)"))
    for i, depth in enumerate(setup.depths):
        label, color, times = f"L = {depth}", COLORS[i], runs["times"][0, i]
        for ax, name in zip(axes, ("loss", "alignment", "cosine"), strict=False):
            curve(ax, times, runs[name][0, i], label, color=color)
        axes[1].axhline(runs["best"][0, i], color=color, linestyle=":", label=f"_formula, {label}")
    for ax in axes[:3]:
        ax.set_xlim(0.1, None)
    for ax, words in zip(axes, ("loss / initial loss", "kernel-task alignment", "cosine of first layer"), strict=False):
        ax.set(xscale="log", xlabel="time", ylabel=words, ylim=(0, 1.05))
    depths = numpy.geomspace(1, 100, 60)
    formula = depths / numpy.sqrt(depths**2 - 1 + setup.inputs)
    curve(axes[3], depths, formula, r"$L / \sqrt{L^2 - 1 + D}$", color="black", style="--")
    curve(axes[3], setup.depths, runs["alignment"][:, :, -1], "networks, end", style="o")
    axes[3].axhline(1.0, color="black", linestyle=":", label="L → ∞")
    axes[3].set(xscale="log", xlabel="L", ylabel="kernel-task alignment", ylim=(0, 1.05))
    axes[0].legend()
    axes[3].legend()
    return figure


EXPERIMENT = Experiment(
    id="002/figE1",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(samples=20, inputs=10, width=16, depths=(2, 3, 4), sigma=0.2, others=(0.3,), moments=80),
            seeds=1,
            seconds=3,
            mebibytes=10,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=20, mebibytes=30),
        Scale.PAPER: Size(
            setup=Setup(others=(0.025, 0.035, 0.05, 0.07), moments=400), seeds=5, seconds=60, mebibytes=30
        ),
    },
    measure=measure,
)

FIG_E1 = Reproduction(
    id="002/figE1",
    about=(
        "Linear networks of two to five layers on whitened inputs of the paper's 30 dimensions: the deeper, the later "
        "and the more suddenly the loss falls, and the more the final kernel is aligned with the task, "
        "L / sqrt(L^2 - 1 + D), which goes to 1. The paper gives neither depths nor width, scale or samples: ours are "
        "50 hidden units (as in its Fig. 3), sigma = 0.1, 60 samples, and two smaller scales for the power of the half "
        "time. Networks follow gradient flow, integrated from their random weights. Drawn is the first seed, since "
        "seeds fall at different times; dotted lines in b are the formula."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
