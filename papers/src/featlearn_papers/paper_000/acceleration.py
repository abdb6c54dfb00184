"""Claims of Shan & Bordelon 2021a, Fig. 1: how much faster a network learns than its first kernel, and why.

Curves have seeds first, then moments; see `mnist.measure` for their names.
"""

from collections.abc import Iterable
from typing import Any

import numpy
import torch

import featlearn as fl
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale

ENOUGH = 0.1
"""a kernel predicts the rest of training where it ends within this distance, in the logarithm of the loss"""

Window = tuple[int, int]
"""first and last k of a power law"""


def risen(runs: Runs, name: str) -> Any:
    """(S, ...): from the first to the last moment."""
    return runs[name][:, -1] - runs[name][:, 0]


def channel_rise(runs: Runs, name: str, channel: int) -> Any:
    """(S, C): how far the alignment of one output's kernel with each target rises, from class alignments."""
    return risen(runs, name)[:, 0, channel]


def final_ratio(runs: Runs, above: str, below: str) -> Any:
    """(S,): of two curves at the last moment."""
    return runs[above][:, -1] / runs[below][:, -1]


def end_over_start(runs: Runs, name: str) -> Any:
    """(S,)"""
    return runs[name][:, -1] / runs[name][:, 0]


def late_rise(runs: Runs, name: str) -> Any:
    """(S,): the share of a curve's change that comes in the second half of the steps."""
    steps = runs["mse/steps"][0]
    half = numpy.array([numpy.interp(steps[-1] / 2, steps, values) for values in runs[name]])
    return (runs[name][:, -1] - half) / risen(runs, name)


def largest_fall(runs: Runs, name: str) -> Any:
    """(S,): the largest fall below an earlier value, as a share of it."""
    highest = numpy.maximum.accumulate(runs[name], axis=1)
    return (1 - runs[name] / highest).max(1)


def exponents(window: Window, runs: Runs, name: str, after: int = -1) -> Any:
    """(S, 2): of a spectrum's power law, before training and at a later moment, the last unless said otherwise."""
    laws = [[fl.metrics.power_law(torch.as_tensor(seed[end]), *window) for end in (0, after)] for seed in runs[name]]
    return numpy.array([[law.exponent for law in seed] for seed in laws])


def exponent_change(window: Window, runs: Runs, name: str, share: float = 1.0) -> Any:
    """(S,): after less before, where training ends at this share of the steps."""
    steps = runs["mse/steps"][0]
    before, after = exponents(window, runs, name, int(abs(steps - share * steps[-1]).argmin())).T
    return after - before


def straightness(window: Window, runs: Runs, name: str) -> Any:
    """(S,): R^2 of a spectrum's power law, of the worse of before and after."""
    first, last = window
    logs, k = numpy.log(runs[name][:, [0, -1], first - 1 : last]), numpy.log(numpy.arange(first, last + 1))
    return numpy.array([min(numpy.corrcoef(end, k)[0, 1] ** 2 for end in seed) for seed in logs])


def slopes(runs: Runs, name: str) -> Any:
    """(S, T): local exponent of a loss, nan at step 0."""
    steps = torch.as_tensor(runs["mse/steps"][0]).double()
    return numpy.stack([fl.metrics.log_slope(steps, torch.as_tensor(loss)).numpy() for loss in runs[name]])


def turned(runs: Runs) -> Any:
    """(S,): index of the moment from which nine tenths of the alignment's change are done."""
    alignment = runs["mse/alignment"]
    share = (alignment - alignment[:, :1]) / risen(runs, "mse/alignment")[:, None]
    return numpy.array([len(one) - int((one[::-1] < 0.9).argmax()) for one in share])


def late_exponents(runs: Runs) -> Any:
    """(S,): spread over mean of the local exponent, in the last tenfold of the steps."""
    steps = runs["mse/steps"][0]
    late = slopes(runs, "mse/loss")[:, steps >= steps[-1] / 10]
    return abs(late.std(1) / late.mean(1))


def settled(runs: Runs) -> Any:
    """(S,): the step from which the last kernel predicts the rest, as a share of all steps; 1 where it never does."""
    steps = runs["mse/steps"][0]
    wrong = runs["mse/late_error"] >= ENOUGH
    last = [len(one) - int(one[::-1].argmax()) if one.any() else 0 for one in wrong]
    return steps[numpy.array(last)] / steps[-1]


