"""Wide residual networks trained by Adam: the experiments behind Atanasov et al. 2022, App. J, and what is read off."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import COLORS, GRAY, GREEN, PINK, curve, panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.silence import first
from featlearn_papers.paper_002.whitened import Residual, residual

KERNELS = (("final NTK", GREEN), ("initial NTK", GRAY), ("Adam's kernel", PINK))
"""of the regressions, in the order of `error` and `correlation`"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Networks that differ in blocks, width or inputs, with the same number of steps."""

    networks: tuple[Residual, ...]


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """(V, ...) for V networks, from the same images: curves, predictions on test points, errors and correlations."""
    found: dict[str, list[torch.Tensor]] = {}
    for part in setup.networks:
        context.say(f"b={part.b} k={part.k:g} power={part.power}")
        for name, value in residual(part, context, updates=True).items():
            found.setdefault(name, []).append(value.cpu())
    return {name: torch.stack(values) for name, values in found.items()}


def variants(part: Residual, field: str, values: Iterable[Any]) -> Setup:
    """Networks that differ in one field."""
    return Setup(networks=tuple(replace(part, **{field: value}) for value in values))


TINY = Residual(data="digits", samples=12, test_samples=12, k=0.125, lr=1e-3, steps=8, stride=4)
SMALL = Residual(samples=40, test_samples=60, pooling=4, k=0.5, lr=2e-4, steps=200, stride=10)
LARGE = Residual(stride=50, dense=10)
IMAGES: dict[str, Any] = {"power": None}

BLOCKS = Experiment(
    id="002/residual-blocks",
    sizes={
        Scale.SMOKE: Size(setup=variants(TINY, "b", (1, 2)), seeds=1, seconds=2, mebibytes=50),
        Scale.LAPTOP: Size(setup=variants(SMALL, "b", (1, 2, 3)), seeds=3, seconds=70, mebibytes=200),
        Scale.PAPER: Size(
            setup=variants(LARGE, "b", (1, 2, 3, 4)), seeds=3, seconds=600, mebibytes=4000, device="cuda"
        ),
    },
    measure=measure,
)
WIDTHS = Experiment(
    id="002/residual-widths",
    sizes={
        Scale.SMOKE: Size(setup=variants(replace(TINY, b=2), "k", (0.125, 0.25)), seeds=1, seconds=2, mebibytes=50),
        Scale.LAPTOP: Size(
            setup=variants(replace(SMALL, b=2, steps=250), "k", (0.25, 0.5, 1.0)), seeds=3, seconds=90, mebibytes=200
        ),
        Scale.PAPER: Size(
            setup=variants(replace(LARGE, b=2, steps=7000, stride=100), "k", (1.0, 2.0, 3.0, 4.0)),
            seeds=3,
            seconds=1200,
            mebibytes=4000,
            device="cuda",
        ),
    },
    measure=measure,
)
UNWHITENED = Experiment(
    id="002/residual-unwhitened",
    sizes={
        Scale.SMOKE: Size(
            setup=variants(replace(TINY, **IMAGES), "mean_eigenvalue", (1.0, None)), seeds=1, seconds=2, mebibytes=50
        ),
        Scale.LAPTOP: Size(
            setup=variants(replace(SMALL, **IMAGES), "mean_eigenvalue", (1.0, None)), seeds=3, seconds=45, mebibytes=200
        ),
        Scale.PAPER: Size(
            setup=variants(replace(LARGE, **IMAGES), "mean_eigenvalue", (1.0, None)),
            seeds=3,
            seconds=300,
            mebibytes=3000,
            device="cuda",
        ),
    },
    measure=measure,
)
"""First with the total of eigenvalues that whitened images have, then with pixels of deviation 1."""


def times(runs: Runs, name: str, fraction: float, of: Any = "final") -> Array:
    """(S, V): the step at which a curve of each network reaches a fraction of its end or start."""
    rows = zip(runs["steps"], runs[name], strict=True)
    return numpy.array([[first(t, v, fraction, of) for t, v in zip(*row, strict=True)] for row in rows])


def half_times(runs: Runs) -> Array:
    """(S, V): of the loss."""
    return times(runs, "loss", 0.5, "initial")


def faster(runs: Runs) -> dict[str, Any]:
    """Half times that fall from network to network, and times to a tenth of the loss."""
    found = ordered(half_times(runs), rising=False)
    late = ordered(times(runs, "loss", 0.1, "initial"), rising=False)["values"]
    found["choices"].append(Choice(made="time to half of the loss", other="to a tenth of it", values=late))
    return found


def shares(runs: Runs, alignment: str) -> Array:
    """(S, V): an alignment when the norm of the kernel is a tenth of its last, the dashed lines of the paper, over its
    end."""
    found = []
    for moments, steps, rows in zip(times(runs, "norm", 0.1), runs["steps"], runs[alignment], strict=True):
        # before the first step Adam has no kernel
        pairs = zip(moments, steps[:, 1:], rows[:, 1:], strict=True)
        found.append([numpy.interp(moment, t, v) / v[-1] for moment, t, v in pairs])
    return numpy.array(found)


def ratios(values: Array) -> Array:
    """(S, V - 1): of each network's number to that of the one before."""
    found: Array = values[:, 1:] / values[:, :-1]
    return found


