"""Atanasov et al. 2022, Fig. E.3.

The final kernel of linear networks on partially whitened images: the deeper, the more it is that of the classes.
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
from featlearn_papers.frame.drawing import COLORS, WIDTH, curve
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.linear_networks import dense_times, random_weights, rising
from featlearn_papers.paper_002.silence import two_classes


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Images of two classes, y = -1 and +1, eigenvalues l of X^T X as l^power; loss 1/(2P) sum (f - y)^2."""

    data: str = "cifar10"
    samples: int = 100
    power: float = 0.25
    depths: tuple[int, ...] = (2, 3, 4)
    """L, weight matrices"""
    width: int = 50
    sigma: float = 0.1
    """weights are N(0, sigma^2 / fan_in)"""
    time: float = 20.0
    """how long a network goes on after a balanced one on whitened inputs would have learned"""
    moments: int = 150


SHOWN = 32
"""samples of the matrices that are drawn, sorted by class"""


def task(setup: Setup, context: Context) -> tuple[Tensor, Tensor]:
    """Inputs (P, R), in coordinates of their span, with a mean eigenvalue of X^T X / P of 1, and targets, sorted."""
    images = two_classes(context, setup.data, setup.samples, 0, power=setup.power)
    left, sizes, _ = torch.linalg.svd(images.exact, full_matrices=False)
    kept = sizes > 1e-6 * sizes[0]
    y = images.y.double().cpu()
    order = y.argsort(stable=True)
    return (left[:, kept] * sizes[kept])[order], y[order]


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """For each depth loss and alignment at its own times; first and last kernels, and formulas for the last ones."""
    X, y = task(setup, context)
    solution = fl.theory.deep_linear.minimum_norm(X, y)
    s = float(solution.norm())
    found: dict[str, list[Tensor]] = {}
    for depth in setup.depths:
        layers = random_weights(X.shape[1], setup.width, depth, setup.sigma, context.generator(depth))
        path = fl.theory.deep_linear.flow(layers, X, y, times=moments(setup, depth, s), rate=1 / len(X))
        gram = X @ X.T
        now = {
            "times": path.times,
            "loss": path.loss / path.loss[0],
            "alignment": path.alignment,
            "best": fl.theory.deep_linear.max_alignment(X, y, depth),
            "first": path.kernel(path.times[0]),
            "last": path.kernel(path.times[-1]),
            "corrected": fl.theory.deep_linear.final_ntk(X, y, depth),
            "printed": (depth - 1) * torch.outer(y, y) + gram,
            "printed_half": (depth - 1) * torch.outer(y, y) + gram / 4,
            "printed_k0": (depth - 1) * torch.outer(y, y) + path.kernel(path.times[0]),
        }
        now["function"] = (path.weights[-1, 0] - solution).norm() / s
        for name, value in now.items():
            found.setdefault(name, []).append(value)
        context.say(f"L={depth} loss {float(now['loss'][-1]):.2g} alignment {float(path.alignment[-1]):.3f}")
    return {**{name: torch.stack(values) for name, values in found.items()}, "s": s, "inputs": X.shape[1]}


def moments(setup: Setup, depth: int, s: float) -> Tensor:
    """Dense on a linear and on a logarithmic axis."""
    end = 1.5 * float(fl.theory.deep_linear.half_time(s, setup.sigma**depth, depth)) + setup.time
    return dense_times(0.01, end, setup.moments)


