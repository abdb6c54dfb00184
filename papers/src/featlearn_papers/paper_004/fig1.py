"""Xu & Ziyin 2024, Fig. 1: the layers of a network align, stay or disalign, by their initial weights."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import COLORS, curve, panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale

ACTIVATIONS = ("linear", "relu", "sigmoid", "swish", "leaky_relu")
TITLES = ("linear", "ReLU", "sigmoid", "swish", "leaky ReLU")
STARTS = ("kernel", "feature", "orthogonal", "near-orthogonal")
OBJECTIVES = {
    "regression": torch.nn.functional.mse_loss,
    "classification": torch.nn.functional.binary_cross_entropy_with_logits,
}
LIMIT = 2 / math.sqrt(5)
"""of the feature start, linear and wide: K / sqrt(1 + K^2) with K = y = 2; the near-orthogonal one has the same"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One input. Fig. 1: (x, y) = (1, 2) for the linear network, `samples` points of y = 2x + N(0, 1)/10 for others."""

    task: str = "regression"
    """of Fig. 1, by the mean square; "classification" is that of Fig. 7, by binary cross-entropy"""
    width: int = 1000
    """of the networks that are not linear"""
    linear_width: int = 10_000
    samples: int = 100
    speed: float = 2e-3
    """learning rate / (1 for the kernel start, width for the others, whose output is divided by the width)"""
    large_speed: float = 4e-4
    """the same where weights begin with variance 10"""
    sigmoid_speed: float = 0.04
    """the same for sigmoid units, whose slope is at most 1/4"""
    steps: int = 2000
    moments: int = 50
    """at which the alignment is measured, besides the start"""
    law_widths: tuple[int, ...] = (300, 1000, 3000)
    """at which the kernel phase is run to see how its alignment vanishes with the width"""
    variances: tuple[float, ...] = (1.0, 3.0)
    """of orthogonal starts of sigmoid units, beside the 10 of the figure"""

    @property
    def stride(self) -> int:
        """Steps between measurements."""
        return self.steps // self.moments

    def widths(self, activation: str) -> int:
        """Hidden units."""
        return self.linear_width if activation == "linear" else self.width


@dataclass(frozen=True)
class InitialState:
    """Weights u and w (d,), the factor of the output, and the learning rate."""

    u: Tensor
    w: Tensor
    scale: float
    lr: float


def initial_state(
    setup: Setup,
    start: str,
    activation: str,
    generator: torch.Generator,
    *,
    width: int | None = None,
    variance: float = 10.0,
) -> InitialState:
    """The four starts of the figure (Sec. 3.2, App. B.1); `variance` is that of u in the two orthogonal ones."""
    width, large = width or setup.widths(activation), start.endswith("orthogonal")
    speed = setup.sigmoid_speed if activation == "sigmoid" else setup.large_speed if large else setup.speed
    first, second = torch.randn(2, width, generator=generator, dtype=torch.float64)
    if start == "kernel":
        return InitialState(first, second, width**-0.5, speed)
    if start == "feature":
        return InitialState(first, second, 1 / width, speed * width)
    u = math.sqrt(variance) * first
    w = u if start == "orthogonal" else u + math.sqrt(0.1) * second
    return InitialState(u, w, 1 / width, speed * width)


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """zeta and loss (activations, starts, T) along training; the exact solution (starts, T) of linear regression."""
    alignments, losses, theory = [], [], []
    for i, activation in enumerate(ACTIVATIONS):
        x, y = points(setup, activation, context)
        for j, start in enumerate(STARTS):
            at = initial_state(setup, start, activation, context.generator(1 + j))
            if activation == "linear" and setup.task == "regression":
                theory.append(solved(setup, at, float(x), float(y)))
            alignment, loss = trained(setup, at, activation, x, y)
            alignments.append(alignment)
            losses.append(loss)
            done = 1 + j + len(STARTS) * i
            context.progress(done, len(ACTIVATIONS) * len(STARTS), alignment=alignment[-1], loss=loss[-1])
    shape = (len(ACTIVATIONS), len(STARTS), setup.moments + 1)
    return (
        varied(setup, context)
        | {
            "steps": setup.stride * numpy.arange(setup.moments + 1),
            "alignment": numpy.reshape(alignments, shape),
            "loss": numpy.reshape(losses, shape),
        }
        | ({"theory": torch.stack(theory)} if theory else {})
    )


