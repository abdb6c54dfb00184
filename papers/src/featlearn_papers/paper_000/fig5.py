"""Shan & Bordelon 2021a, Fig. 5: which part of the kernel aligns with all targets, and which with its own."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLUE, GRAY, ORANGE, curve, panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_000 import depth, mnist, specialization
from featlearn_papers.paper_000.mnist import CHANNEL, PARTS

READOUT, HIDDEN = PARTS.index("readout"), PARTS.index("hidden")


def part_alignments(runs: Mapping[str, Runs], part: int, *, centered: bool = False, shallow: bool = False) -> Any:
    """(S, T, C, C): class alignments of one part of the kernel; `shallow` of the network with one hidden layer."""
    name = "centered_classes" if centered else "classes"
    return runs["depth"][name][:, 0, :, part] if shallow else runs["mnist"][f"mse/{name}"][:, :, part]


def rises(classes: Any) -> Any:
    """(S, C, C): from the first to the last moment."""
    return classes[:, -1] - classes[:, 0]


def own_less_others(classes: Any, channel: int = CHANNEL) -> Any:
    """(S,): how far the alignment of one output's kernel rises with its own target, less the mean of the others."""
    rise = rises(classes)[:, channel]
    return rise[:, channel] - numpy.delete(rise, channel, 1).mean(1)


def all_outputs(classes: Any) -> Any:
    """(S,): `own_less_others`, mean over outputs."""
    return numpy.mean([own_less_others(classes, channel) for channel in range(classes.shape[-1])], axis=0)


def score(classes: Any) -> Any:
    """(S,): `own_less_others` in standard deviations of the other targets' rises."""
    others = numpy.delete(rises(classes)[:, CHANNEL], CHANNEL, 1)
    return own_less_others(classes) / others.std(1, ddof=1)


def own_less_best(classes: Any) -> Any:
    """(S,): the rise with the own target less the largest of the others."""
    rise = rises(classes)[:, CHANNEL]
    return rise[:, CHANNEL] - numpy.delete(rise, CHANNEL, 1).max(1)


def claims(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Iterable[Claim]:
    """The caption and Sec. 6."""
    readout, hidden = (part_alignments(runs, part) for part in (READOUT, HIDDEN))

    def otherwise(values: Any, part: int) -> list[Choice]:
        """Centered alignments, and one hidden layer."""
        return [
            Choice(made=made, other=other, values=values(part_alignments(runs, part, **options)))
            for made, other, options in (
                ("raw alignments", "centered ones", {"centered": True}),
                ("two hidden layers", "one", {"shallow": True}),
            )
        ]

    yield Claim(
        id="readout-aligns",
        claim=f"K_V aligns with all targets (A): smallest rise over targets, output {CHANNEL}",
        paper="> 0",
        values=rises(readout)[:, CHANNEL].min(1),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=otherwise(lambda classes: rises(classes)[:, CHANNEL].min(1), READOUT),
    )
    yield Claim(
        id="readout-alike",
        claim="... to a similar extent (A): rise with its own target less the mean of the others, "
        "in standard deviations of the others",
        paper="similar",
        values=score(readout),
        band=(-2.0, 2.0),
        band_from="choice",
        least=Scale.LAPTOP,
        choices=otherwise(score, READOUT),
    )
    every = Choice(made=f"output {CHANNEL}", other="mean over all outputs", values=all_outputs(hidden))
    yield Claim(
        id="hidden-own",
        claim="K_W aligns preferably with its own target (B): rise with it less the mean of the others",
        paper="> 0",
        values=own_less_others(hidden),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[*otherwise(own_less_others, HIDDEN), every],
    )
    yield Claim(
        id="hidden-most",
        claim="... more than with any other (B): rise with it less the largest of the others",
        paper="> 0",
        values=own_less_best(hidden),
        band=(0.0, None),
        band_from="choice",
        least=Scale.LAPTOP,
        choices=otherwise(own_less_best, HIDDEN),
    )
    yield Claim(
        id="hidden-specialized",
        claim="Specialization arises from K_W (Sec. 6): diagonal of its specialization matrix "
        "less the rest, after training",
        paper="> 0",
        values=specialization.contrast(hidden[:, -1]),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=otherwise(lambda classes: specialization.contrast(classes[:, -1]), HIDDEN),
    )
    yield Claim(
        id="readout-equal",
        claim="K_V is the same for all outputs (Eq. 18): largest difference of its alignments between outputs",
        paper=0.0,
        values=numpy.ptp(readout, axis=2).max((1, 2)),
        band=(None, 1e-4),
        band_from="theory",
        check=True,
        why="The Gram matrix of the last features; the factor |V_c|^2 of the print is wrong, and would not change "
        "alignments.",
    )


def plot(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Any:
    """The two panels of the paper, and the same with centered alignments."""
    figure, axes = panels(2, 2, height=2.3, titles=("A", "B", "A, centered", "B, centered"))
    steps = runs["mnist"]["mse/steps"][0] + 0.5  # step 0 has a place on a logarithmic axis
    for ax, (part, centered) in zip(
        axes, [(part, centered) for centered in (False, True) for part in (READOUT, HIDDEN)], strict=True
    ):
        classes = part_alignments(runs, part, centered=centered)[:, :, CHANNEL]
        rise = classes - classes[:, :1]
        for target in range(rise.shape[2]):
            if target != CHANNEL:
                label = "each other target" if target == 0 else f"_target {target}"
                curve(ax, steps, rise[:, :, target].mean(0), label, color=GRAY, linewidth=0.6)
        others = numpy.delete(rise, CHANNEL, 2).mean(2)
        curve(ax, steps, others, "mean of the others", color=BLUE, spread="standard error")
        curve(ax, steps, rise[:, :, CHANNEL], f"$y^{CHANNEL}$", color=ORANGE, spread="standard error")
        letter = "V" if part == READOUT else "W"
        ax.set(xscale="log", xlabel="step", ylabel=f"rise of $A(K_{letter}^{{{CHANNEL},{CHANNEL}}}, y^d)$")
        ax.legend()
    return figure


FIG_5 = Reproduction(
    id="000/fig5",
    about=(
        "The kernel of one output, number 3, in two parts: that of the readout, K_V, and that of the layers below, "
        "K_W; how the alignment of each with the ten targets rises along training, in the network of Fig. 1 on MNIST. "
        "Five runs, standard errors. The formulas of the paper are for one hidden layer; the network has two here, as "
        "Shan & Bordelon 2021b, App. E.2, say of it, and K_W is the sum over both, with the network of one hidden "
        "layer (three seeds, half as many steps at laptop scale) as the other choice. Alignments are raw, as in the "
        "paper, and centered below: with one-hot targets raw ones are mostly those with a constant. Curves are less "
        "their first value."
    ),
    experiment={"mnist": mnist.MNIST, "depth": depth.DEPTH},
    plot=plot,
    claims=claims,
)
