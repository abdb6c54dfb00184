"""Beaglehole et al. 2024, Fig. 4.

With limited speeds a network learns features from large initial weights as well as from small ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

import featlearn as fl
from featlearn.papers.claims import Claim
from featlearn.papers.context import Context
from featlearn.papers.drawing import COLOURS, WIDTH, curve
from featlearn.papers.experiment import Experiment, Size
from featlearn.papers.models import MLP
from featlearn.papers.paper_003.chain import ChainTask, chain, descend, first_layer, network, squared_error
from featlearn.papers.reproduction import Reproduction
from featlearn.papers.runs import Numbers, Runs
from featlearn.papers.scale import Scale
from featlearn.papers.schedule import growing_steps
from featlearn.quantities.layer_features import LayerFeatures

STANDARD, SLO = 0, 1
METHODS = ("standard", "SLO")
"""axis 1 of all numbers; axis 2 are the scales"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """App. I, with the readout multiplied by 0.01 (the print divides, and then nothing trains)."""

    samples: int = 256
    unseen: int = 2048
    dimension: int = 32
    degree: int = 5
    width: int = 256
    scales: tuple[float, ...] = (1.0, 0.1, 0.01, 0.001)
    """factors of the first layer, largest first"""
    rates: tuple[float, ...] = (0.03, 0.1, 0.2, 0.4)
    readout: float = 0.01
    fast: float = 500.0
    """speed of the first layer, C0"""
    slow: float = 0.002
    """of the others, C1 and C2"""
    eps: float = 0.1
    steps: int = 600


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Standard training and SLO from the same weights, for each scale; the matrices of the largest."""
    task = chain(context, setup.samples, setup.unseen, setup.dimension, setup.degree)
    paths: list[list[dict[str, list[float]]]] = [[], []]
    pictures: dict[str, Numbers] = {}
    for method in (STANDARD, SLO):
        for scale, lr in zip(setup.scales, setup.rates, strict=True):
            model = network(context, task, setup.width, scale, setup.readout)
            path, last = trained(model, task, steered(model, method, lr, setup), setup.steps)
            paths[method].append(path)
            if scale == setup.scales[0]:
                pictures |= {f"nfm/{method}": last.nfm, f"agop/{method}": last.agop}
            done = method * len(setup.scales) + len(paths[method])
            context.progress(done, 2 * len(setup.scales), scale=scale, uc=path["uncentered"][-1])
    names = paths[0][0]
    return {
        "steps": growing_steps(setup.steps, 1.3),
        **{name: [[path[name] for path in row] for row in paths] for name in names},
        **pictures,
        "egop": task.egop,
    }


def steered(model: MLP, method: int, lr: float, setup: Setup) -> torch.optim.Optimizer:
    """Gradient descent, or SLO with a fast first layer."""
    if method == STANDARD:
        return torch.optim.SGD(model.parameters(), lr=lr)
    groups = fl.steer.speed_groups(model, {"hidden.0": setup.fast, "*": setup.slow})
    return fl.SLO(groups, lr, eps=setup.eps)


