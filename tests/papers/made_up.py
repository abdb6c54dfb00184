"""A figure that costs nothing: the mean of numbers that a seed draws."""

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from featlearn.papers import registry
from featlearn.papers.claims import Claim
from featlearn.papers.drawing import curve, panels, paper_value
from featlearn.papers.reproduction import Reproduction, Size
from featlearn.papers.scale import Scale

ID = "009/fig1"


@dataclass(frozen=True, kw_only=True)
class Setup:
    count: int = 5
    fails_at: int | None = None


calls = []


def measure(setup, context):
    calls.append(context.seed)
    if context.seed == setup.fails_at:
        raise RuntimeError("broken seed")
    drawn = torch.randn(setup.count, generator=context.generator())
    return {"drawn": drawn, "threads": torch.get_num_threads(), "seed": context.seed}


def claims(setup, runs):
    yield Claim(id="centred", claim="Numbers <are> centred", paper=0.0, values=runs["drawn"].mean(1), band=(-3.0, 3.0))
    yield Claim(
        id="printed", claim="Seeds are 7", paper=7, values=runs["seed"], band=(7, 7), known="The print miscounts.",
        why="So.",
    )  # fmt: skip
    yield Claim(id="drawn", claim="Something is drawn", paper="yes", values=runs["drawn"].std(1) > 0, band=(1, None))
    yield Claim(id="late", claim="Only in the large", paper="yes", values=1.0, band=(1, None), least=Scale.LAPTOP)


def plot(setup, runs):
    figure, (left, right) = panels(1, 2, titles=("A", "B"))
    curve(left, range(setup.count), runs["drawn"], "drawn")
    paper_value(left, 0.25)
    right.imshow(runs["drawn"], label="all")
    return figure


def sizes(setup=None):
    chosen = setup or Setup()
    return {scale: Size(setup=chosen, seeds=3, seconds=60, mebibytes=100) for scale in (Scale.SMOKE, Scale.LAPTOP)}


def install(monkeypatch: pytest.MonkeyPatch, **changes) -> Reproduction:
    """Declare the figure, perhaps changed; returns it."""
    parts = {"about": "Made up.", "sizes": sizes(), "measure": measure, "plot": plot, "claims": claims, **changes}
    module = ModuleType("featlearn.papers.made_up")
    module.FIG_1 = Reproduction(id=ID, **parts)
    module.__spec__ = object()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    declared = registry.Declaration(ID, "Made up & drawn", "made_up")
    monkeypatch.setattr(registry, "DECLARATIONS", (*registry.DECLARATIONS, declared))
    calls.clear()
    return module.FIG_1
