"""Xu & Ziyin 2024, Table 1: in which phase five common scalings train, and how to move them to another."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from featlearn.theory import phases
from featlearn_papers.frame.claims import Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Numbers, Runs
from featlearn_papers.frame.scale import Scale

SCALINGS = {"ntk": "NTK", "mean_field": "mean field", "xavier": "Xavier", "kaiming": "Kaiming", "lazy": "lazy"}
STARTS = {
    "ntk": "1 -1/2 0 0",
    "mean_field": "1 -1 0 0",
    "xavier": "1 0 -1 -1",
    "kaiming": "1 0 0 -1",
    "lazy": "0 1 0 0",
}
"""c_d, c_gamma, c_u, c_w as printed"""
BLOCKS = {
    "plain": ("learning rates that do not scale", "0 kernel", "0 frozen", "0 learning", "0 unstable", "0 unstable"),
    "stable": ("a stable learning rate, Cor. 1", "0 kernel", "1 learning", "0 learning", "-1 kernel", "-2 kernel"),
    "learning": (
        "rate and scale for feature learning, Cor. 2",
        "1 -1 learning",
        "1 -1 learning",
        "0 0 learning",
        "1 -1 learning",
        "0 0 learning",
    ),
    "kernel": (
        "rate and scale for the kernel phase, Cor. 3",
        "0 -1/2 kernel",
        "0 -1/2 kernel",
        "-2 1 kernel",
        "-1 0 kernel",
        "-2 1 kernel",
    ),
}
"""block -> what it is, then the printed cells: c_eta, in the last two blocks c_gamma too, and the phase"""

EXCHANGED = (
    "The print exchanges c_u and c_w of Kaiming: for f = u.Wx fan-in scaling gives variances 1/d0, a constant, for W "
    "and 1/d for u. At equal rates only their larger one enters, and no phase changes."
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A table of exponents has nothing to choose."""


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Every exponent and phase of `phases.TABLE_1`, which computes them from Theorem 2 and Corollaries 1 to 3."""
    found: dict[str, Numbers] = {}
    for scaling, column in phases.TABLE_1.items():
        start = column.plain.exponents
        found[scaling] = [start.d, start.gamma, start.u, start.w]
        for block, cell in zip(column._fields, column, strict=True):
            phase = list(phases.Phase).index(cell.phase)
            found[f"{scaling}/{block}"] = [cell.exponents.rate, cell.exponents.gamma, phase]
    return found


def start_of(runs: Runs, scaling: str) -> str:
    """c_d, c_gamma, c_u, c_w, in the words of the print."""
    return " ".join(_fraction(value) for value in runs[scaling][0])


def cell_of(runs: Runs, scaling: str, block: str) -> str:
    """A cell in the words of the print."""
    rate, gamma, phase = runs[f"{scaling}/{block}"][0]
    numbers = [rate, gamma] if block in ("learning", "kernel") else [rate]
    return " ".join([*map(_fraction, numbers), str(list(phases.Phase)[int(phase)])])


def _fraction(value: float) -> str:
    return str(Fraction(float(value)).limit_denominator(12))


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """One for each cell, and one for the exponents at the head of each column."""
    for scaling, name in SCALINGS.items():
        yield Claim(
            id=f"{scaling}-start",
            claim=f"{name}: exponents of width, output scale and variances of u and w",
            paper=STARTS[scaling],
            values=start_of(runs, scaling),
            band=STARTS[scaling],
            band_from="print",
            known=EXCHANGED if scaling == "kaiming" else None,
            check=True,
            why="What the scaling is by definition: an input of the table.",
        )
    for block, (meaning, *cells) in BLOCKS.items():
        for (scaling, name), printed in zip(SCALINGS.items(), cells, strict=True):
            yield Claim(
                id=f"{scaling}-{block}",
                claim=f"{name}: {meaning}",
                paper=printed,
                values=cell_of(runs, scaling, block),
                band=printed,
                band_from="print",
            )


def plot(setup: Setup, runs: Runs) -> Any:
    """The table as printed, ours; a cell that differs from the print shows it in brackets."""
    figure, (ax,) = panels(1, 1, height=1.8)
    rows = [[_beside(start_of(runs, scaling), STARTS[scaling]) for scaling in SCALINGS]]
    for block, (_, *cells) in BLOCKS.items():
        ours = [cell_of(runs, scaling, block) for scaling in SCALINGS]
        rows.append([_beside(*pair) for pair in zip(ours, cells, strict=True)])
    heads = [
        r"$c_d\ c_\gamma\ c_u\ c_w$",
        r"$c_\eta$",
        r"$c_\eta^*$",
        r"$c_\eta^+\ c_\gamma^+$",
        r"$c_\eta^-\ c_\gamma^-$",
    ]
    ax.axis("off")
    table = ax.table(rows, rowLabels=heads, colLabels=list(SCALINGS.values()), loc="center", cellLoc="center")
    table.scale(1, 1.9)
    return figure


def _beside(ours: str, printed: str) -> str:
    return ours if ours == printed else f"{ours}\n(print: {printed})"


EXPERIMENT = Experiment(
    id="004/table1",
    sizes={scale: Size(setup=Setup(), seeds=1, seconds=0.1, mebibytes=10) for scale in Scale},
    measure=measure,
    random=False,
)

TABLE_1 = Reproduction(
    id="004/table1",
    about=(
        "Five common scalings of two-layer networks, with the exponents of learning rate and output scale that make "
        "training stable, learn features, or keep the kernel. The table is computed from Theorem 2 and Corollaries 1 "
        "to 3 and compared with the print cell by cell; nothing is left open but the kernel-phase rates, which are the "
        "paper's choice."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