def claims(window: Window, channel: int, runs: Runs) -> Iterable[Claim]:
    """The caption, what the abstract says of the two phases, and beyond the print; `channel` is the output of F."""
    yield from _speed(runs)
    yield from _kernel(window, runs)
    yield from _classes(channel, runs)
    yield from _beyond(runs)


def _speed(runs: Runs) -> Iterable[Claim]:
    yield Claim(
        id="network-faster",
        claim="The network's loss ends below that of its first kernel, rescaled (A): their ratio",
        paper="< 1",
        values=final_ratio(runs, "mse/loss", "mse/akgd"),
        band=(None, 1.0),
        band_from="print",
        least=Scale.LAPTOP,
        why="Frozen kernels between all outputs, from the network's own start. How long the paper trains is not said. "
        "With few samples the kernel of so wide a network grows more than it turns, and a frozen kernel that has the "
        "last norm from the start is ahead. 000/starts tries what the paper leaves open: with 1000 samples and 20000 "
        "steps the network ends 4 % behind from this start, and 15 times ahead from a readout ten times smaller.",
    )
    yield Claim(
        id="network-faster-than-first",
        claim="The network's loss ends below that of its first kernel (A): their ratio",
        paper="< 1",
        values=final_ratio(runs, "mse/loss", "mse/kgd"),
        band=(None, 1.0),
        band_from="print",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="rescaled-faster",
        claim="The rescaled first kernel is faster than the first kernel (A): ratio at the end",
        paper="< 1",
        values=final_ratio(runs, "mse/akgd", "mse/kgd"),
        band=(None, 1.0),
        band_from="print",
        least=Scale.LAPTOP,
        why="The rate is multiplied by the norm of the last kernel over that of the first.",
    )
    yield Claim(
        id="network-faster-mean",
        claim="The same with one kernel, the mean, for all outputs (A): network over aKGD",
        paper="< 1",
        values=final_ratio(runs, "mse/loss", "mse/mean_akgd"),
        band=(None, 1.0),
        band_from="print",
        least=Scale.LAPTOP,
        why="The mean leaves out that outputs of a finite network interfere, and so learns too fast.",
    )
    yield Claim(
        id="faster-than-power-law",
        claim="While the kernel turns, the loss falls faster than a power law (abstract): its exponent grows in size",
        paper="yes",
        values=[
            numpy.polyfit(range(count), slope[1 : 1 + count], 1)[0] < 0
            for slope, count in zip(slopes(runs, "mse/loss"), numpy.maximum(turned(runs) - 1, 2), strict=True)
        ],
        band=(1, None),
        band_from="choice",
        least=Scale.LAPTOP,
        check=True,
        why="Slope of the local exponent over the moments, spaced evenly in the logarithm of the step, "
        "until the alignment has nine tenths of its change. Frozen kernels do the same.",
    )
    yield Claim(
        id="power-law-late",
        claim="Then the loss falls as a power law (abstract): spread over mean of its local exponent",
        paper="constant",
        values=late_exponents(runs),
        band=(None, 0.25),
        band_from="choice",
        least=Scale.LAPTOP,
        why="Over the last tenfold of the steps. Kernels of finite size end in an exponential.",
    )
    yield Claim(
        id="late-kernel",
        claim="After an early time outputs evolve with the final kernel (Sec. 1): that time as a share of all steps",
        paper="early",
        values=settled(runs),
        band=(None, 0.5),
        band_from="choice",
        least=Scale.LAPTOP,
        why=f"Started from there or later, the last kernel ends with the network's loss up to {ENOUGH:.0%}. In ours "
        "its norm grows until the end.",
    )


def _fewer_steps(window: Window, runs: Runs, name: str) -> list[Choice]:
    """The paper does not say how long it trains, and the exponents still move at the end."""
    made = f"exponents after all {runs['mse/steps'][0, -1]:.0f} steps"
    return [
        Choice(made=made, other=words, values=exponent_change(window, runs, name, share))
        for share, words in ((0.3, "a third of the steps"), (0.1, "a tenth of the steps"))
    ]


def _other_window(window: Window, runs: Runs, name: str) -> Choice:
    first, last = window
    other = first // 2, last // 2
    return Choice(
        made=f"a window of k = {first} to {last}",
        other=f"k = {other[0]} to {other[1]}",
        values=exponent_change(other, runs, name),
    )


