"""Atanasov et al. 2022, Fig. 1.

On whitened inputs the kernel aligns with the task while it is small, before the loss falls.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

import featlearn as fl
from featlearn.papers.claims import Claim
from featlearn.papers.context import Context
from featlearn.papers.drawing import BLUE, GREEN, GREY, ORANGE, PINK, curve, panels
from featlearn.papers.models import MLP, WideResNet
from featlearn.papers.paper_002.silence import agreements, first, train_and_measure, two_classes
from featlearn.papers.reproduction import Reproduction, Size
from featlearn.papers.runs import Array, Numbers, Runs
from featlearn.papers.scale import Scale


@dataclass(frozen=True, kw_only=True)
class Perceptron:
    """A ReLU network with one hidden layer, trained by gradient descent."""

    data: str
    samples: int = 1000
    test_samples: int = 500
    pooling: int = 1
    """images are averaged over squares of so many pixels"""
    width: int = 100
    sigma: float
    """weights are N(0, sigma^2 / fan_in)"""
    lr: float = 0.03
    steps: int = 800
    stride: int = 10
    """steps between measurements, after the first so many, which are all measured"""


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A wide residual network, trained by Adam (App. J)."""

    data: str = "cifar10"
    samples: int = 100
    test_samples: int = 100
    pooling: int = 1
    k: float = 4.0
    sigmas: tuple[float, float, float] = (6.0, 0.3, 1.0)
    """of the first convolution, of all others and of the readout, which the paper does not say"""
    lr: float = 1e-5
    steps: int = 1500
    stride: int = 25


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Two classes, y = -1 and +1, inputs whitened: X^T X / P is a projector; loss 1/(2P) sum (f - y)^2."""

    mnist: Perceptron = Perceptron(data="mnist", sigma=0.01, steps=2000, stride=20)
    cifar: Perceptron = Perceptron(data="cifar10", sigma=0.1, steps=400)
    residual: Residual = Residual()


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Curves and predictions on test points, under "mnist/...", "cifar/..." and "residual/..."."""
    found: dict[str, Numbers] = {}
    for name in ("mnist", "cifar", "residual"):
        context.say(name)
        part = getattr(setup, name)
        numbers = residual(part, context) if isinstance(part, Residual) else perceptron(part, context)
        found.update({f"{name}/{key}": value for key, value in numbers.items()})
    return found


def perceptron(part: Perceptron, context: Context) -> dict[str, Numbers]:
    """One of the panels a to c, with the largest alignment that a linear network could have."""
    task = two_classes(context, part.data, part.samples, part.test_samples, pooling=part.pooling)
    model = MLP(
        task.x.shape[1], None, width=part.width, hidden_layers=1, weight_variance=part.sigma**2,
        generator=context.generator(1),
    ).to(context.device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=part.lr)
    path = train_and_measure(model, task, optimizer, context, steps=part.steps, stride=part.stride, dtype=torch.float64)
    best = fl.theory.deep_linear.max_alignment(task.exact, task.y.double().cpu(), weight_layers=2)
    return {**path.curves(), **compared(path.predictions(task.y)), "best": best}


def residual(part: Residual, context: Context) -> dict[str, Numbers]:
    """Panels d and e."""
    task = two_classes(context, part.data, part.samples, part.test_samples, pooling=part.pooling, flatten=False)
    model = WideResNet(
        part.k, 1, inputs=task.x.shape[1], weight_variance=tuple(sigma**2 for sigma in part.sigmas),
        generator=context.generator(1),
    ).to(context.device)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=part.lr)
    path = train_and_measure(model, task, optimizer, context, steps=part.steps, stride=part.stride)
    return {**path.curves(), **compared(path.predictions(task.y))}


def compared(predictions: torch.Tensor) -> dict[str, Numbers]:
    """(4, P') predictions, and (3,) each: relative errors and correlations of the regressions."""
    errors, correlations = agreements(predictions)
    return {"predictions": predictions, "error": errors, "correlation": correlations}


def crossing_step(runs: Runs, name: str, curve: str, fraction: float, of: Any = "final") -> Array:
    """(S,): when a curve reaches a fraction of its end, or of its start."""
    return numpy.array([
        first(steps, values, fraction, of)
        for steps, values in zip(runs[f"{name}/steps"], runs[f"{name}/{curve}"], strict=True)
    ])  # fmt: skip


def at(runs: Runs, name: str, curve: str, when: Array) -> Array:
    """(S,): a curve at a moment of each seed."""
    pairs = zip(when, runs[f"{name}/steps"], runs[f"{name}/{curve}"], strict=True)
    return numpy.array([numpy.interp(moment, steps, values) for moment, steps, values in pairs])


def grown(runs: Runs) -> Array:
    """(S,): when the norm of the residual network's kernel has made a tenth of its way."""
    norms = runs["residual/norm"]
    risen = norms - norms[:, :1]
    return numpy.array([first(t, v, 0.1, "final") for t, v in zip(runs["residual/steps"], risen, strict=True)])


