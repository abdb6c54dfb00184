"""Xu & Ziyin 2024, Fig. 2.

In deep ReLU networks on MNIST consecutive layers align, unless their initial weights are large.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

import featlearn as fl
from featlearn.papers.claims import Claim
from featlearn.papers.context import Context
from featlearn.papers.drawing import COLOURS, curve, panels
from featlearn.papers.models import MLP
from featlearn.papers.reproduction import Reproduction, Size
from featlearn.papers.runs import Array, Numbers, Runs
from featlearn.papers.scale import Scale

NORMS = ("fro", "spectral")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Ten classes, cross-entropy, full batch, Kaiming weights times sigma."""

    data: str = "mnist"
    samples: int = 500
    width: int = 128
    hidden_layers: int = 3
    sigmas: tuple[float, ...] = (0.3, 0.5, 1.0, 2.0, 3.0)
    lrs: tuple[float, ...] = (0.1, 0.1, 0.1, 0.003, 0.001)
    """one for each sigma, by the training accuracy alone"""
    steps: int = 1000
    moments: int = 50
    """at which the alignment is measured, besides the start"""

    @property
    def stride(self) -> int:
        """Steps between measurements."""
        return self.steps // self.moments

    @property
    def unscaled(self) -> int:
        """Where sigma is 1."""
        return self.sigmas.index(1.0)


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """zeta (sigmas, norms, pairs, T), loss and training accuracy (sigmas, T), for the same draws, scaled."""
    data = context.dataset(
        setup.data, samples=setup.samples, generator=context.generator(), flatten=True, normalization="channel"
    )  # fmt: skip
    x, labels = data.x.to(context.device), data.labels.to(context.device)
    found = []
    for i, (sigma, lr) in enumerate(zip(setup.sigmas, setup.lrs, strict=True)):
        model = MLP(
            x.shape[1], 10, width=setup.width, hidden_layers=setup.hidden_layers, weight_variance=2.0,
            generator=context.generator(1),
        ).to(context.device)  # fmt: skip
        fl.steer.scale_init(model, sigma)
        found.append(trained(setup, model, x, labels, lr))
        context.progress(i + 1, len(setup.sigmas), sigma=sigma, loss=found[-1]["loss"][-1])
    every = {name: numpy.stack([numpy.asarray(one[name]) for one in found]) for name in found[0]}
    return {"steps": setup.stride * numpy.arange(setup.moments + 1), **every}