def _kernel(window: Window, runs: Runs) -> Iterable[Claim]:
    yield Claim(
        id="alignment-rises",
        claim="Kernel-task alignment increases (B): end over start",
        paper="> 1",
        values=end_over_start(runs, "mse/alignment"),
        band=(1.0, None),
        band_from="print",
        why="The task kernel is Y Y^T and the kernel the mean over outputs: the paper does not define it for several.",
    )
    yield Claim(
        id="asymptote",
        claim="It reaches an asymptote (B): share of its change in the second half of the steps",
        paper="plateau",
        values=late_rise(runs, "mse/alignment"),
        band=(None, 0.1),
        band_from="choice",
        least=Scale.LAPTOP,
        why="How long the paper trains is not said. At the end of our steps the loss still falls, and the kernel turns "
        "with it.",
    )
    yield Claim(
        id="norm-rises",
        claim="The norm of the kernel increases (C): end over start",
        paper="> 1",
        values=end_over_start(runs, "mse/norm"),
        band=(1.0, None),
        band_from="print",
    )
    yield Claim(
        id="norm-falls-too",
        claim="... non-monotonically (C): largest fall on the way, as a share",
        paper="> 0",
        values=largest_fall(runs, "mse/norm"),
        band=(0.01, None),
        band_from="choice",
        why="One per cent is well above rounding.",
    )
    yield Claim(
        id="eigenvalues-power-law",
        claim="Eigenvalues fall as a power law before and after (D): R^2 of the worse",
        paper="line",
        values=straightness(window, runs, "mse/eigenvalues"),
        band=(0.95, None),
        band_from="choice",
        why="Window k = {} to {}; the paper gives none.".format(*window),
    )
    yield Claim(
        id="eigenvalue-exponent",
        claim="Their exponent b is smaller after training (D): after less before",
        paper="< 0",
        values=exponent_change(window, runs, "mse/eigenvalues"),
        band=(None, 0.0),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[
            *_fewer_steps(window, runs, "mse/eigenvalues"),
            _other_window(window, runs, "mse/eigenvalues"),
        ],
    )
    yield Claim(
        id="task-exponent",
        claim="The exponent a of the task's power is larger after training (E): after less before",
        paper="> 0",
        values=exponent_change(window, runs, "mse/task_power"),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[
            *_fewer_steps(window, runs, "mse/task_power"),
            _other_window(window, runs, "mse/task_power"),
        ],
    )


def _classes(channel: int, runs: Runs) -> Iterable[Claim]:
    rise, centered = (channel_rise(runs, name, channel) for name in ("mse/classes", "mse/centered_classes"))
    others, centered_others = (numpy.delete(each, channel, 1).mean(1) for each in (rise, centered))
    yield Claim(
        id="own-class",
        claim=f"The kernel of output {channel} turns to its own target more than to others (F): rise "
        "of its alignment less that with the others",
        paper="> 0",
        values=rise[:, channel] - others,
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        why="Raw alignments, as in the paper.",
        choices=[Choice(made="raw alignments", other="centered ones", values=centered[:, channel] - centered_others)],
    )
    yield Claim(
        id="own-class-only",
        claim="... and not to others (F): mean rise with the others less half of its own",
        paper="< 0",
        values=others - rise[:, channel] / 2,
        band=(None, 0.0),
        band_from="choice",
        least=Scale.LAPTOP,
        why="At most half, for 'not for others'.",
    )
    yield Claim(
        id="own-class-centered",
        claim="Kernel and targets centered: rise with its own target less that with the others",
        paper="> 0",
        values=centered[:, channel] - centered_others,
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        why="Raw alignments with one-hot targets are mostly those with a constant.",
    )


def _beyond(runs: Runs) -> Iterable[Claim]:
    yield Claim(
        id="test-kernel",
        claim="Beyond the print: the kernel of held-out samples turns too, alignment end over start",
        paper="not shown",
        values=end_over_start(runs, "mse/test/alignment"),
        band=(1.0, None),
        band_from="choice",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="cross-entropy-aligns",
        claim="Beyond the print: cross-entropy turns the kernel to the task too, alignment end over start",
        paper="not shown",
        values=end_over_start(runs, "ce/alignment"),
        band=(1.0, None),
        band_from="choice",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="cross-entropy-faster",
        claim="Beyond the print: on cross-entropy the network is faster than its first kernel, ratio at the end",
        paper="not shown",
        values=final_ratio(runs, "ce/cross_entropy", "ce/kgd"),
        band=(None, 1.0),
        band_from="choice",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="interference",
        claim="Classes interfere more under cross-entropy (expected in Limitations): share of blocks between outputs "
        "at the end, over that under squared error",
        paper="> 1",
        values=final_ratio(runs, "ce/interference", "mse/interference"),
        band=(1.0, None),
        band_from="print",
        least=Scale.LAPTOP,
    )
