"""Atanasov et al. 2022, Fig. H.1.

Networks with ten outputs on whitened MNIST: when the kernel aligns, and when each mode of the teacher is learned.
"""

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
from featlearn_papers.frame.drawing import BLACK, BLUE, GRAY, GREEN, ORANGE, curve, panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.silence import SEEN, first, seen_directions


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One-hot targets, whitened inputs: X^T X / P is a projector; loss 1/(2P) sum |f - y|^2."""

    data: str = "mnist"
    samples: int = 500
    pooling: int = 2
    """images are averaged over squares of so many pixels"""
    cut: float = SEEN
    """directions with singular values below this share of the largest are dropped before whitening"""
    width: int = 100
    scale: float = 1e-4
    """sigma^L; weights are N(0, sigma^2 / fan_in)"""
    lr: float = 0.25
    """of the tanh network; linear ones follow gradient flow"""
    reach: float = 4.0
    """a network runs for so many half times of a balanced one in its slowest mode"""
    moments: int = 400
    """at which losses are measured; kernels of the tanh network at a tenth of them"""

    def sigma(self, depth: int) -> float:
        """Of a network of so many weight layers."""
        return float(self.scale ** (1 / depth))


NETWORKS: dict[str, tuple[Activation, int]] = {"linear2": ("linear", 2), "linear4": ("linear", 4), "tanh3": ("tanh", 3)}
"""activation and number of weight layers, in the order of the panels"""


@dataclass(frozen=True)
class Task:
    """Whitened inputs in coordinates of their span, targets, and the modes of the linear map that fits them."""

    X: Tensor
    """(P, R)"""
    Y: Tensor
    """(P, C)"""
    s: Tensor
    """(C,), singular values of the teacher, largest first"""
    z: Tensor
    """(C, C), columns"""
    v: Tensor
    """(C, R), rows"""


def task(setup: Setup, context: Context) -> Task:
    """Directions below the cut are dropped."""
    drawn = context.dataset(setup.data, samples=setup.samples, generator=context.generator())
    rows = torch.nn.functional.avg_pool2d(drawn.x, setup.pooling).double().flatten(1)
    left, sizes, _ = torch.linalg.svd(seen_directions(rows, setup.samples, setup.cut), full_matrices=False)
    X = left[:, sizes > 1e-9 * sizes[0]] * setup.samples**0.5
    Y = torch.nn.functional.one_hot(drawn.labels, 10).double()
    z, s, v = torch.linalg.svd(Y.T @ X / setup.samples, full_matrices=False)
    return Task(X, Y, s, z, v)


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Curves of each network under "linear2/...", "linear4/..." and "tanh3/...", and the modes of the teacher."""
    given = task(setup, context)
    found: dict[str, Numbers] = {"s": given.s, "rank": given.X.shape[1]}
    for name, (activation, depth) in NETWORKS.items():
        model = MLP(
            given.X.shape[1],
            10,
            width=setup.width,
            hidden_layers=depth - 1,
            activation=activation,
            weight_variance=setup.sigma(depth) ** 2,
            generator=context.generator(depth),
        ).double()
        start = [weight.detach().clone() for weight in model.parameters()]
        slowest = fl.theory.deep_linear.half_time(float(given.s[-1]), setup.scale, depth)
        times = torch.linspace(0, setup.reach * float(slowest) + 10, setup.moments + 1, dtype=torch.float64)
        path = linear_path(start, given, times) if activation == "linear" else stepped(model, given, times, setup)
        formulas = {
            "best": fl.theory.deep_linear.max_alignment(given.X, given.Y, depth),
            "start": initial_strength(start, given) if depth == 2 else torch.full((10,), setup.scale),
        }
        found |= {f"{name}/{key}": value for key, value in {**path, **formulas}.items()}
        context.say(f"{name} loss {float(path['loss'][-1]):.4g} alignment {float(path['alignment'][-1]):.3f}")
    return found


def linear_path(start: list[Tensor], given: Task, times: Tensor) -> dict[str, Tensor]:
    """By gradient flow. `loss` is what a linear map can learn of it, 1 at the start of f = 0."""
    path = fl.theory.deep_linear.flow(start, given.X, given.Y, times=times, rate=1 / len(given.X))
    floor = given.Y.square().sum() - len(given.X) * given.s.square().sum()
    return {
        "times": times,
        "loss": (path.loss - floor) / (given.Y.square().sum() - floor),
        "modes": path.strength[:, :10],
        "kernel_times": times,
        "alignment": path.alignment,
        "norm": path.kernel_norm,
    }