def trained(setup: Setup, model: torch.nn.Module, x: Tensor, labels: Tensor, lr: float) -> dict[str, Any]:
    """The numbers of one network at the moments of gradient descent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    alignments, losses, accuracies = [], [], []
    for step in range(setup.stride * setup.moments + 1):
        f = model(x)
        loss = torch.nn.functional.cross_entropy(f, labels)
        if step % setup.stride == 0:
            alignments.append([
                [pair.value for pair in fl.layer_alignment(model, x[:2], norm=norm).values()]  # type: ignore[arg-type]
                for norm in NORMS
            ])  # fmt: skip
            losses.append(float(loss.detach()))
            accuracies.append(float((f.argmax(1) == labels).double().mean()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"alignment": numpy.moveaxis(numpy.array(alignments), 0, -1), "loss": losses, "accuracy": accuracies}


def ends(runs: Runs, norm: str) -> tuple[Array, Array]:
    """First and last zeta, (S, sigmas, pairs) each."""
    curves = runs["alignment"][:, :, NORMS.index(norm)]
    return curves[..., 0], curves[..., -1]


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """Caption and text, in the Frobenius norm; and what holds in the other."""
    first, last = ends(runs, "fro")
    spectral_first, spectral_last = ends(runs, "spectral")
    one, largest = setup.unscaled, setup.sigmas[-1]
    yield Claim(
        id="accuracy", claim="Models converge well (App. B.1): lowest training accuracy over sigma", paper="> 0.95",
        values=runs["accuracy"][:, :, -1].min(1), band=(0.95, 1), least=Scale.LAPTOP,
    )  # fmt: skip
    yield Claim(
        id="start", claim="The initial alignment (dashed) times sqrt(width)", paper=1.0,
        values=first.mean((1, 2)) * math.sqrt(setup.width), band=(0.97, 1.03),
        why="1 / sqrt(width) for random weights in the Frobenius norm; the paper draws it, without a number.",
    )  # fmt: skip
    yield Claim(
        id="rises", claim="The alignment between consecutive layers increases during training, sigma = 1 (a)",
        paper="yes", values=numpy.all((last > first)[:, one], axis=1), band=(1, None), least=Scale.LAPTOP,
        why="All pairs of layers. Expected to be small: 0.089, 0.090, 0.101 from 0.088 on a made-up task.",
    )  # fmt: skip
    yield Claim(
        id="falls-with-scale", claim="Final alignment falls with sigma, mean over pairs (b)", paper="yes",
        values=(numpy.diff(last.mean(2), axis=1) < 0).all(1), band=(1, None), least=Scale.LAPTOP,
    )  # fmt: skip
    yield Claim(
        id="small", claim=f"Layers align at sigma = {setup.sigmas[0]:g} (b): least ratio of last to first", paper="yes",
        values=(last / first)[:, 0].min(1), band=(1.3, None), least=Scale.LAPTOP,
        why="1.7 to 2.6 on a made-up task.",
    )  # fmt: skip
    yield Claim(
        id="large", claim=f"They stop being aligned at sigma = {largest:g} (b): largest relative change",
        paper="about 0", values=abs(last / first - 1)[:, -1].max(1), band=(None, 0.1), least=Scale.LAPTOP,
        why="0.05 on a made-up task.",
    )  # fmt: skip
    yield Claim(
        id="spectral", claim=f"In the spectral norm layers align as well at sigma = {setup.sigmas[0]:g}: all pairs",
        paper="yes", values=numpy.all((spectral_last > spectral_first)[:, 0], axis=1), band=(1, None),
        least=Scale.LAPTOP, why="\"The L2 norm for matrices is used\" can mean either norm.",
    )  # fmt: skip
    yield Claim(
        id="spectral-large", claim="And not at the largest sigma: largest relative change", paper="about 0",
        values=abs(spectral_last / spectral_first - 1)[:, -1].max(1), band=(None, 0.1), least=Scale.LAPTOP,
    )  # fmt: skip


def plot(setup: Setup, runs: Runs) -> Any:
    """Panels a and b in the Frobenius norm, below them the same in the spectral norm."""
    figure, axes = panels(2, 2, height=2.0, titles=("a", "b", "a, spectral norm", "b, spectral norm"))
    for row, norm in enumerate(NORMS):
        left, right = axes[2 * row : 2 * row + 2]
        first, last = ends(runs, norm)
        for pair in range(last.shape[2]):
            label = f"layers {pair + 1} and {pair + 2}"
            curve(left, runs["steps"][0], runs["alignment"][:, setup.unscaled, row, pair], label, colour=COLOURS[pair])
            curve(right, setup.sigmas, last[:, :, pair], label, colour=COLOURS[pair], style="o-")
            curve(right, setup.sigmas, first[:, :, pair].mean(0), f"_{label}, initial", colour=COLOURS[pair],
                  style="--", linewidth=0.8)  # fmt: skip
        left.set(xlabel="iteration", ylabel=r"$\zeta$ at $\sigma = 1$")
        right.set(xlabel=r"$\sigma$ (dashed: initial)", ylabel=r"$\zeta$ after training", xscale="log")
        right.set_xticks(setup.sigmas, [f"{sigma:g}" for sigma in setup.sigmas])
        right.minorticks_off()
        right.legend()
    return figure


FIG_2 = Reproduction(
    id="004/fig2",
    about=(
        "Alignment zeta = |U W| / (|U| |W|) of consecutive weight matrices of a ReLU network with four layers on "
        "MNIST, full-batch gradient descent: during training at the standard initial scale, and after it for weights "
        "that begin sigma times as large. The paper leaves open widths (ours: 128), the loss (cross-entropy), the "
        "sigmas, the learning rates (ours by the training accuracy alone, as in the paper) and which norm it means by "
        "\"L2 for matrices\": claims are judged in the Frobenius norm, the only one that vanishes with the width as "
        "its text says, and the spectral norm is shown as well. At laptop scale 500 images, 2000 at the paper's."
    ),
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(data="digits", samples=200, width=32, sigmas=(0.5, 1.0, 3.0), lrs=(0.1, 0.1, 0.001), steps=100,
                        moments=5),
            seeds=1, seconds=3, mebibytes=20,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=60, mebibytes=100),
        Scale.PAPER: Size(setup=Setup(samples=2000), seeds=5, seconds=136, mebibytes=200),
    },
    measure=measure,
    plot=plot,
    claims=claims,
)  # fmt: skip
