"""Shan & Bordelon 2021b, Fig. 1: a network learns faster than its first kernel, and its kernel turns to the task."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLACK, BLUE, GRAY, GREEN, ORANGE, PINK, SKY, curve, panels, seed_curves
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_000.acceleration import end_over_start, final_ratio, largest_fall, late_rise
from featlearn_papers.paper_000.mnist import MNIST
from featlearn_papers.paper_001.odd_even import ODD_EVEN, ODD_EVEN_PRINTED, ODD_EVEN_SLOW

RATES = {"parity": ORANGE, "printed": PINK, "slow": GRAY}
"""experiments on odd and even digits at three learning rates, and their colors; the first is judged"""


def claims(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Iterable[Claim]:
    """The caption and Sec. 3, for both codings of the labels."""

    def judged(name: str, value: Callable[[Runs], Any]) -> dict[str, Any]:
        """Values of an experiment; for odd and even digits with what the other learning rates give."""
        made = f"a learning rate of {setups['parity'].lr:g}"
        choices = [
            Choice(made=made, other=f"{setups[other].lr:g}", values=value(runs[other])) for other in ("printed", "slow")
        ]
        return {"values": value(runs[name]), "choices": choices if name == "parity" else [], "least": Scale.LAPTOP}

    for name, words in (("parity", "odd/even"), ("classes", "ten classes")):
        yield from _network(name, words, partial(judged, name))
    yield from _cross_entropy(runs["classes"])
    yield Claim(
        id="starts-stable",
        claim="The learning rate of odd/even is below the limit of stability at the start: rate "
        "times largest eigenvalue of the first kernel",
        paper=None,
        band=(None, 2.0),
        band_from="theory",
        check=True,
        why="2 is the limit.",
        **judged("parity", first_stability) | {"least": Scale.SMOKE},
    )


def _network(name: str, words: str, given: Callable[[Callable[[Runs], Any]], dict[str, Any]]) -> Iterable[Claim]:
    """Claims on one coding of the labels."""

    yield Claim(
        id=f"{name}-faster",
        claim=f"The network's loss ends below that of its first kernel (A, {words}): their ratio",
        paper="< 1",
        band=(None, 1.0),
        band_from="print",
        **given(lambda r: final_ratio(r, "mse/loss", "mse/kgd")),
    )
    yield Claim(
        id=f"{name}-faster-rescaled",
        claim=f"... and below that of its first kernel with the norm of the last (A, {words}): their ratio",
        paper="< 1",
        band=(None, 1.0),
        band_from="print",
        **given(lambda r: final_ratio(r, "mse/loss", "mse/akgd")),
        why="How long the paper trains is not said.",
    )
    yield Claim(
        id=f"{name}-norm",
        claim=f"The norm of the kernel increases (B, {words}): end over start",
        paper="> 1",
        band=(1.0, None),
        band_from="print",
        **given(lambda r: end_over_start(r, "mse/norm")),
    )
    yield Claim(
        id=f"{name}-norm-falls",
        claim=f"... non-monotonically (B, {words}): largest fall on the way, as a share",
        paper="> 0",
        band=(0.01, None),
        band_from="choice",
        **given(lambda r: largest_fall(r, "mse/norm")),
        why="One per cent is well above rounding.",
    )
    yield Claim(
        id=f"{name}-aligns",
        claim=f"The alignment increases substantially (C, {words}; Sec. 3): end over start",
        paper="substantially",
        band=(1.2, None),
        band_from="choice",
        **given(lambda r: end_over_start(r, "mse/alignment")),
        why="A fifth, for 'substantially'.",
    )
    yield Claim(
        id=f"{name}-asymptote",
        claim=f"... to an asymptote (C, {words}): share of its change in the second half of the steps",
        paper="plateau",
        band=(None, 0.1),
        band_from="choice",
        **given(lambda r: late_rise(r, "mse/alignment")),
    )
    yield Claim(
        id=f"{name}-test-kernel",
        claim=f"Beyond the print: the kernel of held-out samples turns too ({words}): alignment, end over start",
        paper="not shown",
        band=(1.0, None),
        band_from="choice",
        **given(lambda r: end_over_start(r, "mse/test/alignment")),
    )


def _cross_entropy(runs: Runs) -> Iterable[Claim]:
    yield Claim(
        id="cross-entropy-faster",
        claim="Beyond the print: on cross-entropy the network is faster than its first "
        "kernel (ten classes): ratio at the end",
        paper="not shown",
        values=final_ratio(runs, "ce/cross_entropy", "ce/kgd"),
        band=(None, 1.0),
        band_from="choice",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="cross-entropy-aligns",
        claim="Beyond the print: cross-entropy turns the kernel to the task too (ten "
        "classes): alignment, end over start",
        paper="not shown",
        values=end_over_start(runs, "ce/alignment"),
        band=(1.0, None),
        band_from="choice",
        least=Scale.LAPTOP,
    )


def first_stability(runs: Runs) -> Any:
    """(S,): rate times largest eigenvalue of the first kernel, from that of the last."""
    eigenvalues = runs["mse/eigenvalues"]
    return runs["mse/stability"] * eigenvalues[:, 0, 0] / eigenvalues[:, -1, 0]


def plot(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Any:
    """The three panels of the paper for both codings of the labels, and a row beyond the print."""
    titles = ("A  odd/even", "B", "C", "A  ten classes", "B", "C", "learning rates", "cross-entropy", "held-out kernel")
    figure, axes = panels(3, 3, height=2.1, titles=titles)
    for name, row in (("parity", axes[:3]), ("classes", axes[3:6])):
        _draw_paper(runs[name], row)
    _draw_beyond(setups, runs, axes[6:])
    for ax in axes:
        ax.set(xscale="log", xlabel="step")
        ax.legend()
    return figure


def deviating(ax: Any, steps: Any, values: Any, label: str, **options: Any) -> None:
    """Mean and standard deviation over seeds, as in the paper."""
    curve(ax, steps, values, label, spread="standard deviation", **options)


def _steps(runs: Runs, name: str = "mse") -> Any:
    return runs[f"{name}/steps"][0] + 0.5  # step 0 has a place on a logarithmic axis


def _draw_paper(runs: Runs, axes: list[Any]) -> None:
    steps = _steps(runs)
    for name, label, color in (("loss", "NN", ORANGE), ("kgd", "KGD", BLUE), ("akgd", "aKGD", GREEN)):
        deviating(axes[0], steps, runs[f"mse/{name}"], label, color=color)
    axes[0].set(yscale="log", ylabel="loss")
    norm = runs["mse/norm"] / runs["mse/norm"][:, :1]
    deviating(axes[1], steps, norm, "NN", color=ORANGE)
    deviating(axes[1], steps, numpy.ones_like(steps), "KGD", color=BLUE)
    axes[1].set_ylabel(r"$|K| / |K_0|$")
    deviating(axes[2], steps, runs["mse/alignment"], "NN", color=ORANGE)
    start = numpy.full_like(steps, runs["mse/alignment"][:, 0].mean())
    deviating(axes[2], steps, start, "KGD, aKGD", color=BLUE)
    axes[2].set_ylabel("kernel-task alignment")


def _draw_beyond(setups: Mapping[str, Any], runs: Mapping[str, Runs], axes: list[Any]) -> None:
    for name, color in RATES.items():
        ratio, label = runs[name]["mse/loss"] / runs[name]["mse/akgd"], f"rate {setups[name].lr:g}"
        seed_curves(axes[0], _steps(runs[name]), ratio, label, color=color)
    axes[0].axhline(1.0, color=BLACK, linewidth=0.5, label="_as fast as aKGD")
    axes[0].set(yscale="log", ylabel="loss, NN over aKGD")
    classes = runs["classes"]
    deviating(axes[1], _steps(classes, "ce"), classes["ce/cross_entropy"], "NN", color=ORANGE)
    deviating(axes[1], _steps(classes, "ce"), classes["ce/kgd"], "KGD", color=BLUE)
    axes[1].set(yscale="log", ylabel="loss, ten classes")
    for name, label, color in (("parity", "odd/even", ORANGE), ("classes", "ten classes", SKY)):
        steps = _steps(runs[name])
        held_out, training = (runs[name][f"mse/{which}"] for which in ("test/alignment", "alignment"))
        deviating(axes[2], steps, held_out / held_out[:, :1], label, color=color)
        dotted = "dotted: training" if name == "parity" else "_ten classes, training"
        deviating(axes[2], steps, (training / training[:, :1]).mean(0), dotted, color=color, style=":")
    axes[2].set_ylabel("alignment over start")


FIG_1 = Reproduction(
    id="001/fig1",
    about=(
        "A network with two hidden layers of 500 ReLUs on MNIST beside gradient descent with its first kernel frozen "
        "(KGD), and the same at the rate of the last kernel's norm (aKGD). The text says odd against even digits, "
        "taken as one output and targets of -1 and 1; the appendix says ten classes, 1000 samples and a learning rate "
        "of 20 for a loss averaged over ten outputs. Both are run; the second is the experiment of Shan & Bordelon "
        "2021a, Fig. 1. For one output a rate of 20 is beyond the limit of stability (rate times largest eigenvalue "
        "2.4 to 2.9 at the start, limit 2), and a rate of 2 moves outputs as fast as 20 does for ten. Odd and even "
        "digits are judged at a rate of 10, half of the printed one; 20 and 2 are shown beside it, after as many "
        "steps, since the verdict depends on it: near the limit of stability the kernel cannot grow and turns instead. "
        "Laptop scale has 300 samples and 1000 steps (ten classes: 200 and 2000); the paper does not say how long it "
        "trains. Weights are parametrized in the NTK way with variances 1, 2, 1. The last row is beyond the print."
    ),
    experiment={"parity": ODD_EVEN, "printed": ODD_EVEN_PRINTED, "slow": ODD_EVEN_SLOW, "classes": MNIST},
    plot=plot,
    claims=claims,
)