def varied(setup: Setup, context: Context) -> dict[str, Numbers]:
    """First and last zeta of kernel starts (all but linear, widths, 2), and the lowest of orthogonal sigmoids."""
    ends = []
    for activation in ACTIVATIONS[1:]:
        x, y = points(setup, activation, context)
        starts = [
            initial_state(setup, "kernel", activation, context.generator(1), width=width) for width in setup.law_widths
        ]
        paths = [trained(setup, at, activation, x, y, moments=1)[0] for at in starts]
        ends.append([[path[0], path[-1]] for path in paths])
        context.say(f"kernel phase over widths, {activation}")
    x, y = points(setup, "sigmoid", context)
    lowest = [
        min(trained(setup, at, "sigmoid", x, y)[0])
        for at in (
            initial_state(setup, "orthogonal", "sigmoid", context.generator(3), variance=variance)
            for variance in setup.variances
        )
    ]
    return {"law": ends, "lowest": lowest}


def points(setup: Setup, activation: str, context: Context) -> tuple[Tensor, Tensor]:
    """Inputs (P, 1) and targets (P,)."""
    if setup.task == "classification":
        data = fl.data.two_gaussians(setup.samples, generator=context.generator())
        return data.x.to(context.device), data.labels.to(data.x).to(context.device)
    if activation == "linear":  # in double, for the comparison with the theory
        one = torch.ones(1, 1, dtype=torch.float64, device=context.device)
        return one, 2 * one[0]
    x, noise = torch.randn(2, setup.samples, generator=context.generator())
    return x[:, None].to(context.device), (2 * x + noise / 10).to(context.device)


def solved(setup: Setup, at: InitialState, x: float, y: float) -> Tensor:
    """zeta at the moments by Theorem 1, corrected: one unit of time is one step."""
    times = setup.stride * torch.arange(setup.moments + 1, dtype=torch.float64)
    path = fl.theory.latent.solve(
        at.u, at.w[:, None], torch.tensor([x]).double(), y, times=times, scale=at.scale, rate_u=at.lr, rate_w=at.lr
    )
    return path.layer_alignment


def trained(
    setup: Setup, at: InitialState, activation: Any, x: Tensor, y: Tensor, *, moments: int | None = None
) -> tuple[list[float], list[float]]:
    """zeta with its sign, and the loss, at the moments of gradient descent."""
    objective = OBJECTIVES[setup.task]
    stride = setup.stride if moments is None else setup.stride * setup.moments // moments
    model = MLP(1, None, width=len(at.u), hidden_layers=1, activation=activation).to(x)
    inner, readout = model.hidden[0], model.readout
    with torch.no_grad():
        inner.weight.copy_(at.w[:, None])  # type: ignore[operator]
        readout.weight.copy_(at.u[None])
    readout.multiplier = at.scale
    optimizer = torch.optim.SGD(model.parameters(), lr=at.lr)
    alignments, losses = [], []
    for step in range(setup.stride * setup.moments + 1):
        loss = objective(model(x), y)  # type: ignore[operator]
        if step % stride == 0:
            (pair,) = fl.layer_alignment(model, x, dtype=torch.float64).values()
            # a product of two vectors has a sign, which the norm of a product of matrices has not
            alignments.append(math.copysign(pair.value, float((readout.weight[0] @ inner.weight[:, 0]).detach())))  # type: ignore[index]
            losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return alignments, losses


