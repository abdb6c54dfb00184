"""A figure that costs nothing: the mean of numbers that a seed draws."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from featlearn_papers.frame import registry
from featlearn_papers.frame.claims import Claim
from featlearn_papers.frame.drawing import curve, panels, paper_value
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.scale import Scale
from tests.sweeps.functions import begun

ID = "009/fig1"


@dataclass(frozen=True, kw_only=True)
class Setup:
    count: int = 5
    fails_at: int | None = None
    notes: str = ""
    kills: int = 0


calls = []


def measure(setup, context):
    calls.append(context.seed)
    if context.seed == setup.fails_at:
        raise RuntimeError("broken seed")
    drawn = torch.randn(setup.count, generator=context.generator())
    return {"drawn": drawn, "threads": torch.get_num_threads(), "seed": context.seed}


def fragile(setup, context):
    """Notes that a seed begins; seed 1 kills its own process the first times."""
    if begun(Path(setup.notes), str(context.seed)) <= setup.kills and context.seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(setup, context)


def claims(setup, runs):
    yield Claim(
        id="centered",
        claim="Numbers <are> centered",
        paper=0.0,
        values=runs["drawn"].mean(1),
        band=(-3.0, 3.0),
        band_from="choice",
    )
    yield Claim(
        id="printed",
        claim="Seeds are 7",
        paper=7,
        values=runs["seed"],
        band=(7, 7),
        known="The print miscounts.",
        band_from="print",
        why="So.",
    )
    yield Claim(
        id="drawn",
        claim="Something is drawn",
        paper="yes",
        values=runs["drawn"].std(1) > 0,
        band=(1, None),
        band_from="print",
    )
    yield Claim(
        id="late",
        claim="Only in the large",
        paper="yes",
        values=1.0,
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="made",
        claim="Draws are counted",
        paper=None,
        values=float(setup.count),
        band=(1, None),
        check=True,
        band_from="theory",
    )


def plot(setup, runs):
    figure, (left, right) = panels(1, 2, titles=("A", "B"))
    curve(left, range(setup.count), runs["drawn"], "drawn")
    paper_value(left, 0.25)
    right.imshow(runs["drawn"], label="all")
    return figure


def sizes(setup=None):
    chosen = setup or Setup()
    return {scale: Size(setup=chosen, seeds=3, seconds=60, mebibytes=100) for scale in (Scale.SMOKE, Scale.LAPTOP)}


def experiment(**changes) -> Experiment:
    """The one behind the figure, perhaps changed."""
    return Experiment(**{"id": ID, "sizes": sizes(), "measure": measure, **changes})


def install(monkeypatch: pytest.MonkeyPatch, **changes) -> Reproduction:
    """Declare the figure, perhaps changed; returns it."""
    parts = {name: changes.pop(name) for name in ("sizes", "measure") if name in changes}
    given = {"about": "Made up.", "experiment": experiment(**parts), "plot": plot, "claims": claims, **changes}
    module = ModuleType("featlearn_papers.made_up")
    module.FIG_1 = Reproduction(id=ID, **given)
    module.__spec__ = object()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    declared = registry.Declaration(ID, "Made up & drawn", "made_up")
    monkeypatch.setattr(registry, "DECLARATIONS", (*registry.DECLARATIONS, declared))
    calls.clear()
    return module.FIG_1