def distance(kernels: Array, formulas: Array) -> Array:
    """(S, depths): smallest relative difference of kernels (S, depths, P, P) from multiples of formulas."""
    cosine = (kernels * formulas).sum((-2, -1)) / (
        numpy.linalg.norm(kernels, axis=(-2, -1)) * numpy.linalg.norm(formulas, axis=(-2, -1))
    )
    off: Array = numpy.sqrt(numpy.maximum(1 - cosine**2, 0))
    return off


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The sentences of the caption, with its formula as printed and corrected."""
    ends = runs["alignment"][:, :, -1]
    yield Claim(
        id="aligns",
        claim="The final kernel is aligned with the classes, more than the first (a), at all depths",
        paper="yes",
        values=rising(numpy.stack([runs["alignment"][:, :, 0], ends], -1)),
        band=(1, None),
        band_from="print",
    )
    yield Claim(
        id="depth",
        claim="The final alignment increases with depth (a)",
        paper="yes",
        values=rising(ends),
        band=(1, None),
        band_from="print",
    )
    yield Claim(
        id="maximum",
        claim="It is that of the corrected formula (a): largest difference",
        paper="formula",
        values=abs(ends - runs["best"]).max(1),
        band=(None, 0.02),
        band_from="theory",
        why="The limit of small weights, on any inputs.",
    )
    yield Claim(
        id="corrected",
        claim="The final kernel is ((L-1)/s^2) y y^T + X X^T, times a number (b, corrected): largest "
        "relative difference",
        paper="formula",
        values=distance(runs["last"], runs["corrected"]).max(1),
        band=(None, 0.1),
        band_from="theory",
        why="Small weights; of the order of sigma.",
    )

    def off(formula: str) -> Array:
        """(S,): largest distance over depths."""
        largest: Array = distance(runs["last"], runs[formula]).max(1)
        return largest

    known = "On the training set beta beta^T is y y^T / s^2: the formula is right only for s = 1"
    yield Claim(
        id="printed",
        claim="It is (L-1) y y^T + K0, times a number (b), with K0 = X X^T: largest relative difference",
        paper="formula",
        values=off("printed"),
        band=(None, 0.1),
        band_from="print",
        known=f"{known}; here s is {runs['s'].mean():.2f}, by the length of the inputs, which is a choice.",
        choices=[
            Choice(
                made="inputs with a mean eigenvalue of X^T X / P of 1",
                values=off("printed_half"),
                other="inputs half as long, s twice as large: the final kernel is the same up to a factor",
            ),
            Choice(made="K0 = X X^T", other="K0 is the kernel measured at the start", values=off("printed_k0")),
        ],
    )
    yield Claim(
        id="solution",
        claim="Networks learn the least-norm solution on any inputs (App. G.1): largest relative distance",
        paper="0",
        values=runs["function"].max(1),
        band=(None, 0.05),
        band_from="choice",
        least=Scale.LAPTOP,
        why="Slow directions take long: of the order of sigma, and of what is left of the loss.",
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """Panel a over all depths; panel b: first and last kernels of the first seed, and the formula."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    names = [f"L{depth}" for depth in setup.depths]
    axes = figure.subplot_mosaic([["a"] * (1 + len(names)), ["first", *names]], height_ratios=(1, 1))
    axes["a"].set_title("a", loc="left", fontweight="bold")
    for i, depth in enumerate(setup.depths):
        curve(axes["a"], runs["times"][0, i], runs["alignment"][0, i], f"L = {depth}", color=COLORS[i])
        axes["a"].axhline(runs["best"][0, i], color=COLORS[i], linestyle=":", label=f"_corrected formula, L = {depth}")
    axes["a"].plot([], [], ":", color="black", label="corrected formula")
    axes["a"].set(xscale="log", xlabel="time", ylabel="kernel-task alignment", xlim=(0.05, None), ylim=(0, 1))
    axes["a"].legend()
    rows = numpy.linspace(0, setup.samples - 1, min(SHOWN, setup.samples)).round().astype(int)
    pictures = {"first": ("b  first, L = 2", runs["first"][0, 0])} | {
        name: (f"last, L = {depth}", runs["last"][0, i])
        for i, (name, depth) in enumerate(zip(names, setup.depths, strict=True))
    }
    for name, (title, kernel) in pictures.items():
        scaled = kernel / abs(kernel).mean(0).mean() / 3
        image = axes[name].imshow(scaled[numpy.ix_(rows, rows)], cmap="RdBu_r", vmin=-1, vmax=1, label=title)
        axes[name].set_title(title, loc="left", fontweight="bold" if name == "first" else "normal")
        axes[name].set(xticks=(), yticks=())
    figure.colorbar(
        image,
        ax=[axes[name] for name in pictures],
        location="right",
        shrink=0.8,
        ticks=(-1, 0, 1),
        label="kernel / 3 mean sizes",
    )
    return figure


EXPERIMENT = Experiment(
    id="002/figE3",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(data="digits", samples=24, width=20, depths=(2, 3), moments=40),
            seeds=1,
            seconds=2,
            mebibytes=10,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=10, mebibytes=60),
        Scale.PAPER: Size(setup=Setup(depths=(2, 3, 4, 5), sigma=0.05), seeds=5, seconds=600, mebibytes=60),
    },
    measure=measure,
)

FIG_E3 = Reproduction(
    id="002/figE3",
    about=(
        "Linear networks on 100 images of two classes of CIFAR-10 whose eigenvalues l became as l^(1/4). Their final "
        "kernels are s^(2-2/L) [((L-1)/s^2) y y^T + X X^T]: the deeper, the more they are that of the classes. The "
        "paper leaves out 1/s^2, and names neither depths nor width, scale or learning rate: ours are two to four "
        "layers of 50 units, sigma = 0.1, and gradient flow. Inputs are given in coordinates of their span, as many as "
        "there are images, with a mean eigenvalue of X^T X / P of 1. Curves and matrices are of the first seed; "
        "matrices are sorted by class and scaled by their mean size."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
