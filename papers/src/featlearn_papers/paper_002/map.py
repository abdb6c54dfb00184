"""Silent alignment over whitening and initial scale: a map that Atanasov et al. 2022 describe in words (Sec. 3, 5)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

import featlearn as fl
from featlearn.models import MLP
from featlearn.models.layers import Activation
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import COLORS, ORANGE, WIDTH, curve
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.linear_networks import rising
from featlearn_papers.paper_002.silence import two_classes

ACTIVATIONS: tuple[Activation, ...] = ("linear", "relu")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Two classes, y = -1 and +1, one hidden layer, gradient descent on 1/(2P) sum (f - y)^2."""

    data: str = "cifar10"
    samples: int = 60
    pooling: int = 1
    """images are averaged over squares of so many pixels"""
    powers: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """gamma: eigenvalues l of X^T X become as l^gamma"""
    sigmas: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    """weights are N(0, sigma^2 / fan_in)"""
    width: int = 100
    begin: float = 0.9
    """share of the loss at which it has begun to fall"""
    end: float = 0.001
    """share of the loss at which training ends"""
    most: int = 15_000
    """steps, after which training ends whatever the loss"""


def task(setup: Setup, context: Context, power: float) -> tuple[Tensor, Tensor]:
    """Inputs (P, R) in coordinates of their span, with a mean eigenvalue of X^T X / P of 1, and targets."""
    images = two_classes(context, setup.data, setup.samples, 0, power=power, pooling=setup.pooling)
    left, sizes, _ = torch.linalg.svd(images.exact, full_matrices=False)
    kept = sizes > 1e-6 * sizes[0]
    return left[:, kept] * sizes[kept], images.y.double().cpu()


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Scores (activations, powers, sigmas), loss at the end of training, and scores by theory (powers, sigmas)."""
    shape = len(ACTIVATIONS), len(setup.powers), len(setup.sigmas)
    found = {name: torch.zeros(shape, dtype=torch.float64) for name in ("score", "turned", "left")}
    theory = torch.zeros(shape[1:], dtype=torch.float64)
    for j, power in enumerate(setup.powers):
        X, y = task(setup, context, power)
        for k, sigma in enumerate(setup.sigmas):
            for i, activation in enumerate(ACTIVATIONS):
                model = MLP(
                    X.shape[1],
                    None,
                    width=setup.width,
                    hidden_layers=1,
                    activation=activation,
                    weight_variance=sigma**2,
                    generator=context.generator(1),
                ).double()
                if activation == "linear":
                    W0, a0 = (weight.detach().clone() for weight in model.parameters())
                    theory[j, k] = theory_score(X, y, W0, a0[0], setup.begin)
                kernels, left = trained(model, X, y, setup)
                found["score"][i, j, k] = score(*kernels)
                found["turned"][i, j, k] = angle(kernels[0], kernels[2])
                found["left"][i, j, k] = left
        context.say(f"power={power:g} scores {found['score'][:, j, 0].tolist()} theory {float(theory[j, 0]):.3g}")
    return {**found, "theory": theory}


def trained(model: MLP, X: Tensor, y: Tensor, setup: Setup) -> tuple[tuple[Tensor, Tensor, Tensor], float]:
    """Kernels at the start, when the loss begins to fall and at the end, and the share of the loss that is left.

    The learning rate is 0.4 of what is stable for a linear network on any inputs, at its start and at its end.
    """
    s = fl.theory.deep_linear.minimum_norm(X, y).norm()
    largest = torch.linalg.eigvalsh(X.T @ X)[-1] / len(X)
    size = max(
        2 * float(s), sum(float(torch.linalg.matrix_norm(weight.detach(), 2)) ** 2 for weight in model.parameters())
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8 / (float(largest) * size))
    first, begun, start, share = fl.ntk(model, X), None, 0.0, 1.0
    for _ in range(setup.most):
        residual = model(X) - y
        loss = float(residual.detach().square().sum())
        start = start or loss
        share = loss / start
        if begun is None and share <= setup.begin:
            begun = fl.ntk(model, X)
        if share <= setup.end:
            break
        optimizer.zero_grad()
        (residual.square().mean() / 2).backward()
        optimizer.step()
    last = fl.ntk(model, X)
    return (first, last if begun is None else begun, last), share


def angle(one: Tensor, other: Tensor) -> float:
    """Between two kernels, as vectors; 0 where they differ in scale alone."""
    cosine = float((one * other).sum() / (one.norm() * other.norm()))
    return math.acos(min(1.0, max(-1.0, cosine)))


def score(start: Tensor, begun: Tensor, end: Tensor) -> float:
    """How much of its way to the final kernel, as an angle, the kernel has made when the loss begins to fall.

    1 for silent alignment, 0 if it has not begun to turn, negative if it has turned away.
    """
    return 1 - angle(begun, end) / angle(start, end)


def theory_score(X: Tensor, y: Tensor, W0: Tensor, a0: Tensor, begin: float) -> float:
    """Of a two-layer linear network, without training: from the kernel of phase I when it would begin to learn, and the
    final one (Atanasov et al. 2022, App. C.3, E.2)."""
    pull = X.T @ y / len(X)  # s Sigma beta
    first = float((X @ (W0.T @ a0) - y).square().sum())
    step = 0.02 / float(pull.norm())
    for i in range(2500):
        W, a = early_weights(W0, a0, pull, i * step)
        if float((X @ (W.T @ a) - y).square().sum()) <= begin * first:
            break
    gram = X @ X.T
    start, begun = (X @ (M.T @ M) @ X.T + b.square().sum() * gram for M, b in ((W0, a0), (W, a)))
    return score(start, begun, fl.theory.deep_linear.final_ntk(X, y, 2))


def early_weights(W0: Tensor, a0: Tensor, pull: Tensor, time: float) -> tuple[Tensor, Tensor]:
    """Of phase I: da/dt = W pull, dW/dt = a pull^T, with pull = s Sigma beta."""
    speed = float(pull.norm())
    u, even, odd = pull / speed, math.cosh(speed * time), math.sinh(speed * time)
    forward = W0 @ u
    return W0 + torch.outer(a0 * odd + forward * (even - 1), u), a0 * even + forward * odd


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """What the paper says in words; smallest sigma first, whitened inputs first."""
    linear, relu = runs["score"][:, 0], runs["score"][:, 1]
    for name, scores, least in (("linear", linear, Scale.SMOKE), ("relu", relu, Scale.LAPTOP)):
        yield Claim(
            id=f"silent-{name}",
            claim="Small weights and whitened inputs: the kernel has turned when the loss begins "
            f"to fall (Sec. 3.1, 5), {name}: score",
            paper="about 1",
            values=scores[:, 0, 0],
            band=(0.8, 1.01),
            band_from="choice",
            least=least,
        )
        yield Claim(
            id=f"sensitive-{name}",
            claim=f"Silent alignment is highly sensitive to anisotropy (Sec. 6), {name}: score "
            "on unwhitened inputs less that on whitened ones, smallest weights",
            paper="< 0",
            values=scores[:, -1, 0] - scores[:, 0, 0],
            band=(None, -0.2),
            band_from="choice",
            why="A fifth at least.",
            least=least,
        )
    yield Claim(
        id="small-weights",
        claim="On whitened inputs small weights separate the phases (Sec. 3.1): the linear "
        "network's score falls with every larger sigma",
        paper="yes",
        values=rising(-linear[:, 0]),
        band=(1, None),
        band_from="print",
        choices=[Choice(made="linear", other="ReLU", values=rising(-relu[:, 0]))],
    )
    yield Claim(
        id="anisotropy",
        claim="Whitening in part restores it in part (Sec. 5): at the smallest sigma the linear "
        "network's score falls with every larger gamma",
        paper="yes",
        values=rising(-linear[:, :, 0]),
        band=(1, None),
        band_from="print",
        choices=[Choice(made="linear", other="ReLU", values=rising(-relu[:, :, 0]))],
    )
    off = abs(linear - runs["theory"]).max(1)  # (S, sigmas)
    below = {limit: off[:, [sigma <= limit for sigma in setup.sigmas]].max(1) for limit in (0.1, 0.03)}
    yield Claim(
        id="theory",
        claim="Theory gives the linear network's score without training, for sigma up to 0.1: largest difference",
        paper=None,
        values=below[0.1],
        band=(None, 0.1),
        band_from="theory",
        why="The theory of small weights: it takes phase I to last until a tenth of the loss is gone.",
        choices=[Choice(made="sigma up to 0.1", other="up to 0.03", values=below[0.03])],
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="trained",
        claim="Every network was trained to its end: largest share of the loss that is left",
        paper=None,
        values=runs["left"].max((1, 2, 3)),
        band=(None, setup.end),
        band_from="choice",
        check=True,
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="carries-over",
        claim="What holds for linear networks carries over to ReLU (Sec. 5): correlation of the two maps",
        paper="yes",
        values=[numpy.corrcoef(one.ravel(), other.ravel())[0, 1] for one, other in zip(linear, relu, strict=True)],
        band=(0.8, 1.0),
        band_from="choice",
        least=Scale.LAPTOP,
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """Maps of both networks, with lines of theory, and below sections of the first at two scales."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    axes = figure.subplot_mosaic([["a", "b"], ["c", "c"]], height_ratios=(5, 4))
    x, y = numpy.array(setup.powers), numpy.log10(setup.sigmas)
    for name, title, scores in zip("ab", ("a  linear", "b  ReLU"), runs["score"].mean(0), strict=True):
        ax = axes[name]
        ax.set_title(title, loc="left", fontweight="bold")
        image = ax.pcolormesh(x, y, scores.T, cmap="Blues", vmin=0, vmax=1, shading="nearest", label="score")
        for j, k in numpy.ndindex(scores.shape):
            shade = "white" if scores[j, k] > 0.6 else "black"
            ax.text(float(x[j]), float(y[k]), f"{scores[j, k]:.2f}", ha="center", va="center", fontsize=7, color=shade)
        for level, style in ((0.5, "solid"), (0.8, "dashed")):
            ax.contour(x, y, runs["theory"].mean(0).T, levels=(level,), colors=ORANGE, linewidths=1.4, linestyles=style)
            ax.plot([], [], color=ORANGE, linestyle=style, label=f"theory, linear: {level:g}")
        ax.set(xlabel="γ (0: whitened, 1: as they are)", ylabel="σ", xticks=x, yticks=y)
        ax.set_yticklabels([f"{sigma:g}" for sigma in setup.sigmas])
    axes["a"].legend(handles=axes["a"].lines, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=2)
    figure.colorbar(image, ax=[axes["a"], axes["b"]], label="score")
    axes["c"].set_title("c  sections of a", loc="left", fontweight="bold")
    for color, k in zip(COLORS, (0, len(setup.sigmas) // 2), strict=False):
        label = f"σ = {setup.sigmas[k]:g}"
        curve(axes["c"], x, runs["score"][:, 0, :, k], label, color=color, style="o-")
        curve(axes["c"], x, runs["theory"][:, :, k].mean(0), f"theory, {label}", color="black", style=":")
    axes["c"].set(xlabel="γ", ylabel="score")
    axes["c"].legend()
    return figure


EXPERIMENT = Experiment(
    id="002/map",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(data="digits", samples=20, powers=(0.0, 0.5, 1.0), sigmas=(0.03, 0.3), width=30, most=400),
            seeds=1,
            seconds=4,
            mebibytes=10,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=100, mebibytes=60),
        Scale.PAPER: Size(
            setup=Setup(
                samples=200,
                powers=(0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0),
                sigmas=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
                most=40_000,
            ),
            seeds=5,
            seconds=2000,
            mebibytes=100,
        ),
    },
    measure=measure,
)

MAP = Reproduction(
    id="002/map",
    about=(
        "Not in the paper: when does silent alignment happen? The score is the share of its way to the final kernel, "
        "as an angle between kernels, that the kernel has made when a tenth of the loss is gone: 1 if it has turned in "
        "silence, 0 if all turning is still to come. It is measured over gamma, from whitened inputs (0) to inputs as "
        "they are (1), and over the initial scale, for linear and ReLU networks of 100 hidden units on 60 images of "
        "two classes of CIFAR-10. Lines are the score of linear networks by theory, without "
        "training: the kernel of phase I, with its spike along Sigma beta, against the final one, along beta. Training "
        "ends when a thousandth of the loss is left. Inputs are given in coordinates of their span."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