def stepped(model: torch.nn.Module, given: Task, times: Tensor, setup: Setup) -> dict[str, Tensor]:
    """By gradient descent; modes are those of the linear part of the function, z^T F^T X v / P."""
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.lr)
    every = max(1, round(float(times[-1]) / setup.lr / setup.moments))
    found: dict[str, list[Tensor]] = {
        name: [] for name in ("times", "loss", "modes", "kernel_times", "alignment", "norm")
    }
    total = given.Y.square().sum()
    for step in range(every * setup.moments + 1):
        f = model(given.X)
        if step % every == 0:
            now = torch.tensor(setup.lr * step, dtype=torch.float64)
            linear = f.detach().T @ given.X / len(given.X)
            found["times"].append(now)
            found["loss"].append((f.detach() - given.Y).square().sum() / total)
            found["modes"].append(torch.einsum("ca,cd,ad->a", given.z, linear, given.v))
            if step % (10 * every) == 0:
                kernel = fl.ntk(model, given.X, dtype=torch.float64)
                found["kernel_times"].append(now)
                found["alignment"].append(torch.as_tensor(fl.metrics.alignment(kernel, given.Y)))
                found["norm"].append(torch.linalg.matrix_norm(kernel))
        optimizer.zero_grad()
        ((f - given.Y).square().sum() / (2 * len(given.X))).backward()
        optimizer.step()
    curves = {name: torch.stack(values) for name, values in found.items()}
    # what it has not learned by the end is taken for what it cannot learn
    curves["loss"] = (curves["loss"] - curves["loss"][-1]) / (curves["loss"][0] - curves["loss"][-1])
    return curves


def initial_strength(start: list[Tensor], given: Task) -> Tensor:
    """(C,): c0 = (q0 + r0) / 2 of each mode of a two-layer network."""
    W, a = start
    forward, back = W @ given.v.T, a.T @ given.z  # (N, C) each
    return (forward.square() + back.square()).sum(0) / 4 + (forward * back).sum(0) / 2


def mode_times(runs: Runs, name: str, share: float = 1 - 0.5**0.5) -> Array:
    """(S, C): when the strength of each mode is at a share of s; by default when half of its loss is gone."""
    return numpy.array(
        [
            [first(times, mode, share * s / mode[-1], "final") for mode, s in zip(modes.T, singular, strict=True)]
            for times, modes, singular in zip(runs[f"{name}/times"], runs[f"{name}/modes"], runs["s"], strict=True)
        ]
    )


def formula_times(setup: Setup, runs: Runs, name: str) -> Array:
    """(S, C): half times of modes that start at c0."""
    depth = NETWORKS[name][1]
    pairs = zip(runs["s"], runs[f"{name}/start"], strict=True)
    half = fl.theory.deep_linear.half_time
    return numpy.array([half(torch.as_tensor(s), torch.as_tensor(c0), depth).numpy() for s, c0 in pairs])


def silence(runs: Runs, name: str) -> Array:
    """(S,): loss left when the alignment is at nine tenths of its end."""
    found = []
    for s in range(len(runs)):
        aligned = first(runs[f"{name}/kernel_times"][s], runs[f"{name}/alignment"][s], 0.9, "final")
        found.append(numpy.interp(aligned, runs[f"{name}/times"][s], runs[f"{name}/loss"][s]))
    return numpy.array(found)


def drops(runs: Runs, name: str, prominence: float = 0.05) -> Array:
    """(S,): separate falls of the loss: maxima of its speed that stand out by a share of the largest."""
    from scipy.signal import find_peaks

    found = []
    for times, loss in zip(runs[f"{name}/times"], runs[f"{name}/loss"], strict=True):
        speed = -numpy.gradient(loss, times)
        found.append(float(len(find_peaks(speed, prominence=prominence * speed.max())[0])))
    return numpy.array(found)