def trained(
    model: MLP, task: ChainTask, optimizer: torch.optim.Optimizer, steps: int
) -> tuple[dict[str, list[float]], LayerFeatures]:
    """What Fig. 4 shows of the first layer, along training; and the layer at the end."""
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    path: dict[str, list[float]] = {}
    seen: list[LayerFeatures] = []
    wanted = set(growing_steps(steps, 1.3))

    def at(step: int) -> None:
        if step not in wanted:
            return
        layer = first_layer(model, task.x, initial)
        seen[:] = [layer]
        with torch.no_grad():
            train, test = (float(squared_error(model, *pair)) for pair in (task[:2], task[2:4]))
        numbers = {
            "uncentered": layer.uncentered,
            "centered": layer.centered,
            "share": layer.centered_share,
            "train": train,
            "test": test,
            "nfm_egop": float(fl.metrics.correlation(layer.nfm, task.egop)),
            "agop_egop": float(fl.metrics.correlation(layer.agop, task.egop)),
        }
        for name, value in numbers.items():
            path.setdefault(name, []).append(value)

    descend(model, task, optimizer, steps, at)
    return path, seen[-1]


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """Sec. 5.1 on initialisation, Sec. 5.2 and App. H on SLO: values after training, (S, methods, scales)."""
    uc, c, share = (runs[name][..., -1] for name in ("uncentered", "centered", "share"))
    nfm, agop = runs["nfm_egop"][..., -1], runs["agop_egop"][..., -1]
    yield Claim(
        id="share-falls", claim="Standard training: the centred part dominates more the smaller the first weights",
        paper="yes", values=numpy.diff(share[:, STANDARD], axis=1).min(1) > 0, band=(1, None), band_from="print",
    )  # fmt: skip
    yield Claim(
        id="uc-falls", claim="Standard training: the UC-NFC is lower for larger first weights (scale 1 against 0.001)",
        paper="yes", values=uc[:, STANDARD, 0] < uc[:, STANDARD, -1], band=(1, None),
        band_from="print", least=Scale.LAPTOP,
    )  # fmt: skip
    yield Claim(
        id="c-falls", claim="Standard training: the C-NFC is lower for larger first weights (scale 1 against 0.001)",
        paper="yes", values=c[:, STANDARD, 0] < c[:, STANDARD, -1], band=(1, None),
        band_from="print", least=Scale.LAPTOP,
    )  # fmt: skip
    yield Claim(
        id="uc-less", claim="Standard training, scale 1: the UC-NFC fails to develop", paper="low",
        values=uc[:, STANDARD, 0], band=(None, 0.75), band_from="trial", least=Scale.LAPTOP,
        why="0.57 to 0.67 in trials before; the figure gives no numbers.",
    )  # fmt: skip
    yield Claim(
        id="c-fraction", claim="Standard training: the C-NFC falls less than the UC-NFC (scale 1 against 0.001)",
        paper="yes", values=(c[:, STANDARD, -1] - c[:, STANDARD, 0]) < (uc[:, STANDARD, -1] - uc[:, STANDARD, 0]),
        band=(1, None), band_from="print", least=Scale.LAPTOP,
        why="At scale 1 and the end of training the C-NFC is often below the UC-NFC: in two of three seeds of an "
        "earlier trial, 0.45 to 0.50 against 0.67.",
    )  # fmt: skip
    yield Claim(
        id="slo-uc", claim="SLO: the UC-NFC is close to 1 whatever the scale; lowest scale's value", paper=1.0,
        values=uc[:, SLO].min(1), band=(0.85, 1.0), band_from="trial", least=Scale.LAPTOP,
        why="0.90 to 0.96 in trials; the figure gives no numbers.",
    )  # fmt: skip
    yield Claim(
        id="slo-c", claim="SLO: the C-NFC is close to 1 whatever the scale; lowest scale's value", paper=1.0,
        values=c[:, SLO].min(1), band=(0.85, 1.0), band_from="trial", least=Scale.LAPTOP,
    )  # fmt: skip
    yield Claim(
        id="slo-share", claim="SLO: the ratio of C to UC is close to 1 whatever the scale; lowest scale's value",
        paper=1.0, values=share[:, SLO].min(1), band=(0.95, 1.05), band_from="trial", least=Scale.LAPTOP,
    )  # fmt: skip
    yield Claim(
        id="standard-share", claim="Standard training, scale 1: the centred part hardly contributes", paper="low",
        values=share[:, STANDARD, 0], band=(None, 0.1), band_from="trial", least=Scale.LAPTOP,
    )  # fmt: skip
    yield Claim(
        id="slo-features", claim="SLO at scale 1 brings NFM and AGOP nearer to the EGOP than standard training",
        paper="yes", values=(nfm[:, SLO, 0] > nfm[:, STANDARD, 0]) & (agop[:, SLO, 0] > agop[:, STANDARD, 0]),
        band=(1, None), band_from="print",
    )  # fmt: skip
    yield Claim(
        id="identity", claim="Standard training, scale 1: the NFM resembles the identity; its cosine with the EGOP is "
        "that of the identity", paper=0.323, values=nfm[:, STANDARD, 0], band=(0.28, 0.45),
        band_from="theory", least=Scale.LAPTOP,
        why="No number in the print; tr(EGOP) / (sqrt(d) |EGOP|) is 0.323 for d = 32 and r = 5.",
    )  # fmt: skip
    yield Claim(
        id="slo-invariant", claim="SLO: the quality of the NFM does not depend on the scale (App. H): range of its "
        "cosine with the EGOP", paper=0.0, values=numpy.ptp(nfm[:, SLO], axis=1), band=(None, 0.15), band_from="trial",
        why="Against a range of 0.5 for standard training in trials.", least=Scale.LAPTOP,
    )  # fmt: skip
    yield Claim(
        id="interpolates", claim="SLO with eps lets the network interpolate: largest training loss over scales "
        "(App. I)", paper=0.0, values=runs["train"][:, SLO, :, -1].max(1), band=(None, 0.05),
        band_from="choice", least=Scale.LAPTOP,
        why="From scale 1 earlier trials ended at 0.04 to 0.13: it is still falling after the paper's 600 steps.",
    )  # fmt: skip