def by_start(runs: Runs, start: str) -> Array:
    """(S, activations, T)."""
    return runs["alignment"][:, :, STARTS.index(start)]


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """Those of the linear networks, then those of the others."""
    kernel, feature, orthogonal, near = (by_start(runs, start) for start in STARTS)
    yield Claim(
        id="theory-lines",
        claim="The lines of Eq. 11 lie on the points, linear: largest distance",
        paper="overlay",
        values=abs(runs["alignment"][:, 0] - runs["theory"]).max((1, 2)),
        band=(None, 0.005),
        band_from="theory",
        why="Steps of descent against flow: 8e-4 at half the step size, and in proportion to it.",
    )
    yield Claim(
        id="kernel",
        claim="The increase is negligible in the kernel phase, linear",
        paper="about 0",
        values=kernel[:, 0, -1] - kernel[:, 0, 0],
        band=(0, 3 / math.sqrt(setup.linear_width)),
        band_from="theory",
        why=f"2 / sqrt(width) = {2 / math.sqrt(setup.linear_width):.3f} by the exact solution.",
    )
    yield Claim(
        id="feature",
        claim="In the feature phase zeta rises, linear: end",
        paper=round(LIMIT, 4),
        values=feature[:, 0, -1],
        band=(0.85, 0.94),
        band_from="theory",
        why="The paper shows the curve; 2 / sqrt(5) is the exact solution's value for infinite width.",
    )
    yield Claim(
        id="orthogonal",
        claim="From the orthogonal start zeta remains 1, linear: lowest",
        paper=1.0,
        values=orthogonal[:, 0].min(1),
        band=(0.9999, 1.0001),
        band_from="theory",
        check=True,
        why="Equal layers get equal gradients.",
    )
    yield Claim(
        id="near-orthogonal",
        claim="From near-orthogonal layers zeta falls, linear: end",
        paper=round(LIMIT, 4),
        values=near[:, 0, -1],
        band=(0.86, 0.93),
        band_from="theory",
        least=Scale.LAPTOP,
        why="The value of the exact solution for infinite width, from 0.9950.",
    )
    yield Claim(
        id="monotone",
        claim="zeta is monotone, linear: up in the feature phase, down from near-orthogonal",
        paper="yes",
        values=rises(feature[:, 0]) & rises(-near[:, 0]),
        band=(1, None),
        band_from="print",
    )
    yield Claim(
        id="align",
        claim="Layers align for all activations: lowest end in the feature phase",
        paper="yes",
        values=feature[:, :, -1].min(1),
        band=(0.5, None),
        band_from="choice",
        why="A change of order 1 from 0.",
    )
    yield from vanishing(setup, runs)
    yield Claim(
        id="disalign",
        claim="Near-orthogonal layers disalign for all activations: least fall of zeta",
        paper="yes",
        values=(near[:, :, 0] - near[:, :, -1]).min(1),
        band=(0.005, None),
        band_from="trial",
        least=Scale.LAPTOP,
        why="ReLU networks must only fall to 0.97 of 0.995: half of their units carry each side.",
    )
    yield Claim(
        id="disalign-monotone",
        claim="They do so monotonically for all activations",
        paper="yes",
        values=numpy.all(rises(-near), axis=1),
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
        why="Sigmoid units begin with too small an output (slope 0.87 < 2): zeta first rises, then falls.",
    )
    yield Claim(
        id="orthogonal-homogeneous",
        claim="Orthogonal layers stay parallel with ReLU and leaky ReLU: lowest zeta",
        paper=1.0,
        values=orthogonal[:, [1, 4]].min((1, 2)),
        band=(0.999, 1.0001),
        band_from="theory",
        check=True,
        why="Both layers of a homogeneous unit get the same gradient where they are equal.",
    )
    yield Claim(
        id="orthogonal-swish",
        claim="And nearly so with swish: lowest zeta",
        paper="about 1",
        values=orthogonal[:, 3].min(1),
        band=(0.9, 1.0001),
        band_from="theory",
        check=True,
        why="The gradients differ by z^2 s'(z), s the logistic function, which is even in the input and averages out.",
    )
    yield Claim(
        id="orthogonal-sigmoid",
        claim="And nearly so with sigmoid: lowest zeta",
        paper="about 1",
        values=orthogonal[:, 2].min(1),
        band=(0.9, 1.0001),
        band_from="trial",
        why="No law keeps the layers equal; 0.91 was found in the classification of Fig. 7. It falls as far as "
        "variance, learning rate and steps allow; the paper gives none of them.",
        choices=[
            Choice(
                made="weights of variance 10, as near-orthogonal ones",
                other=f"variance {variance:g}",
                values=runs["lowest"][:, i],
            )
            for i, variance in enumerate(setup.variances)
        ],
    )


