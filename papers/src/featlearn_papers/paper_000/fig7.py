"""Shan & Bordelon 2021a, Fig. 7: the final kernel of a two-layer linear network beside its approximation."""

from collections.abc import Iterable
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLUE, ORANGE, curve, panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_000.linear import DECAYING, LARGE, LINEAR, SMALL, Setup


def eigenvalue_error(runs: Runs, start: int) -> Any:
    """(S,): largest relative error of Eq. 14 in an eigenvalue that is not zero."""
    exact, approximate = runs["eigenvalues"][:, start].transpose(1, 0, 2)
    return abs(approximate / exact - 1).max(1)


def displaced_power(runs: Runs, start: int) -> Any:
    """(S,): share of the task's power that Eq. 14 has in other modes; modes go by their rank."""
    exact, approximate = runs["task_power"][:, start].transpose(1, 0, 2)
    return abs(approximate - exact).sum(1) / 2


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The caption for small weights; what Sec. 5 and App. A.2 say of the term that is dropped."""
    small, large, decaying = (setup.starts[place] for place in (SMALL, LARGE, DECAYING))
    made = f"initial weights of deviation {small.deviation:g}"

    def otherwise(values: Any) -> list[Choice]:
        return [
            Choice(made=made, other=f"of {large.deviation:g}", values=values(LARGE)),
            Choice(made=made, other=f"of {decaying.deviation:g}, with weight decay", values=values(DECAYING)),
        ]

    yield Claim(
        id="eigenvalues",
        claim="Eigenvalues of Eq. 12 and Eq. 14 are consistent (A): largest relative difference",
        paper="good consistency",
        values=eigenvalue_error(runs, SMALL),
        band=(None, 0.05),
        band_from="choice",
        choices=otherwise(lambda place: eigenvalue_error(runs, place)),
    )
    yield Claim(
        id="task-power",
        claim="Task spectra are consistent (B): share of the task's power that is in other modes",
        paper="good consistency",
        values=displaced_power(runs, SMALL),
        band=(None, 0.05),
        band_from="choice",
        choices=otherwise(lambda place: displaced_power(runs, place)),
    )
    yield Claim(
        id="kernel",
        claim="Eq. 14 approximates the kernel: relative error",
        paper="approximately",
        values=runs["error"][:, SMALL],
        band=(None, 0.01),
        band_from="trial",
        why="0.003 was found before; the term that is dropped is of the order of the weights' variance.",
        choices=otherwise(lambda place: runs["error"][:, place]),
    )
    yield Claim(
        id="decay",
        claim="With an L2 penalty the term across V vanishes (Sec. 5), from large weights too: what is "
        "left of W across V, as a share of W",
        paper=0.0,
        values=runs["across"][:, DECAYING],
        band=(None, 0.05),
        band_from="theory",
        why="From a norm of N it shrinks to N exp(-lr decay steps), beside the sqrt(N) that the "
        "teacher needs: 0.002 is expected, and 0.001 at smoke scale.",
    )
    yield Claim(
        id="implicit",
        claim="It vanishes without a penalty as well, by descent (Sec. 5): share of W, from large weights",
        paper=0.0,
        values=runs["across"][:, LARGE],
        band=(None, 0.05),
        band_from="print",
        known="Gradient flow conserves W W^T - V V^T, and across V this is W W^T itself, which keeps the size it had "
        "at the start.",
    )
    yield Claim(
        id="first-kernel",
        claim="The first kernel is alpha_K X X^T / N^2 (below Eq. 14): relative error",
        paper="for large N",
        values=runs["first-kernel"][:, SMALL],
        band=(None, 0.1),
        band_from="choice",
        known="This needs P much smaller than N. N^-1 W^T V = s needs P >= N, where eigenvalues of W^T W / N spread "
        "from 0 to 4 (times the variance) at every N.",
    )
    yield Claim(
        id="second-form",
        claim="Eq. 14 with alpha_K^-2 |V|^2 K0 in place of |V|^2 X X^T / N^2: relative error",
        paper="approximately",
        values=runs["error/printed"][:, SMALL],
        band=(None, 0.1),
        band_from="choice",
        known="It must be alpha_K^-1, since K0 is about alpha_K X X^T / N^2.",
        choices=[
            Choice(made="alpha_K^-2, as printed", other="alpha_K^-1", values=runs["error/first-kernel"][:, SMALL])
        ],
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """Above panel A of the paper, below panel B, for three starts."""
    names = {SMALL: "small weights", DECAYING: "large, weight decay", LARGE: "large weights"}
    titles = [f"{panel}: {name}" for panel in "AB" for name in names.values()]
    figure, axes = panels(2, 3, height=2.1, titles=titles)
    ranks = numpy.arange(1, setup.width + 1)
    for row, name, label in ((axes[:3], "eigenvalues", r"$\lambda_k$"), (axes[3:], "task_power", r"$v_k^2 / |y|^2$")):
        for ax, start in zip(row, names, strict=True):
            exact, approximate = numpy.maximum(runs[name][:, start], 1e-7).transpose(1, 0, 2)
            curve(ax, ranks, exact, "Eq. 12", color=BLUE)
            curve(ax, ranks, approximate.mean(0), "Eq. 14", color=ORANGE, style="--")
            ax.set(yscale="log", xlabel="k", ylabel=label)
        low, high = (each([ax.get_ylim() for ax in row]) for each in (numpy.min, numpy.max))
        for ax in row:
            ax.set_ylim(low, high)
    axes[0].legend()
    return figure


FIG_7 = Reproduction(
    id="000/fig7",
    about=(
        "Spectra of the final kernel of the two-layer linear network of Fig. 3, exact (Eq. 12, where the print has W "
        "W^T for W^T W) and without the part of W that is orthogonal to V (Eq. 14): eigenvalues (A) and the task's "
        "power in the eigenvectors (B). The paper gives neither sizes nor the initial scale. Dropping that part is "
        "right for small initial weights (deviation 0.05, left), which the verdicts are about, and for large ones "
        "(deviation 1) if a penalty removes it (weight decay 0.001, middle); without one it fails (right). Lines are "
        "means over seeds, of modes by their rank."
    ),
    experiment=LINEAR,
    plot=plot,
    claims=claims,
)
