"""Shan & Bordelon 2021b, Fig. 7.

The readout's part of the kernel turns to all targets alike, the hidden part of each output to its own.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLACK, BLUE, GRAY, GREEN, ORANGE, SKY, curve, panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_000.mnist import CHANNEL, MNIST, PARTS
from featlearn_papers.paper_001.mixture import MIXTURE, NOISY_MIXTURE, Setup


def grown(runs: Runs, name: str) -> Any:
    """(S, T, ...): since the start."""
    return runs[name] - runs[name][:, :1]


def own(matrices: Any) -> Any:
    """(..., C): the diagonal of (..., C, C), of outputs and their own targets."""
    return numpy.diagonal(matrices, axis1=-2, axis2=-1)


def others(matrices: Any) -> Any:
    """(..., C (C - 1)): the rest of (..., C, C)."""
    count = matrices.shape[-1]
    return matrices[..., ~numpy.eye(count, dtype=bool)]


def preference(matrices: Any) -> Any:
    """(...): mean growth of (..., C, C) toward the own target over that toward others."""
    return own(matrices).mean(-1) / others(matrices).mean(-1)


def spread_over_mean(values: Any) -> Any:
    """(...): standard deviation over the last axis, over its mean."""
    return values.std(-1, ddof=1) / values.mean(-1)


def readout_share(runs: Runs) -> Any:
    """(S,): growth of K_V, mean over targets, over that of the theory."""
    return grown(runs, "readout")[:, -1].mean(-1) / runs["theory/readout"][:, -1].mean(-1)


def hidden_share(runs: Runs) -> Any:
    """(S,): growth of K_W toward own targets over that of the theory."""
    return own(grown(runs, "hidden"))[:, -1].mean(-1) / own(runs["theory/hidden"])[:, -1].mean(-1)


def risen(runs: Runs, part: str, name: str = "classes") -> Any:
    """(S, C, C): how far class alignments of a part of the kernel rise on MNIST."""
    aligned = runs[f"mse/{name}"][:, :, PARTS.index(part)]
    return aligned[:, -1] - aligned[:, 0]


def claims(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Iterable[Claim]:
    """The caption, Sec. 6.2, and the assumptions of App. D."""
    yield from _mixture(setups["mixture"], runs["mixture"], runs["noisy"])
    yield from _sizes(setups["mixture"], runs["mixture"], runs["noisy"])
    yield from _assumptions(setups["mixture"], runs["mixture"], runs["noisy"])
    yield from _mnist(runs["mnist"])


def _noisy(values: Any) -> Choice:
    return Choice(made="sigma^2 as E|noise|^2", other="as the variance of each coordinate", values=values)


def _early(setup: Setup) -> int:
    """Moment at which the loss is still large."""
    return max(1, 15 // setup.stride)


def _mixture(setup: Setup, runs: Runs, noisy: Runs) -> Iterable[Claim]:
    early = _early(setup)
    readout, hidden = grown(runs, "readout"), grown(runs, "hidden")
    yield Claim(
        id="readout-alike",
        claim="K_V grows alike in the directions of all targets (A): spread over them over mean",
        paper="approximately the same",
        values=spread_over_mean(readout[:, -1]),
        band=(None, 0.1),
        band_from="choice",
        why="One tenth, for 'approximately'.",
        least=Scale.LAPTOP,
        choices=[_noisy(spread_over_mean(grown(noisy, "readout")[:, -1]))],
    )
    yield Claim(
        id="hidden-twice",
        claim="K_W of each output grows twice as fast to its own target as to others (B; Eq. 21): ratio of the growths",
        paper=2.0,
        values=preference(hidden[:, -1]),
        band=(1.6, 2.4),
        band_from="choice",
        why="A fifth to each side, for 'around twice'.",
        least=Scale.LAPTOP,
        choices=[
            _noisy(preference(grown(noisy, "hidden")[:, -1])),
            Choice(
                made="growth until the end",
                other=f"until step {early * setup.stride}",
                values=preference(hidden[:, early]),
            ),
        ],
    )
    # every output against every other target, not only on average
    least, most = own(hidden[:, -1]), numpy.where(numpy.eye(hidden.shape[-1]), -numpy.inf, hidden[:, -1]).max(-1)
    yield Claim(
        id="hidden-each",
        claim="Every output's K_W grows most to its own target (B): smallest ratio of that to the "
        "largest of the others",
        paper="> 1",
        values=(least / most).min(-1),
        band=(1.0, None),
        band_from="print",
    )


def _sizes(setup: Setup, runs: Runs, noisy: Runs) -> Iterable[Claim]:
    yield Claim(
        id="readout-size",
        claim="Beyond the print: growth of K_V, measured over theory",
        paper="not shown",
        values=readout_share(runs),
        band=(0.75, 1.25),
        band_from="choice",
        choices=[_noisy(readout_share(noisy))],
        why="The theory keeps gates fixed; a quarter to each side.",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="hidden-size",
        claim="Beyond the print: growth of K_W to own targets, measured over Eq. 20, corrected",
        paper="not shown",
        values=hidden_share(runs),
        band=(0.75, 1.25),
        band_from="choice",
        least=Scale.LAPTOP,
        choices=[_noisy(hidden_share(noisy))],
        why="The theory keeps gates fixed, and takes them as independent of the features of other classes.",
    )
    yield Claim(
        id="hidden-size-printed",
        claim="dB/dt = eta (P/C)^2 f_c (Eq. 20, as printed): growth to own targets, measured over print",
        paper=1.0,
        values=2 * setup.per_class * hidden_share(runs),
        band=(0.75, 1.25),
        band_from="print",
        known="The rate is 2 (P/C)^3 f_c: B has two gates, each a sum over the class, and the velocity of V is a sum "
        "over the class too.",
    )


def _assumptions(setup: Setup, runs: Runs, noisy: Runs) -> Iterable[Claim]:
    yield Claim(
        id="gates",
        claim="Gates are static (Sec. 6): share that flipped by the end",
        paper=0.0,
        values=runs["flips"][:, -1],
        band=(None, 0.1),
        band_from="trial",
        choices=[_noisy(noisy["flips"][:, -1])],
        why="7 to 8 % were found at this size before.",
    )
    began = max(1, 10 // setup.stride)
    yield Claim(
        id="sign",
        claim="Sum over samples of y_c f_c is positive (Sec. 6.2): smallest over outputs and steps from 10 "
        "on, over P/C",
        paper="> 0",
        values=runs["sign"][:, began:].min((1, 2)),
        band=(0.0, None),
        band_from="print",
        choices=[_noisy(noisy["sign"][:, began:].min((1, 2)))],
        why="At the start its sign is chance.",
    )


def _mnist(runs: Runs) -> Iterable[Claim]:
    readout, hidden = (risen(runs, part) for part in ("readout", "hidden"))
    centered_readout, centered_hidden = (risen(runs, part, "centered_classes") for part in ("readout", "hidden"))
    made, other = "raw alignments", "centered ones"
    yield Claim(
        id="mnist-readout",
        claim="MNIST: the alignment of K_V grows at a similar rate for all targets (C): spread "
        "over targets of the rise, over mean",
        paper="similar",
        values=spread_over_mean(readout[:, CHANNEL]),
        band=(0.0, 0.5),
        band_from="choice",
        least=Scale.LAPTOP,
        why="At most one half, for 'similar'; below zero where the mean falls.",
        choices=[Choice(made=made, other=other, values=spread_over_mean(centered_readout[:, CHANNEL]))],
    )
    ahead, centered_ahead = (
        each[:, CHANNEL, CHANNEL] - numpy.delete(each[:, CHANNEL], CHANNEL, 1).mean(1)
        for each in (hidden, centered_hidden)
    )
    yield Claim(
        id="mnist-hidden",
        claim=f"MNIST: K_W of output {CHANNEL} becomes specialized (D): rise of its alignment with "
        "its own target less that with the others",
        paper="> 0",
        values=ahead,
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[
            Choice(made=made, other=other, values=centered_ahead),
            Choice(
                made=f"output {CHANNEL}",
                other="mean over outputs",
                values=own(hidden).mean(-1) - others(hidden).mean(-1),
            ),
        ],
    )
    yield Claim(
        id="mnist-hidden-highly",
        claim="MNIST: ... highly (D): rise with its own target less twice that with the others",
        paper="> 0",
        values=hidden[:, CHANNEL, CHANNEL] - 2 * numpy.delete(hidden[:, CHANNEL], CHANNEL, 1).mean(1),
        band=(0.0, None),
        band_from="choice",
        why="Twice, as in the theory.",
        least=Scale.LAPTOP,
        choices=[
            Choice(
                made=made,
                other=other,
                values=centered_hidden[:, CHANNEL, CHANNEL]
                - 2 * numpy.delete(centered_hidden[:, CHANNEL], CHANNEL, 1).mean(1),
            ),
        ],
    )
    shared = runs["mse/classes"][:, -1, PARTS.index("readout")]
    yield Claim(
        id="mnist-readout-shared",
        claim="MNIST: K_V does not specialize (C): largest difference between outputs of its alignment with a target",
        paper=0.0,
        values=numpy.ptp(shared, axis=1).max(1),
        band=(None, 1e-5),
        band_from="theory",
        check=True,
        why="K_V is the same for all outputs.",
    )


def plot(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Any:
    """The four panels of the paper, and beside them what the theory assumes."""
    figure, axes = panels(2, 3, height=2.3, titles=("A", "B", "gates", "C", "D", "sign of y·f"))
    _draw_mixture(runs["mixture"], axes)
    _draw_mnist(runs["mnist"], axes[3:5])
    for name, label, color in (("mixture", r"$\sigma^2$ in all", ORANGE), ("noisy", r"$\sigma^2$ each", SKY)):
        found = runs[name]
        curve(axes[2], found["steps"][0], found["flips"].mean(0), label, color=color)
        curve(axes[5], found["steps"][0], found["sign"].min((0, 2)), label, color=color)
    axes[2].set(xlabel="step", ylabel="share of gates that flipped")
    axes[5].axhline(0.0, color=BLACK, linewidth=0.5, label="_zero")
    axes[5].set(xlabel="step", ylabel=r"smallest $y_c \cdot f_c\, C / P$")
    for ax in axes:
        ax.legend()
    return figure


def class_band(ax: Any, steps: Any, values: Any, label: str, color: str) -> None:
    """Mean and standard deviation of values (S, T, n) over seeds and over outputs and targets."""
    each = numpy.moveaxis(values, 1, 0).reshape(len(steps), -1)
    middle, deviation = each.mean(1), each.std(1, ddof=1)
    ax.plot(steps, middle, color=color, label=label)
    for sign, word in ((-1, "less"), (1, "plus")):
        name = f"_{label}: {word} one standard deviation"
        ax.plot(steps, middle + sign * deviation, color=color, alpha=0.4, linewidth=0.5, label=name)
    band = ax.fill_between(steps, middle - deviation, middle + deviation, color=color, alpha=0.15, linewidth=0)
    band.set_gid("standard deviation over c, d and seeds (B)")


def _draw_mixture(runs: Runs, axes: list[Any]) -> None:
    steps, readout, hidden = runs["steps"][0], grown(runs, "readout")[0], grown(runs, "hidden")
    for target in range(readout.shape[1]):
        label = "each target" if target == 0 else f"_target {target}"
        axes[0].plot(steps, readout[:, target], color=BLUE, linewidth=0.8, label=label)
    curve(axes[0], steps, runs["theory/readout"][0].mean(1), "theory", color=BLACK, style=":")
    axes[0].set(xlabel="step", ylabel=r"growth of $y_d^T K_V y_d\, C / P$")
    class_band(axes[1], steps, own(hidden), "own target", ORANGE)
    class_band(axes[1], steps, others(hidden), "others", GRAY)
    curve(axes[1], steps, own(hidden).mean((0, 2)) / 2, "half of own", color=GREEN, style="--")
    for each, label in ((own, "theory"), (others, "_theory, others")):
        curve(axes[1], steps, each(runs["theory/hidden"].mean(0)).mean(1), label, color=BLACK, style=":")
    axes[1].set(xlabel="step", ylabel=r"growth of $y_d^T K_W^{cc} y_d\, C / P$")


def _draw_mnist(runs: Runs, axes: list[Any]) -> None:
    steps = runs["mse/steps"][0] + 0.5  # step 0 has a place on a logarithmic axis
    for ax, part, letter in zip(axes, PARTS[1:], "VW", strict=True):
        rise = grown(runs, "mse/classes")[:, :, PARTS.index(part), CHANNEL]
        first = 0 if CHANNEL else 1
        for target in (*(d for d in range(rise.shape[2]) if d != CHANNEL), CHANNEL):
            own_target = target == CHANNEL
            label = f"$y_{CHANNEL}$" if own_target else "others" if target == first else f"_target {target}"
            # bands of all ten would cover each other
            curve(
                ax,
                steps,
                rise[:, :, target] if own_target else rise[:, :, target].mean(0),
                label,
                color=ORANGE if own_target else GRAY,
                spread="standard error",
                linewidth=1.5 if own_target else 0.7,
            )
        ax.axhline(0.0, color=BLACK, linewidth=0.5, label="_zero")
        ax.set(xscale="log", xlabel="step", ylabel=rf"rise of $A(K_{letter}^{{{CHANNEL}{CHANNEL}}}, y_d)$")


FIG_7 = Reproduction(
    id="001/fig7",
    about=(
        "Which part of the kernel specializes: K_V, of the readout, which all outputs share, or K_W, of the hidden "
        "weights. A and B: two-layer networks that tell ten Gaussian clouds apart, at the paper's sizes (N = 1000, "
        "M = 2000, P = 500), for 150 steps, which the paper does not give. Its noise of variance 0.01 may be that of "
        "the whole vector or of each of 1000 coordinates, where it is three times as long as the centers; the first is "
        "what the theory of small noise needs, and is judged; the second is run beside it. Dotted are the corrected "
        "rates of the theory along the measured outputs. C and D: MNIST, the experiment of Shan & Bordelon 2021a, "
        "Fig. 5, with two hidden layers, whose parts are K_W together. The right column is beyond the print and shows "
        "what the theory assumes: gates that stay, and outputs of the right sign."
    ),
    experiment={"mixture": MIXTURE, "noisy": NOISY_MIXTURE, "mnist": MNIST},
    plot=plot,
    claims=claims,
)