def ordered(values: Array, *, rising: bool) -> dict[str, Any]:
    """A number that rises or falls from network to network: the worst of their ratios, and the last over the first."""
    steps, band = ratios(values), (1, None) if rising else (None, 1)
    ends = values[:, -1] / values[:, 0]
    other = Choice(made="the worst ratio of neighbors", other="the last network over the first", values=ends)
    worst = steps.min(1) if rising else steps.max(1)
    return {"values": worst, "band": band, "band_from": "print", "choices": [other], "least": Scale.LAPTOP}


def silent(runs: Runs, labels: Sequence[str]) -> Iterable[Claim]:
    """Panel c, of each network."""
    raw, centered, adam = (shares(runs, name) for name in ("alignment", "centered_alignment", "update_alignment"))
    made = "the raw alignment of the plain kernel, as printed"
    for i, label in enumerate(labels):
        yield Claim(
            id=f"silent-{label}",
            claim="The alignment is close to its end when the norm of the kernel is a tenth of "
            f"its last (c): share of its end, {label}",
            paper="about 1",
            values=raw[:, i],
            band=(0.9, 1.1),
            band_from="choice",
            why="The band of Fig. 1d.",
            least=Scale.LAPTOP,
            choices=[
                Choice(made=made, other="centered", values=centered[:, i]),
                Choice(made=made, other="raw, of the kernel of Adam's update", values=adam[:, i]),
            ],
        )


def adams(runs: Runs) -> Claim:
    """Whether Eq. 91 gives the better predictor, over all networks."""
    errors, correlations = runs["error"], runs["correlation"]
    better = Choice(
        made="relative errors",
        other="correlations, mean difference",
        values=(correlations[:, :, 2] - correlations[:, :, 0]).mean(1),
        band=(0, None),
    )
    return Claim(
        id="adam",
        claim="Beyond the print: the kernel of Adam's update (Eq. 91) predicts the network better than the "
        "plain final kernel: ratio of their relative errors on test points, geometric mean over networks",
        paper=None,
        values=numpy.exp(numpy.log(errors[:, :, 2] / errors[:, :, 0]).mean(1)),
        band=(None, 1),
        band_from="choice",
        why=f"The paper calls it the relevant kernel and leaves it to the future. Mean relative errors: Adam's kernel "
        f"{errors[:, :, 2].mean():.3f}, final NTK {errors[:, :, 0].mean():.3f}, initial NTK "
        f"{errors[:, :, 1].mean():.3f}; mean correlations {correlations[:, :, 2].mean():.3f}, "
        f"{correlations[:, :, 0].mean():.3f} and {correlations[:, :, 1].mean():.3f}. Second moments are inside, "
        "momentum is not.",
        choices=[better],
        least=Scale.LAPTOP,
    )


def compare(labels: Sequence[str], runs: Runs, along: str) -> Any:
    """The four panels of Fig. J.2 and J.3, centered alignments, and those of the kernel of Adam's update."""
    titles = (
        "a  training loss",
        "b  kernel norm",
        "c  alignment",
        "d  predictors",
        "centered alignment",
        "Adam's kernel",
    )
    figure, axes = panels(2, 3, height=2.4, titles=titles)
    grown = times(runs, "norm", 0.1).mean(0)
    for i, label in enumerate(labels):
        steps, color = runs["steps"][0, i], COLORS[i]
        for ax, name in zip((*axes[:3], axes[4]), ("loss", "norm", "alignment", "centered_alignment"), strict=True):
            curve(ax, steps, runs[name][:, i], label, color=color)
        curve(axes[5], steps[1:], runs["update_alignment"][:, i, 1:], label, color=color)
        curve(
            axes[5],
            steps[1:],
            runs["update_centered_alignment"][:, i, 1:].mean(0),
            f"_{label}, centered",
            color=color,
            style=":",
        )
        for ax in (axes[2], axes[4], axes[5]):
            ax.axvline(grown[i], color=color, linestyle="--", linewidth=0.8, label=f"_norm at 1/10, {label}")
    predictors(axes[3], runs["error"], runs["correlation"], labels)
    axes[3].set(xlabel=along)
    axes[2].plot([], [], "--", color="black", label="norm at 1/10")
    axes[5].plot([], [], ":", color="black", label="centered")
    for ax, quantity in zip((*axes[:3], *axes[4:]), ("loss", "|K|", *3 * ("alignment",)), strict=True):
        ax.set(xlabel="step", ylabel=quantity, ylim=(0, None))
    for ax in axes:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=2)
    return figure


def predictors(ax: Any, errors: Array, correlations: Array, labels: Sequence[str]) -> None:
    """Relative error and correlation (S, V, 3) of the regressions, every seed."""
    places = numpy.arange(len(labels))
    for i, (name, color) in enumerate(KERNELS):
        x = numpy.tile(places + 0.2 * (i - 1), len(errors))
        ax.scatter(x, errors[:, :, i].ravel(), s=10, color=color, label=name)
        ax.scatter(x, correlations[:, :, i].ravel(), s=14, marker="_", color=color, label=f"_{name}, correlation")
    ax.plot([], [], "o", color="black", label="relative error")
    ax.plot([], [], "_", color="black", markersize=5, label="correlation")
    ax.set(xticks=places, xticklabels=labels, xlim=(-0.5, len(labels) - 0.5), ylabel="against the network")