def vanishing(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The kernel phase at several widths: its alignment vanishes as 1 / sqrt(width)."""
    powers, ends = law_exponents(setup, runs), runs["law"][..., 1] * numpy.sqrt(setup.law_widths)
    others = powers[:, [0, 2, 3]]  # of ReLU, swish, leaky ReLU
    furthest = numpy.take_along_axis(others, abs(others + 0.5).argmax(1)[:, None], axis=1)[:, 0]
    widths = ", ".join(map(str, setup.law_widths))
    yield Claim(
        id="kernel-others",
        claim="In the kernel phase the rise of zeta vanishes with the width, ReLU, swish, leaky "
        "ReLU: exponent that is furthest from -1/2",
        paper="about 0",
        values=furthest,
        band=(-0.6, -0.4),
        band_from="theory",
        least=Scale.LAPTOP,
        why=f"Widths {widths}. The paper shows one width.",
    )
    found = ", ".join(f"{value:.1f}" for value in ends[:, 1].mean(0))
    yield Claim(
        id="kernel-sigmoid",
        claim="So it does with sigmoid: exponent",
        paper="about 0",
        values=powers[:, 1],
        band=(-0.6, -0.4),
        band_from="theory",
        least=Scale.LAPTOP,
        why=f"zeta sqrt(width) is {found} at widths {widths}: units of slope 1/4 and less must turn further.",
        choices=[
            Choice(
                made="how zeta vanishes with the width",
                other="zeta sqrt(width) at most 6, at one width",
                values=abs(by_start(runs, "kernel")[:, 2, -1]) * math.sqrt(setup.width),
                band=(None, 6),
            ),
        ],
    )


def law_exponents(setup: Setup, runs: Runs) -> Array:
    """(S, activations but linear): of the rise of zeta in the kernel phase, over the width; nan where it falls."""
    with numpy.errstate(invalid="ignore"):
        logs = numpy.log(runs["law"][..., 1] - runs["law"][..., 0])
    widths = numpy.log(setup.law_widths)
    slopes: Array = (logs * (widths - widths.mean())).sum(-1) / ((widths - widths.mean()) ** 2).sum()
    return slopes


def rises(curves: Array) -> Array:
    """Whether a curve (..., T) never falls by more than rounding."""
    steady: Array = numpy.all(numpy.diff(curves, axis=-1) > -1e-6, axis=-1)
    return steady


def plot(setup: Setup, runs: Runs) -> Any:
    """A column for each activation: alignment above, disalignment below; points have the line of a theory."""
    figure, axes = panels(2, len(ACTIVATIONS), height=1.6)
    steps, solved = runs["steps"][0], setup.task == "regression"
    for i in range(len(ACTIVATIONS)):
        for j, start in enumerate(STARTS):
            ax = axes[i + len(ACTIVATIONS) * (j // 2)]
            curve(
                ax,
                steps,
                by_start(runs, start)[:, i],
                start,
                color=COLORS[j],
                style="o" if i == 0 and solved else "-",
                markersize=2,
            )
            if i == 0 and solved:
                label = "Eq. 11" if j == 1 else f"_Eq. 11, {start}"
                curve(ax, steps, runs["theory"][0, j], label, color="black", linewidth=0.8)
    for i, ax in enumerate(axes):
        upper = i < len(ACTIVATIONS)
        if upper:
            ax.set_title(TITLES[i])
            ax.set_ylim(-0.05, 1.05)
        else:
            ax.set_label(f"{ACTIVATIONS[i - len(ACTIVATIONS)]}, below")
            ax.set_ylim(min(0.86, float(runs["alignment"][:, :, 2:].min()) - 0.01), 1.01)
            ax.set_xlabel("step")
        ax.set_xticks([0, setup.steps])
        if i % len(ACTIVATIONS) == 0:
            ax.set_ylabel(r"$\zeta$")
        else:
            ax.tick_params(labelleft=False)
    axes[0 if solved else len(ACTIVATIONS) - 1].legend(loc="center right")
    axes[len(ACTIVATIONS) + 1].legend(loc="lower center", handlelength=1)
    return figure


EXPERIMENT = Experiment(
    id="004/fig1",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(
                width=100,
                linear_width=1000,
                samples=40,
                steps=300,
                speed=4e-3,
                large_speed=8e-4,
                moments=10,
                law_widths=(50, 200),
            ),
            seeds=1,
            seconds=5,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=40, mebibytes=50),
        Scale.PAPER: Size(
            setup=Setup(width=10_000, law_widths=(1000, 3000, 10_000)),
            seeds=3,
            seconds=176,
            mebibytes=100,
            device="cuda",
        ),
    },
    measure=measure,
)

FIG_1 = Reproduction(
    id="004/fig1",
    about=(
        "Alignment zeta = u . w / (|u| |w|) of the two layers of f = scale u . phi(w x). Above, weights N(0, 1): with "
        "scale 1 / sqrt(width) nothing turns, with 1 / width the layers align. Below, w = u (orthogonal) and w = u + "
        "N(0, 0.1) with u ~ N(0, 10) (near-orthogonal), both with scale 1 / width: they stay parallel, or disalign. "
        "The paper leaves learning rates and steps open; ours are 0.002 above, 0.0004 below and 0.04 for sigmoid "
        "units, times the width where the scale is 1 / width, and 2000 steps: all but sigmoid units have converged. "
        "It does not say the variance of the orthogonal start: ours is 10, as for the near-orthogonal one, and for "
        "sigmoid units 1 and 3 beside it. The kernel phase is run at three widths, to see its alignment vanish. At "
        "laptop scale only the linear networks have the width of 10000 of the paper, the others 1000."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