def unsettled(runs: Runs, name: str) -> Array:
    """(S,): largest relative distance of the alignment from its end, once the loss is below 0.95 of its start."""
    moved = crossing_step(runs, name, "loss", 0.95, "initial")
    return numpy.array([
        abs(values[steps >= begin] / values[-1] - 1).max() if (steps >= begin).any() else numpy.nan
        for begin, steps, values in zip(moved, runs[f"{name}/steps"], runs[f"{name}/alignment"], strict=True)
    ])  # fmt: skip


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The caption, in the order of its panels."""
    late = {"least": Scale.LAPTOP}
    silent = at(runs, "mnist", "loss", crossing_step(runs, "mnist", "alignment", 0.9)) / runs["mnist/loss"][:, 0]
    yield Claim(
        id="silent", claim="The kernel aligns before the loss moves (a): loss left when the alignment has nine tenths "
        "of its end", paper="about 1", values=silent, band=(0.9, 1.01),
        why="In the paper alignment is there at t = 50, and the loss moves at 300.",
    )  # fmt: skip
    yield Claim(
        id="separation", claim="Half-loss time over the time of alignment (a)", paper=6.0,
        values=crossing_step(runs, "mnist", "loss", 0.5, "initial") / crossing_step(runs, "mnist", "alignment", 0.9),
        band=(2, None), **late,
        why="300 / 50 read off the curves; it grows with ln(1 / sigma), and sigma is not given.",
    )  # fmt: skip
    yield Claim(
        id="stays", claim="Then it stays fixed (a): largest relative change of the alignment while the loss falls",
        paper="about 0", values=unsettled(runs, "mnist"), band=(None, 0.1), **late,
        why="With ReLU it rises a second time, by about a fifth, while the loss falls, and comes back slowly.",
    )  # fmt: skip
    errors = runs["mnist/error"]
    yield Claim(
        id="final-kernel", claim="The network is regression with the final kernel, MNIST (b): relative error",
        paper="well described", values=errors[:, 0], band=(None, 0.15), why="0.03 on 8 x 8 digits.",
        least=Scale.LAPTOP,
    )  # fmt: skip
    yield Claim(
        id="initial-kernel", claim="Regression with the initial kernel is not a good model, MNIST (b): relative error",
        paper="not good", values=errors[:, 1], band=(0.2, None), why="0.31 on 8 x 8 digits.", **late,
    )  # fmt: skip
    errors = runs["cifar/error"]
    yield Claim(
        id="cifar", claim="The same on CIFAR-10 (c): error of the final kernel over that of the initial one",
        paper="small", values=errors[:, 0] / errors[:, 1], band=(None, 0.5), **late,
    )  # fmt: skip
    yield Claim(
        id="cifar-final-kernel", claim="Final kernel, CIFAR-10 (c): correlation with the network", paper="about 1",
        values=runs["cifar/correlation"][:, 0], band=(0.95, 1), **late,
    )  # fmt: skip
    aligned = at(runs, "residual", "alignment", grown(runs)) / runs["residual/alignment"][:, -1]
    yield Claim(
        id="residual-silent", claim="Residual network: when the kernel starts to grow the alignment has finished (d), "
        "as a share of its end", paper="about 1", values=aligned, band=(0.9, 1.1), **late,
        why="When its norm has made a tenth of its way, the dashed line of Fig. J.2. At paper scale the alignment has "
        "then fallen from 1.5 to 2.7 times its end nearly all the way. But it is not silent: only a fifth to a third "
        "of the loss is left. The small network of the laptop scale is further from it.",
    )  # fmt: skip
    correlations = runs["residual/correlation"]
    yield Claim(
        id="residual-final-kernel", claim="Predictions of the final kernel are strongly correlated with it (e)",
        paper="strongly", values=correlations[:, 0], band=(0.8, 1), **late,
    )  # fmt: skip
    yield Claim(
        id="residual-initial-kernel", claim="More than those of the initial kernel (J.2, J.3): difference", paper="> 0",
        values=correlations[:, 0] - correlations[:, 1], band=(0, None), **late,
    )  # fmt: skip
    yield Claim(
        id="residual-adam", claim="Beyond the print: so are those of the kernel of Adam's update (Eq. 91)", paper=None,
        values=correlations[:, 2], band=(0.8, 1), **late, why="The paper leaves it to the future; same band as above.",
    )  # fmt: skip


def plot(setup: Setup, runs: Runs) -> Any:
    """Panels a to e: dynamics to the left, predictions on test points of the first seed beside them."""
    figure, axes = panels(
        2, 3, height=2.1, titles=("a  MNIST", "b  MNIST", "c  CIFAR-10", "d  Wide ResNet", "e  Wide ResNet", "")
    )  # fmt: skip
    for ax, name in ((axes[0], "mnist"), (axes[3], "residual")):
        steps = runs[f"{name}/steps"][0]
        curve(ax, steps, runs[f"{name}/loss"] / runs[f"{name}/loss"][:, :1], "loss", colour=BLUE)
        curve(ax, steps, runs[f"{name}/norm"] / runs[f"{name}/norm"][:, -1:], "kernel norm", colour=ORANGE)
        ends = runs[f"{name}/alignment"][:, -1:]
        curve(ax, steps, runs[f"{name}/alignment"] / ends, "alignment / its end", colour=GREEN)
        ax.set(xlabel="step")
    best = float((runs["mnist/best"] / runs["mnist/alignment"][:, -1]).mean())
    axes[0].axhline(best, color=GREEN, linestyle="--", label="largest, linear network")
    axes[3].axvline(grown(runs).mean(), color=ORANGE, linestyle="--", label="_kernel grows")
    axes[3].set_xlabel("step (dashed: kernel grows)")
    axes[0].legend(fontsize=6, loc="center right")
    for ax, name in ((axes[1], "mnist"), (axes[2], "cifar"), (axes[4], "residual")):
        network, *regressions = runs[f"{name}/predictions"][0][:, :150]
        rows = [("initial NTK", GREY, regressions[1]), ("final NTK", GREEN, regressions[0])]
        if name == "residual":
            rows.append(("Adam's kernel", PINK, regressions[2]))
        for label, colour, values in rows:
            ax.scatter(network, values, s=4, color=colour, label=label, linewidths=0)
        span = [float(network.min()), float(network.max())]
        ax.plot(span, span, color="black", linewidth=0.6, label="_equal")
        ax.set(xlabel="network", ylabel="regression")
        ax.legend(fontsize=6)
    errors(axes[5], runs)
    return figure


def errors(ax: Any, runs: Runs) -> None:
    """Correlations with the network, mean over seeds, of the three regressions of the three networks."""
    names = ("mnist", "cifar", "residual")
    for i, (label, colour) in enumerate((("final NTK", GREEN), ("initial NTK", GREY), ("Adam's kernel", PINK))):
        shown = names if i < 2 else names[2:]
        places = [names.index(name) + 0.15 * (i - 1) for name in shown]
        found = numpy.array([runs[f"{name}/correlation"][:, i] for name in shown])
        ax.scatter(numpy.repeat(places, found.shape[1]), found.ravel(), s=10, color=colour, label=label)
    ax.set(
        ylabel="correlation with network", xticks=range(3), xticklabels=("MNIST", "CIFAR-10", "WRN"), xlim=(-0.5, 2.5)
    )
    ax.legend(fontsize=6)


FIG_1 = Reproduction(
    id="002/fig1",
    about=(
        "Networks that start small, on whitened images of two classes: the kernel-task alignment is at its end before "
        "kernel and loss grow or fall, so that the trained network is kernel regression with its own final kernel. "
        "The paper leaves open, for the MLP on MNIST, width (ours: 100), sigma (0.01) and learning rate (0.03); for "
        "CIFAR-10 (width 100, sigma 0.1 as in the paper) the learning rate (0.03); for the residual network the scale "
        "of the readout (1) and of the inputs (those whose X^T X / P is a projector). Directions below 1/1000 of the "
        "largest singular value are dropped before whitening (see `silence.SEEN`). Regressions start from the "
        "network's first outputs (Theorem 1, corrected). Beside the paper's predictors stands the kernel of Adam's "
        "update (Eq. 91), which it leaves to the future. At laptop scale CIFAR-10 has 500 images of 16 x 16, and the "
        "residual network 1/8 of the width, 50 such images and a learning rate of 0.00005."
    ),
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(
                mnist=Perceptron(data="digits", samples=100, test_samples=40, sigma=0.01, width=40, lr=0.1, steps=300,
                                 stride=20),
                cifar=Perceptron(data="digits", samples=40, test_samples=40, sigma=0.1, width=40, lr=0.1, steps=100,
                                 stride=20),
                residual=Residual(data="digits", samples=20, test_samples=20, k=0.125, lr=1e-3, steps=20, stride=10),
            ),
            seeds=1, seconds=4, mebibytes=50,
        ),
        Scale.LAPTOP: Size(
            setup=Setup(
                cifar=Perceptron(data="cifar10", samples=500, sigma=0.1, pooling=2, steps=400),
                residual=Residual(samples=50, test_samples=50, pooling=2, k=0.5, lr=5e-5, steps=600, stride=15),
            ),
            seeds=3, seconds=75, mebibytes=300,
        ),
        Scale.PAPER: Size(setup=Setup(), seeds=3, seconds=134, mebibytes=2300, device="cuda"),
    },
    measure=measure,
    plot=plot,
    claims=claims,
)  # fmt: skip