def spread(runs: Runs, name: str) -> Array:
    """(S,): time of the last mode over that of the first."""
    times = mode_times(runs, name)
    ratio: Array = times.max(1) / times.min(1)
    return ratio


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The caption, panel by panel, and the times of Sec. 4.2 and App. H."""
    silent = {name: silence(runs, name) for name in NETWORKS}
    yield Claim(
        id="silent",
        claim="Depth two is very similar to a single class (a): learnable loss left when the alignment is "
        "at nine tenths of its end",
        paper="about 1",
        values=silent["linear2"],
        band=(0.9, 1.01),
        band_from="choice",
        why="As for Fig. 1.",
    )
    ends = runs["linear2/alignment"][:, -1]
    yield Claim(
        id="maximum",
        claim="Its final alignment is the analytic one (a): difference",
        paper="overlay",
        values=abs(ends - runs["linear2/best"]),
        band=(None, 0.01),
        band_from="theory",
    )
    exact = mode_times(runs, "linear2") / formula_times(setup, runs, "linear2")
    yield Claim(
        id="mode-times",
        claim="Modes are learned at (1/2s) log(s / c0) (Sec. 4.2, corrected): largest relative "
        "difference of their half times (a)",
        paper="overlay",
        values=abs(exact - 1).max(1),
        band=(None, 0.1),
        band_from="theory",
        why="The exact half time, from c0 = (q0 + r0) / 2 of each mode's weights.",
    )
    printed = numpy.log(runs["s"] / runs["linear2/start"]) / runs["s"]
    yield Claim(
        id="mode-times-printed",
        claim="They are learned at (1/s) log(s / u0^2) (Sec. 4.2): mean ratio (a)",
        paper=1.0,
        values=(mode_times(runs, "linear2") / printed).mean(1),
        band=(0.9, 1.1),
        band_from="print",
        known="The strength grows as e^(2st): the time has 1/(2s).",
    )
    yield Claim(
        id="less-silent",
        claim="In deeper networks alignment does not as clearly precede the fall of the loss (b): "
        "loss left, less that of a",
        paper="< 0",
        values=silent["linear4"] - silent["linear2"],
        band=(None, -0.05),
        band_from="choice",
    )
    for name, panel in (("linear4", "b"), ("tanh3", "c")):
        yield Claim(
            id=f"apart-{panel}",
            claim=f"Times to learn the modes are further apart than at depth two ({panel}): last "
            "over first, over the same of a",
            paper="> 1",
            values=spread(runs, name) / spread(runs, "linear2"),
            band=(1.0, None),
            band_from="print",
        )
        yield Claim(
            id=f"drops-{panel}",
            claim=f"The loss has ten separated drops ({panel})",
            paper=10,
            values=drops(runs, name),
            band=(10, 10),
            band_from="print",
            least=Scale.LAPTOP,
            why="Maxima of its speed; there are ten modes.",
            choices=[
                Choice(
                    made="that stand out by a twentieth of the largest",
                    other="by a hundredth",
                    values=drops(runs, name, 0.01),
                )
            ],
        )
    yield Claim(
        id="by-size",
        claim="Times to learn a mode scale as 1/s (App. H, b): correlation of log time and log s",
        paper="-1",
        values=correlation(runs, "linear4"),
        band=(-1.0, -0.8),
        band_from="choice",
        why="Singular values of whitened one-hot targets are nearly equal, "
        f"{runs['s'].min():.2f} to {runs['s'].max():.2f}: the draw of the initial weights decides too.",
    )


def correlation(runs: Runs, name: str) -> Array:
    """(S,): of the logarithms of mode times and singular values."""
    pairs = zip(mode_times(runs, name), runs["s"], strict=True)
    return numpy.array([numpy.corrcoef(numpy.log(times), numpy.log(s))[0, 1] for times, s in pairs])


def plot(setup: Setup, runs: Runs) -> Any:
    """The three panels of the paper, of the first seed: seeds have their drops at different times."""
    titles = ("a  linear, depth 2", "b  linear, depth 4", "c  tanh, depth 3")
    figure, (*axes, key) = panels(2, 2, height=2.1, titles=titles)
    for ax, name in zip(axes, NETWORKS, strict=True):
        times, kernel_times = runs[f"{name}/times"][0], runs[f"{name}/kernel_times"][0]
        norm = runs[f"{name}/norm"][0]
        curve(ax, times, runs[f"{name}/loss"][0], "learnable loss", color=BLUE)
        curve(ax, kernel_times, norm / norm[-1], "kernel norm / final", color=ORANGE)
        curve(ax, kernel_times, runs[f"{name}/alignment"][0], "alignment", color=GREEN)
        ax.axhline(runs[f"{name}/best"][0], color=GREEN, linestyle="--", label="linear, analytic end")
        learned, formula = mode_times(runs, name)[0], formula_times(setup, runs, name)[0]
        for y, color, label, values in ((-0.07, BLACK, "modes learned", learned), (-0.16, GRAY, "formula", formula)):
            ax.plot(values, numpy.full(len(values), y), "|", color=color, markersize=6, label=label)
        last = min(float(times[-1]), 1.4 * float(numpy.nanmax(learned)))
        ax.set(xlabel="time", xlim=(0, last), ylim=(-0.22, 1.05))
    key.set_axis_off()
    key.legend(*axes[0].get_legend_handles_labels(), loc="center left")
    return figure


EXPERIMENT = Experiment(
    id="002/figH1",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(data="digits", samples=150, pooling=1, width=30, scale=1e-3, lr=0.5, reach=3.0, moments=100),
            seeds=1,
            seconds=4,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=60, mebibytes=100),
        Scale.PAPER: Size(setup=Setup(samples=1000, pooling=1), seeds=3, seconds=900, mebibytes=400),
    },
    measure=measure,
)

FIG_H1 = Reproduction(
    id="002/figH1",
    about=(
        "Networks with ten outputs on whitened MNIST, one-hot targets, sigma^L = 0.0001: two and four linear layers, "
        "and three of tanh. Marks below the curves are the times at which each mode of the teacher has lost half its "
        "loss, measured and by formula: from the initial strength of each mode in a, from sigma^L in b and c, where "
        "random weights need longer. The paper gives neither samples nor width, rank, steps, nor the alignment of many "
        "outputs: ours are 500 images averaged to 14 x 14, 100 units, the directions above 1/1000 of the largest "
        "singular value, and the kernel averaged over outputs with Y Y^T. Losses are shown less what a linear map "
        "cannot learn (for tanh, what is left at the end). Linear networks follow gradient flow, that of tanh descends."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
