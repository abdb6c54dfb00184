"""Beaglehole et al. 2024, Fig. 12: speeds that follow the layer whose features are furthest behind."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import COLORS, curve, panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003.chain import ChainTask, chain, descend, squared_error

STANDARD, SLO = 0, 1
METHODS = ("standard", "SLO")
"""axis 2 of all numbers, after seeds and starts"""
STARTS = ("all weights times 0.1", "first weights times 0.1, readout times 0.01")
"""axis 1: as printed, and one from which gradient descent learns"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """App. J, eps + |g| for the printed eps |g|."""

    samples: int = 256
    unseen: int = 2048
    dimension: int = 32
    degree: int = 3
    width: int = 256
    lr: float = 0.25
    slo_lr: float = 0.05
    boost: float = 20.0
    eps: float = 0.01
    steps: int = 500
    every: int = 5
    """steps from one measurement to the next"""
    last: int = 100
    """steps at the end over which numbers are averaged: the layer that is driven changes from step to step"""


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Both methods from both starts: uc (starts, methods, T, 3), train and test (starts, methods, T)."""
    task = chain(context, setup.samples, setup.unseen, setup.dimension, setup.degree)
    found: dict[str, list[list[Any]]] = {}
    for start in range(len(STARTS)):
        row = []
        for method in (STANDARD, SLO):
            row.append(trained(setup, start, method, task, context))
            context.progress(2 * start + method + 1, 4, test=row[-1]["test"][-1])
        for name in row[0]:
            found.setdefault(name, []).append([one[name] for one in row])
    return {"steps": list(range(0, setup.steps + 1, setup.every)), **found}


def network(setup: Setup, start: int, task: ChainTask, context: Context) -> MLP:
    """Three hidden ReLU layers, initialized as torch does and then multiplied."""
    model = MLP(
        task.x.shape[1],
        None,
        width=setup.width,
        hidden_layers=3,
        distribution="uniform",
        weight_variance=1 / 3,
        generator=context.generator(1),
    ).to(context.device)
    if start == 0:
        return fl.steer.scale_init(model, 0.1)
    fl.steer.scale_init(model, 0.1, layers="hidden.0")
    return fl.steer.scale_init(model, 0.01, layers="readout")


def trained(setup: Setup, start: int, method: int, task: ChainTask, context: Context) -> dict[str, list[Any]]:
    """UC-NFC of the hidden layers and losses along one training."""
    model = network(setup, start, task, context)
    session = fl.Session(model, task.x, dtype=torch.float64)

    def correlations(model: torch.nn.Module, probe: Any) -> dict[str, float]:
        return {name: one.uncentered for name, one in session.neural_features(layers="hidden.*").items()}

    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=setup.lr)
    if method == SLO:
        optimizer = fl.steer.AdaptiveSLO(
            model, task.x, setup.slo_lr, boost=setup.boost, eps=setup.eps, measure=correlations
        )
    rows: dict[str, list[Any]] = {"uc": [], "train": [], "test": []}

    def at(step: int) -> None:
        if step % setup.every:
            return
        rows["uc"].append(list(correlations(model, None).values()))
        with torch.no_grad():
            rows["train"].append(float(squared_error(model, *task[:2])))
            rows["test"].append(float(squared_error(model, *task[2:4])))

    descend(model, task, optimizer, setup.steps, at)
    return rows


def late(setup: Setup, runs: Runs, name: str, method: int, start: int = 0) -> Array:
    """(S,) or (S, 3): the mean over the last steps."""
    chosen = runs["steps"][0] > setup.steps - setup.last
    values: Array = runs[name][:, start, method][:, chosen].mean(1)
    return values