PATHS = (("uncentered", "UC-NFC"), ("centered", "C-NFC"), ("share", "C / UC"), ("train", "training loss"))


def plot(setup: Setup, runs: Runs) -> Any:
    """A, B: along training for each scale, standard and SLO; C, D: matrices of the first seed from scale 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    rows: list[Any] = [[f"{name}/{method}" for name, _ in PATHS] for method in (STANDARD, SLO)]
    rows.append([f"{kind}/{method}" for method in (STANDARD, SLO) for kind in ("nfm", "agop")])
    axes = figure.subplot_mosaic(rows)
    for method, panel in ((STANDARD, "A"), (SLO, "B")):
        for name, label in PATHS:
            ax = axes[f"{name}/{method}"]
            for i, scale in enumerate(setup.scales):
                # the C-NFC has no value before the first step
                curve(ax, runs["steps"][0][1:], runs[name][:, method, i, 1:], f"$s_0$ = {scale:g}", colour=COLOURS[i])
            ax.set(xscale="log", ylim=(0, 1.3) if name == "train" else (0, 1.04))
            ax.set_title(f"{panel}  {label}" if name == "uncentered" else label, loc="left")
            ax.set_xlabel("step" if method == SLO else "")
        axes[f"uncentered/{method}"].set_ylabel(METHODS[method])
    axes[f"centered/{SLO}"].legend(loc="lower center", handlelength=1)
    for method, panel in ((STANDARD, "C"), (SLO, "D")):
        for kind in ("nfm", "agop"):
            matrix, ax = runs[f"{kind}/{method}"][0], axes[f"{kind}/{method}"]
            ax.imshow(matrix / abs(matrix).max(), cmap="RdBu_r", vmin=-1, vmax=1, label=kind)
            near = runs[f"{kind}_egop"][:, method, 0, -1].mean()
            ax.set_title(f"{panel}  {kind.upper()}, {METHODS[method]}", loc="left")
            ax.set(xticks=[], yticks=[], xlabel=f"cosine with EGOP {near:.2f}")
    return figure


EXPERIMENT = Experiment(
    id="003/fig4",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(
                samples=64, unseen=64, dimension=10, degree=3, width=32, scales=(1.0, 0.01), rates=(0.03, 0.2),
                steps=120,
            ),
            seeds=1, seconds=2, mebibytes=20,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=40, mebibytes=100),
        Scale.PAPER: Size(setup=Setup(), seeds=10, seconds=30, mebibytes=100),
    },
    measure=measure,
)  # fmt: skip

FIG_4 = Reproduction(
    id="003/fig4",
    about=(
        "Two hidden ReLU layers learn the chain monomial from first weights of four scales, by gradient descent and by "
        "speed limited optimisation, which moves the first layer fast and the others slowly. The paper's sizes, rates, "
        "speeds and steps; the loss, which it does not give, is the mean squared error. Its App. I divides the readout "
        "by 0.01; only multiplied does it train. NFM and AGOP are those of the first seed from scale 1, in units of "
        "their largest entry."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
