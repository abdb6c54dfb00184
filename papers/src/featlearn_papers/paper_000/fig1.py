"""Shan & Bordelon 2021a, Fig. 1.

A network learns faster than its first kernel, because its kernel aligns with the task.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy

from featlearn_papers.frame.claims import Claim
from featlearn_papers.frame.drawing import BLACK, BLUE, GRAY, GREEN, ORANGE, PINK, SKY, curve, panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_000 import acceleration
from featlearn_papers.paper_000.mnist import CHANNEL, MNIST, Setup


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """See `acceleration`."""
    return acceleration.claims(setup.window, CHANNEL, runs)


def plot(setup: Setup, runs: Runs) -> Any:
    """The six panels of the paper, and six beyond the print."""
    titles = (
        "A",
        "B",
        "C",
        "D",
        "E",
        "F",
        "local exponent",
        "the late kernel",
        "held-out kernel",
        "cross-entropy",
        "its alignment",
        "interference",
    )
    figure, axes = panels(4, 3, height=2.0, titles=titles)
    steps = runs["mse/steps"][0] + 0.5  # step 0 has a place on a logarithmic axis
    _draw_paper(setup, runs, steps, axes)
    _draw_beyond(runs, steps, axes[6:])
    for ax in (*axes[:3], *axes[5:]):
        ax.set(xscale="log", xlabel="step")
    for ax in axes:
        ax.legend()
    return figure


deviating = partial(curve, spread="standard deviation")
"""mean and standard deviation over seeds, as in the paper"""


def _draw_paper(setup: Setup, runs: Runs, steps: Any, axes: list[Any]) -> None:
    for name, label, color, style in (
        ("loss", "NN", ORANGE, "-"),
        ("kgd", "KGD", BLUE, "-"),
        ("akgd", "aKGD", GREEN, "-"),
        ("mean_kgd", "dotted: mean kernel", BLUE, ":"),
        ("mean_akgd", "_aKGD, mean kernel", GREEN, ":"),
    ):
        deviating(
            axes[0],
            steps,
            runs[f"mse/{name}"] if style == "-" else runs[f"mse/{name}"].mean(0),
            label,
            color=color,
            style=style,
        )
    axes[0].set(yscale="log", ylabel="loss")
    deviating(axes[1], steps, runs["mse/alignment"], "NN", color=ORANGE)
    deviating(axes[1], steps, numpy.full_like(steps, runs["mse/alignment"][:, 0].mean()), "KGD, aKGD", color=BLUE)
    deviating(axes[1], steps, runs["mse/centered_alignment"], "NN, centered", color=ORANGE, style="--")
    axes[1].set_ylabel("kernel-task alignment")
    deviating(axes[2], steps, runs["mse/norm"], r"$|K|_F$", color=ORANGE)
    axes[2].set_ylabel("norm of the kernel")
    shown = numpy.unique(numpy.geomspace(1, setup.samples, 60).astype(int))
    for ax, name, label in ((axes[3], "eigenvalues", r"$\lambda_k$"), (axes[4], "task_power", r"$(u_k \cdot y)^2$")):
        fits = acceleration.exponents(setup.window, runs, f"mse/{name}").mean(0)
        letter = "b" if name == "eigenvalues" else "a"
        for end, color in enumerate((BLUE, ORANGE)):
            values = numpy.maximum(runs[f"mse/{name}"][:, -end][:, shown - 1], 1e-12)
            deviating(ax, shown, values, f"{('before', 'after')[end]}, ${letter}$ = {fits[end]:.2f}", color=color)
        ax.set(xscale="log", yscale="log", xlabel="k", ylabel=label)
    channel = runs["mse/classes"][:, :, 0, CHANNEL]
    for target in range(channel.shape[2]):
        own = target == CHANNEL
        values = channel[:, :, target]
        label = f"target {target}" if own else "other targets" if target == 0 else f"_target {target}"
        deviating(
            axes[5],
            steps,
            values if own else values.mean(0),
            label,
            color=ORANGE if own else GRAY,
            linewidth=1.5 if own else 0.7,
        )
    axes[5].set_ylabel(f"alignment of $K^{{{CHANNEL},{CHANNEL}}}$")


def _draw_beyond(runs: Runs, steps: Any, axes: list[Any]) -> None:
    for name, label, color in (("loss", "NN", ORANGE), ("kgd", "KGD", BLUE), ("akgd", "aKGD", GREEN)):
        deviating(axes[0], steps[1:], acceleration.slopes(runs, f"mse/{name}")[:, 1:], label, color=color)
    axes[0].set_ylabel("d ln loss / d ln step")
    deviating(axes[1], steps[:-1], runs["mse/late_error"], "last kernel", color=ORANGE)
    deviating(axes[1], steps[:-1], runs["mse/early_error"], "first kernel", color=BLUE)
    axes[1].axhline(acceleration.ENOUGH, color=BLACK, linestyle=":", label="_enough")
    axes[1].set(yscale="log", ylabel="error in ln final loss")
    deviating(axes[2], steps, runs["mse/test/alignment"], "held out", color=PINK)
    deviating(axes[2], steps, runs["mse/alignment"], "training", color=ORANGE)
    axes[2].set_ylabel("kernel-task alignment")
    deviating(axes[3], steps, runs["ce/cross_entropy"], "NN", color=SKY)
    deviating(axes[3], steps, runs["ce/kgd"], "KGD", color=BLUE)
    axes[3].set(yscale="log", ylabel="cross-entropy")
    for name, label, color in (("mse", "squared error", ORANGE), ("ce", "cross-entropy", SKY)):
        deviating(axes[4], steps, runs[f"{name}/alignment"], label, color=color)
        deviating(axes[5], steps, runs[f"{name}/interference"], label, color=color)
    deviating(axes[4], steps, runs["ce/test/alignment"], "cross-entropy, held out", color=SKY, style="--")
    axes[4].set_ylabel("kernel-task alignment")
    axes[5].set_ylabel("share between outputs")


FIG_1 = Reproduction(
    id="000/fig1",
    about=(
        "A network with two hidden layers of 500 ReLUs on MNIST beside gradient descent with its first kernel frozen "
        "(KGD), and the same at the rate of the last kernel's norm (aKGD). Sizes, learning rate and loss are those "
        "that Shan & Bordelon 2021b, App. E.2, give for the same network; the paper says neither how long it trains "
        "nor how weights are parametrized: here in the NTK way with variances 1, 2, 1, without which the rate of 20 "
        "diverges, for 10000 steps (2000, and 200 samples, at laptop scale), pixels from 0 to 1. Frozen kernels start "
        "from the network's own outputs and join all pairs of outputs; dotted, one mean kernel for all outputs, which "
        "leaves the interference of a finite network out. The last six panels are beyond the print: the local exponent "
        "of the loss, the moment from which the last kernel predicts the rest, the kernel of held-out samples, and "
        "cross-entropy from the same weights at the same rate of outputs, with the share of the kernel that lies "
        "between different outputs."
    ),
    experiment=MNIST,
    plot=plot,
    claims=claims,
)
