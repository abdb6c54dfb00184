"""Shan & Bordelon 2021b, Fig. 6.

In two-layer ReLU networks the readout part of the kernel turns, the hidden part grows in every direction.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.claims import Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import BLACK, GRAY, GREEN, ORANGE, curve, panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Numbers, Runs
from featlearn_papers.frame.scale import Scale

PARTS = {
    "readout_task": ("C", r"$y^T K_V y / |y|^2$"),
    "hidden_task": ("D", r"$y^T K_W y / |y|^2$"),
    "readout_mean": ("E", r"$\mathrm{Tr} K_V / P$"),
    "hidden_mean": ("F", r"$\mathrm{Tr} K_W / P$"),
}
"""the four curves of `fl.theory.relu.Growth`: panel, and what it shows"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """App. E.4: Gaussian inputs of variance 1/N, random signs, loss P^-1 sum (f - y)^2."""

    inputs: int = 1000
    width: int = 2000
    samples: int = 100
    lr: float = 0.1
    steps: int = 1200
    moments: int = 40
    """at which kernels are measured"""

    @property
    def stride(self) -> int:
        """Steps between measurements."""
        return self.steps // self.moments


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """The four projections of the kernel, and what the theory assumes: gates, ansatz and the sign of y . f."""
    generator = context.generator()
    x = torch.randn(setup.samples, setup.inputs, generator=generator) / setup.inputs**0.5
    y = torch.randn(setup.samples, generator=generator).sign()
    model = MLP(setup.inputs, None, width=setup.width, hidden_layers=1, weight_variance=1.0, generator=generator)
    x, y, model = x.to(context.device), y.to(context.device), model.to(context.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.lr)
    parts, outputs, readings = [], [], []
    gates = None
    for step in range(setup.stride * setup.moments + 1):
        f = model(x)
        if step % setup.stride == 0:
            parts.append(fl.ntk(model, x, by="layer", dtype=torch.float64))
            gates, reading = inspect(model, x, gates)
            readings.append([*reading, float(f.detach() @ y) / setup.samples])
            outputs.append(f.detach().double())
            context.progress(step, setup.steps, loss=float((f.detach() - y).square().mean()))
        optimizer.zero_grad()
        (f - y).square().mean().backward()
        optimizer.step()
    return compared(setup, y.double(), torch.stack(outputs), parts) | {"readings": readings}


def inspect(model: torch.nn.Module, x: Tensor, gates: Tensor | None) -> tuple[Tensor, list[float]]:
    """The first gates, and now: share of gates that flipped, slope and correlation of the ansatz."""
    hidden, readout = (weight.detach().double() for weight in model.parameters())
    preactivations = x.double() @ hidden.T
    now = preactivations > 0
    first = now if gates is None else gates
    ansatz = fl.theory.relu.ansatz(now.double(), readout[0], preactivations.relu())
    return first, [float((now != first).double().mean()), float(ansatz.slope), float(ansatz.correlation)]


def compared(setup: Setup, y: Tensor, outputs: Tensor, parts: list[dict[str, Tensor]]) -> dict[str, Numbers]:
    """Measured curves, those of the theory along the measured outputs, and those of the theory alone."""
    times = setup.stride * torch.arange(setup.moments + 1, dtype=torch.float64)
    rate = fl.dynamics.rate(setup.lr, "mean", setup.samples)
    readout, hidden = (torch.stack([part[name] for part in parts]) for name in ("readout", "hidden.0"))
    growth = fl.theory.relu.growth(times, outputs, y, rate, K_V=readout[0], K_W=hidden[0])
    closed = fl.theory.relu.solve(readout[0], hidden[0], y, times=times, rate=rate, f0=outputs[0])
    found: dict[str, Numbers] = {
        "times": times,
        "loss": (outputs - y).square().mean(1),
        "solve/loss": closed.loss / setup.samples,
        "alignment": fl.metrics.alignment(readout + hidden, y),
        "alignment/readout": fl.metrics.alignment(readout, y),
        "alignment/hidden": fl.metrics.alignment(hidden, y),
    }
    if closed.alignment is not None:
        found["solve/alignment"] = closed.alignment
    for kernel, name in ((readout, "readout"), (hidden, "hidden")):
        found[f"{name}_task"] = torch.einsum("m,tmn,n->t", y, kernel, y) / y.square().sum()
        found[f"{name}_mean"] = kernel.diagonal(dim1=1, dim2=2).mean(1)
    for name in PARTS:
        found[f"growth/{name}"], found[f"solve/{name}"] = getattr(growth, name), getattr(closed, name)
    return found


def grown(runs: Runs, name: str) -> Any:
    """(S,): from the first to the last moment."""
    return runs[name][:, -1] - runs[name][:, 0]


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The caption, Sec. 6.1, and the assumptions of App. D."""
    flips, slope, _, sign = runs["readings"].transpose(2, 0, 1)
    began = max(1, 10 // setup.stride)
    yield Claim(
        id="learns",
        claim="The training loss falls to zero (A): end over start",
        paper=0.0,
        values=runs["loss"][:, -1] / runs["loss"][:, 0],
        band=(None, 0.01),
        band_from="choice",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="aligns",
        claim="The alignment of the kernel increases before it saturates (B): end over start",
        paper="rises",
        values=runs["alignment"][:, -1] / runs["alignment"][:, 0],
        band=(2.0, None),
        band_from="choice",
        why="It starts at about 1/sqrt(P), so fewer samples leave less to gain.",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="readout-turns",
        claim="K_V grows much faster along y than in other directions (C, E): ratio of the growths",
        paper="much faster",
        values=grown(runs, "readout_task") / grown(runs, "readout_mean"),
        band=(10.0, None),
        band_from="theory",
        why="The theory has P/2 for the ratio.",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="hidden-isotropic",
        claim="K_W grows at the same rate in all directions (D, F): ratio of the growths",
        paper=1.0,
        values=grown(runs, "hidden_task") / grown(runs, "hidden_mean"),
        band=(0.8, 1.2),
        band_from="trial",
        why="Inputs are not exactly orthogonal: their overlaps are 1/sqrt(N) and enter P times.",
    )
    yield Claim(
        id="readout-aligns",
        claim="Alignment is driven by K_V (B): its rise over that of K_W",
        paper="driven by K_V",
        values=grown(runs, "alignment/readout") / abs(grown(runs, "alignment/hidden")),
        band=(3.0, None),
        band_from="choice",
    )
    for name, (panel, _) in PARTS.items():
        yield Claim(
            id=f"theory-{name.replace('_', '-')}",
            claim=f"Eq. 16, corrected, captures the growth ({panel}): measured over theory",
            paper="nicely",
            values=grown(runs, name) / grown(runs, f"growth/{name}"),
            band=(0.75, 1.1),
            band_from="trial",
            why="The theory keeps gates fixed; those that flip take 10 to 20 % at the size of the paper.",
        )
    yield Claim(
        id="hidden-printed",
        claim="K_W grows by eta (y - f).f / 2 on average (Eq. 16, last line): measured over print",
        paper=1.0,
        values=grown(runs, "hidden_mean") / (grown(runs, "growth/hidden_mean") / 2),
        band=(0.75, 1.1),
        band_from="print",
        known="The factor 1/2 is a misprint: Eq. 86 of the same paper has 1, up to 1/P.",
    )
    yield Claim(
        id="gates",
        claim="Gates are static (App. D): share that flipped by the end",
        paper=0.0,
        values=flips[:, -1],
        band=(None, 0.1),
        band_from="trial",
        why="4 to 5 % at the size of the paper; more in smaller networks.",
    )
    yield Claim(
        id="ansatz",
        claim="Gates and weighted features of different samples are uncorrelated (Eq. 59): slope, early",
        paper=0.5,
        values=slope[:, began],
        band=(0.45, 0.55),
        band_from="trial",
        why=f"At step {began * setup.stride}.",
    )
    yield Claim(
        id="ansatz-late",
        claim="The same at the end",
        paper=0.5,
        values=slope[:, -1],
        band=(0.38, 0.55),
        band_from="trial",
        why="0.41 to 0.45 is known at the size of the paper: learned weights are correlated with their gates.",
    )
    yield Claim(
        id="sign",
        claim="y.f is positive, so that the kernel grows (Sec. 6.1): smallest value after ten steps, over P",
        paper="> 0",
        values=sign[:, began:].min(1),
        band=(0.0, None),
        band_from="print",
        why="At the start its sign is chance.",
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """The six panels of the paper, and below them what the theory assumes."""
    figure, axes = panels(3, 3, height=1.75, titles=("A", "B", "gates", "C", "D", "ansatz", "E", "F", "y·f"))
    times = runs["times"][0]
    curve(axes[0], times, runs["loss"], "networks", color=ORANGE)
    curve(axes[0], times, runs["solve/loss"].mean(0), "theory alone", color=BLACK, style="--")
    for name, color in (("", ORANGE), ("/readout", GREEN), ("/hidden", GRAY)):
        label = {"": "$K$", "/readout": "$K_V$", "/hidden": "$K_W$"}[name]
        curve(axes[1], times, runs[f"alignment{name}"], label, color=color)
    curve(axes[1], times, runs["solve/alignment"].mean(0), "$K$, theory alone", color=BLACK, style="--")
    for name, ax in zip(PARTS, (axes[3], axes[4], axes[6], axes[7]), strict=True):
        curve(ax, times, runs[name], "networks", color=ORANGE)
        curve(ax, times, runs[f"growth/{name}"].mean(0), "theory, measured outputs", color=BLACK)
        curve(ax, times, runs[f"solve/{name}"].mean(0), "theory alone", color=BLACK, style="--")
        ax.set_ylabel(PARTS[name][1])
    flips, slope, correlation, sign = runs["readings"].transpose(2, 0, 1)
    curve(axes[2], times, flips, "share of gates that flipped")
    curve(axes[5], times, slope, "slope")
    curve(axes[5], times, correlation, "correlation", color=GRAY)
    axes[5].axhline(0.5, color=BLACK, linestyle=":", label="slope expected")
    curve(axes[8], times, sign, "$y \\cdot f / P$")
    axes[8].axhline(0.0, color=BLACK, linewidth=0.5, label="_zero")
    axes[6].set_ylim(axes[3].get_ylim())
    for ax in (axes[0], axes[1], axes[2], axes[3], axes[5], axes[8]):
        ax.legend(loc="best" if ax is axes[0] else "center right" if ax is axes[5] else "lower right")
    for ax in axes[6:]:
        ax.set_xlabel("step")
    axes[0].set_ylabel("loss")
    axes[1].set_ylabel("kernel-task alignment")
    return figure


EXPERIMENT = Experiment(
    id="001/fig6",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(inputs=200, width=800, samples=20, steps=240, moments=20), seeds=1, seconds=3, mebibytes=50
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=120, mebibytes=1200),
        Scale.PAPER: Size(setup=Setup(), seeds=10, seconds=25, mebibytes=1200),
    },
    measure=measure,
)

FIG_6 = Reproduction(
    id="001/fig6",
    about=(
        "Two-layer ReLU networks trained on random signs. The kernel has a readout part K_V and a hidden part K_W; the "
        "theory says how fast each grows along the target and on average. The paper's sizes; it does not give the "
        "number of steps, which is 1200 here, and prints the inputs' variance as 1/sqrt(N), where unit-norm inputs "
        "have 1/N. Theory curves are the corrected rates, once along the measured outputs as in the paper, once from "
        "the initial kernel alone. The right column shows what the theory assumes."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
