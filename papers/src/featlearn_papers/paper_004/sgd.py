"""Ours: does the noise of minibatches lead out of a poor start? Xu & Ziyin 2024, end of Sec. 3.2, leave it open."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLACK, COLORS, curve, panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_004.noise import IMAGES, LINE, METHODS, STARTS, ImageSetup, LineSetup

SMALL, LARGE, PARALLEL, ANTIPARALLEL, SADDLE = range(len(STARTS))
FULL, SINGLE = range(len(METHODS))


def claims(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Iterable[Claim]:
    """What the paper says of SGD, and what the exact solution says of both."""
    yield from alignments(setups["line"], runs["line"])
    yield from escapes(setups["line"], runs["line"])
    yield from generalization(setups["line"], runs["line"])
    yield from images(setups["images"], runs["images"])


def alignments(setup: LineSetup, runs: Runs) -> Iterator[Claim]:
    """Where the layers end."""
    zeta = runs["alignment"][:, :, :SADDLE]
    yield Claim(
        id="theory",
        claim="Full-batch descent ends where the exact solution does: largest distance of zeta, over starts",
        paper="equal",
        values=abs(zeta[:, FULL, :, -1] - runs["theory"][:, :, -1]).max(1),
        band=(None, 0.02),
        band_from="theory",
        why="The solution is that of gradient flow; steps add terms of the order of the rate.",
    )
    yield Claim(
        id="aligned",
        claim="SGD converges to aligned layers from every start: lowest zeta at the end",
        paper=1.0,
        values=zeta[:, SINGLE, :, -1].min(1),
        band=(0.9, None),
        band_from="print",
        least=Scale.LAPTOP,
        why="A step multiplies p by 1 - c and q by 1 + c: p q falls by 1 - c^2, so that q dies out while p keeps the "
        "output at the target.",
        choices=[
            Choice(
                made=f"after {setup.steps} steps",
                other="half of them",
                values=zeta[:, SINGLE, :, halfway(setup, runs)].min(1),
            )
        ],
    )
    ends = numpy.ptp(zeta[:, :, :, -1], axis=2)
    yield Claim(
        id="depends",
        claim="With full batches alignment is a strong function of the start: range of zeta over starts",
        paper="of order 1",
        values=ends[:, FULL],
        band=(0.5, None),
        band_from="choice",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="independent",
        claim="With SGD it is quite independent of the start: range of zeta over starts",
        paper="small",
        values=ends[:, SINGLE],
        band=(None, 0.1),
        band_from="choice",
        least=Scale.LAPTOP,
    )
    spent = runs["spent"][:, SINGLE, LARGE]
    yield Claim(
        id="law",
        claim="p q falls as exp(-sum of c^2) along SGD from large weights: measured exponent relative to the sum",
        paper=None,
        values=-numpy.log(runs["product"][:, SINGLE, LARGE, -1]) / spent[:, -1],
        band=(0.95, 1.05),
        band_from="theory",
        check=True,
        why="The mean of log(1 - c^2) for small c: the algebra of one step.",
    )
    rate, half = 4 * setup.lr**2 / setup.width * setup.noise**2, halfway(setup, runs)
    later = (spent[:, -1] - spent[:, half]) / (setup.steps - runs["steps"][0, half])
    yield Claim(
        id="rate",
        claim="Its rate is that of the noise in the targets, 4 rate^2 noise^2 / width: mean c^2 in the last "
        "half of the steps relative to it",
        paper=None,
        values=later / rate,
        band=(0.5, 2.0),
        band_from="theory",
        least=Scale.LAPTOP,
        why="At the solution c = 2 rate a error / sqrt(width), whose square has this mean for independent a and error "
        "of many samples; with 100 of them it differs by seed, and the slope itself fluctuates.",
    )


def escapes(setup: LineSetup, runs: Runs) -> Iterator[Claim]:
    """Noise that multiplies does not lead out of the saddle."""
    yield Claim(
        id="saddle",
        claim="From w = -u exactly, SGD ends in the saddle as descent does: largest zeta",
        paper=None,
        values=numpy.nanmax(runs["alignment"][:, :, SADDLE], axis=(1, 2)),
        band=(None, -1 + 1e-9),
        band_from="theory",
        check=True,
        why="p = 0 and every step multiplies p: no noise of this kind leads away. In the end weights underflow to 0.",
    )
    full, single = (
        numpy.array([arrival(runs["steps"][0], row) for row in runs["loss"][:, method, ANTIPARALLEL]])
        for method in (FULL, SINGLE)
    )
    yield Claim(
        id="no-faster",
        claim="Nor does it lead out faster from near the saddle: first step at which the loss is "
        "within 1 of its least, SGD relative to full batches, from nearly antiparallel weights",
        paper=None,
        values=single / full,
        band=(0.5, 2.0),
        band_from="choice",
        least=Scale.LAPTOP,
        why="log p grows at the mean of log(1 - c), which noise makes smaller.",
    )


def halfway(setup: LineSetup, runs: Runs) -> int:
    """The first moment after half of the steps."""
    return int(numpy.argmax(runs["steps"][0] >= setup.steps / 2))


def arrival(steps: Array, loss: Array) -> float:
    """The first moment at which the loss is within 1 of its least; in the saddle it is about 4 above."""
    return float(steps[int(numpy.argmax(loss < loss.min() + 1))])


def generalization(setup: LineSetup, runs: Runs) -> Iterator[Claim]:
    """Output in directions without data, which should be zero."""
    off = runs["off"][:, :, :SADDLE, -1]
    gain = off[:, FULL] / off[:, SINGLE]
    yield Claim(
        id="poor-start",
        claim="From large weights (kernel phase) SGD generalizes better: mean squared output in "
        "directions without data, full batch relative to SGD",
        paper="better",
        values=gain[:, LARGE],
        band=(2.0, None),
        band_from="choice",
        least=Scale.LAPTOP,
        why="W does not change in these directions, so the output goes as |u|, which aligned layers need less of.",
    )
    yield Claim(
        id="most-significant",
        claim="The difference is most significant from a poor start: that ratio is larger from "
        "large weights than from small ones",
        paper="yes",
        values=gain[:, LARGE] > gain[:, SMALL],
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[
            Choice(made="large weights", other=f"nearly {STARTS[i]} ones", values=gain[:, i] > gain[:, SMALL])
            for i in (PARALLEL, ANTIPARALLEL)
        ],
    )


def images(setup: ImageSetup, runs: Runs) -> Iterator[Claim]:
    """The same question for ReLU networks on digits, whose samples can all be fitted."""
    gain = runs["test"][:, SINGLE] - runs["test"][:, FULL]
    least = setup.exponents.index(0.0)
    yield Claim(
        id="images-poor",
        claim=f"MNIST: SGD tests better than full batches from the poorest start (c = "
        f"{setup.exponents[-1]:g}, kernel phase): difference of accuracies",
        paper="better",
        values=gain[:, -1],
        band=(0.005, None),
        band_from="choice",
        least=Scale.LAPTOP,
        why="Equal rates and numbers of steps, so that noise is the only difference.",
    )
    yield Claim(
        id="images-most",
        claim="MNIST: this difference is larger from the poorest start than from c = 0",
        paper="yes",
        values=gain[:, -1] > gain[:, least],
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
    )
    ratio = runs["alignment"][:, SINGLE, -1] / runs["alignment"][:, FULL, -1]
    yield Claim(
        id="images-aligned",
        claim="MNIST: SGD aligns the layers from the poorest start: zeta at the end relative to full batches",
        paper="above 1",
        values=ratio,
        band=(1.1, None),
        band_from="choice",
        least=Scale.LAPTOP,
    )


def plot(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Any:
    """Alignment and output without data along training on a line; what SGD gains on images."""
    figure, axes = panels(1, 3, height=2.7, titles=("line: alignment", "line: no data", "MNIST"))
    line, shown = runs["line"], slice(1, None, 2)  # half of the moments are enough to see
    steps = line["steps"][0][shown]
    for start, name in enumerate(STARTS):
        for method, style in ((FULL, "--"), (SINGLE, "-")):
            label = name if method == SINGLE else f"_{name}, {METHODS[method]}"
            curve(axes[0], steps, line["alignment"][:, method, start, shown], label, color=COLORS[start], style=style)
            if start != SADDLE:
                values = line["off"][:, method, start, shown]
                curve(axes[1], steps, values, label, color=COLORS[start], style=style)
    for start, values in enumerate(line["theory"].mean(0)):
        label = "exact solution" if start == 0 else f"_exact solution, {STARTS[start]}"
        curve(axes[0], steps, values[shown], label, color=BLACK, style=":")
    gain = runs["images"]["test"][:, SINGLE] - runs["images"]["test"][:, FULL]
    curve(axes[2], setups["images"].exponents, gain, "SGD less full batch", style="o-")
    axes[2].axhline(0, color="0.7", linewidth=0.8, linestyle="--", label="_no difference")
    axes[0].set(xscale="log", xlabel="step (dashed: full batch)", ylabel=r"$\zeta$")
    axes[1].set(
        xscale="log", yscale="log", xlabel="step (dashed: full batch)", ylabel="mean squared output", ylim=(0.01, 10)
    )
    axes[2].set(xlabel="c (kernel phase: c > 0)", ylabel="gain in test accuracy", xticks=setups["images"].exponents)
    axes[0].legend()
    axes[2].legend()
    return figure


SGD = Reproduction(
    id="004/sgd",
    about=(
        "Xu & Ziyin 2024 note that SGD aligns the layers of their model whatever the start, and expect the "
        "difference between SGD and full-batch descent to be largest from poor starts, without a test. Here both "
        "train their model (inputs on a line, noisy targets, f = u.Wx / sqrt(width)) from small and from large "
        "independent weights, from nearly parallel and antiparallel layers, and from the saddle w = -u, at one rate "
        "and for the same number of steps; and two-layer ReLU networks on 500 images of MNIST from the starts of "
        "Fig. 5. Whether a network generalizes is measured in directions without data, where the right output is "
        "zero. The rate was lowered from 0.05 to 0.02 after a trial in which steps of full batches were 0.02 from "
        "the exact solution."
    ),
    experiment={"line": LINE, "images": IMAGES},
    plot=plot,
    claims=claims,
)