def other_start(values: Array) -> list[Choice]:
    """What a number is from the start that is not the printed one."""
    return [Choice(made=STARTS[0], other=STARTS[1], values=values)]


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """App. J, from the printed start; what the other start gives is beside it."""

    def layers(method: int, start: int = 0) -> Array:
        return late(setup, runs, "uc", method, start)

    yield Claim(
        id="lowest",
        claim="SLO raises the layer that is behind: lowest UC-NFC of a layer, SLO less standard training",
        paper="positive",
        values=layers(SLO).min(1) - layers(STANDARD).min(1),
        band=(0.0, None),
        band_from="trial",
        why="Weaker than what the paper says; it held in 13 of 15 trials, over three starts.",
        choices=other_start(layers(SLO, 1).min(1) - layers(STANDARD, 1).min(1)),
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="same",
        claim="All layers finish at the same UC-NFC: range over layers with SLO",
        paper=0.0,
        values=numpy.ptp(layers(SLO), axis=1),
        band=(None, 0.1),
        band_from="choice",
        least=Scale.LAPTOP,
        choices=other_start(numpy.ptp(layers(SLO, 1), axis=1)),
    )
    yield Claim(
        id="high",
        claim="All layers finish at a high UC-NFC: lowest layer with SLO",
        paper="high",
        values=layers(SLO).min(1),
        band=(0.8, 1.0),
        band_from="choice",
        least=Scale.LAPTOP,
        choices=other_start(layers(SLO, 1).min(1)),
    )
    yield Claim(
        id="above",
        claim="It is higher than that of any layer with standard training: lowest layer with SLO less the "
        "highest with standard training",
        paper="positive",
        values=layers(SLO).min(1) - layers(STANDARD).max(1),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=other_start(layers(SLO, 1).min(1) - layers(STANDARD, 1).max(1)),
    )
    yield from loss_claims(setup, runs)


def loss_claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """On what is learned."""

    def test(start: int = 0) -> Array:
        return late(setup, runs, "test", SLO, start) - late(setup, runs, "test", STANDARD, start)

    yield Claim(
        id="test",
        claim="The test loss is lower with SLO: SLO less standard training",
        paper="negative",
        values=test(),
        band=(None, 0.0),
        band_from="print",
        least=Scale.LAPTOP,
        choices=other_start(test(1)),
        why="From the printed start gradient descent learns nothing in 500 steps (a training loss near 1).",
    )
    yield Claim(
        id="learns",
        claim="With SLO the network learns: training loss, that of zero being 1",
        paper="falls",
        values=late(setup, runs, "train", SLO),
        band=(None, 0.7),
        band_from="choice",
        choices=other_start(late(setup, runs, "train", SLO, 1)),
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """For each start: UC-NFC of the layers, SLO in full lines and standard training dashed; losses."""
    figure, axes = panels(2, 2, height=2.3)
    steps = runs["steps"][0]
    for start, words in enumerate(STARTS):
        left, right = axes[2 * start : 2 * start + 2]
        for method, style in ((SLO, "-"), (STANDARD, "--")):
            for layer in range(runs["uc"].shape[-1]):
                values = runs["uc"][:, start, method, :, layer]
                label = f"{METHODS[method]}, layer {layer + 1}"
                curve(left, steps, values if method == SLO else values.mean(0), label, color=COLORS[layer], style=style)
            for part, color in (("train", COLORS[5]), ("test", COLORS[7])):
                # single steps of SLO throw the loss up by far, at other times in each seed
                values = numpy.median(runs[part][:, start, method], axis=0)
                curve(right, steps, values, f"{METHODS[method]}, {part}", color=color, style=style)
        left.set(ylim=(0, 1.05), ylabel="UC-NFC", xlabel="step")
        right.set(ylim=(0, 1.3), ylabel="loss", xlabel="step")
        left.set_title(words, loc="left", fontsize=7.5)
        right.set_title("losses, median of the seeds", loc="left", fontsize=7.5)
    parts = [ax.get_legend_handles_labels() for ax in axes[:2]]
    handles, labels = ([one for part in parts for one in part[kind]] for kind in (0, 1))
    figure.legend(handles, labels, loc="outside upper center", ncols=5, columnspacing=1.0)
    return figure


EXPERIMENT = Experiment(
    id="003/fig12",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(samples=64, unseen=64, dimension=10, width=24, steps=60, every=20, last=30),
            seeds=1,
            seconds=2,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=5, seconds=60, mebibytes=100),
        Scale.PAPER: Size(setup=Setup(), seeds=10, seconds=60, mebibytes=100),
    },
    measure=measure,
)

FIG_12 = Reproduction(
    id="003/fig12",
    about=(
        "Three hidden ReLU layers learn the chain monomial of three of 32 coordinates. Before each step the hidden "
        "layer with the smallest UC-NFC gets speed 20, all other weights 1/20 (the readout too, which the paper leaves "
        "open); beside it gradient descent. The paper's sizes, rates and steps; the loss, which it does not give, is "
        "the mean squared error, and gradients are divided by eps + |g|, since by the printed eps |g| nothing is "
        "learned. Numbers are means over the last 100 steps, as the driven layer changes from step to step. Two "
        "starts: all weights of torch's default times 0.1, as printed, from which gradient descent does not learn "
        "within 500 steps; and first weights times 0.1 and the readout times 0.01, which was found in trials and from "
        "which it does. Five seeds or more: single ones disagree."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
