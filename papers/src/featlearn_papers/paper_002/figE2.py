"""Atanasov et al. 2022, Fig. E.2.

ReLU networks of several depths on whitened images of two classes: silent alignment, and regression with final kernels.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from featlearn.errors import InputValueError
from featlearn.models import MLP
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import COLORS, GRAY, curve, panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.silence import TwoClasses, agreements, first, train_and_measure, two_classes


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Two classes of CIFAR-10, y = -1 and +1, whitened: X^T X / P is a projector; loss 1/(2P) sum (f - y)^2."""

    data: str = "cifar10"
    samples: int = 600
    test_samples: int = 1400
    pooling: int = 2
    """images are averaged over squares of so many pixels"""
    depths: tuple[int, ...] = (2, 3, 4)
    """L, weight matrices"""
    times: tuple[float, ...] = (14.0, 45.0, 320.0)
    """lr times steps, for each depth, at sigma"""
    width: int = 100
    sigma: float = 0.1
    """of the curves: weights are N(0, sigma^2 / fan_in)"""
    larger: float = 0.2
    """another, for the power of the half time"""
    lr: float = 0.1
    moments: int = 60
    """at which kernels are measured"""


ALL_DIRECTIONS = 1e-9
"""Cut of singular values that keeps every direction: the smallest of 3000 images is 5e-6 of the largest."""


def task(setup: Setup, context: Context) -> TwoClasses:
    """Return orthonormal inputs, in coordinates of the span of the training points.

    Whitening drops all other directions of test points.
    """
    images = two_classes(
        context,
        setup.data,
        setup.samples,
        setup.test_samples,
        pooling=setup.pooling,
        cut=ALL_DIRECTIONS,
        batches=None,
    )
    _, sizes, directions = torch.linalg.svd(images.exact, full_matrices=False)
    span = directions[sizes > 1e-6 * sizes[0]].T.to(images.x.device)
    if span.shape[1] != setup.samples:
        raise InputValueError(
            f"{setup.samples} images of {setup.data} span {span.shape[1]} directions, expected as many as images; take "
            "fewer images or less pooling"
        )
    return replace(
        images,
        x=(images.x.double() @ span).float(),
        test_x=(images.test_x.double() @ span).float(),
        exact=images.exact @ span.cpu(),
    )


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Curves, predictions and errors of each depth, "2/loss" ..., and half times at both sigmas (depths, 2)."""
    given = task(setup, context)
    found: dict[str, Numbers] = {"inputs": given.x.shape[1]}
    halves = []
    for depth, time in zip(setup.depths, setup.times, strict=True):
        model = network(setup, context, given, depth, setup.sigma)
        optimizer = torch.optim.SGD(model.parameters(), lr=setup.lr)
        steps = round(time / setup.lr)
        path = train_and_measure(
            model,
            given,
            optimizer,
            context,
            steps=steps,
            stride=max(1, steps // setup.moments),
            dtype=torch.float64,
            along=torch.float64,
        )
        predictions = path.predictions(given.y)[:3]
        errors, correlations = agreements(predictions)
        numbers = {**path.curves(), "predictions": predictions, "error": errors, "correlation": correlations}
        found |= {f"{depth}/{name}": value.cpu() for name, value in numbers.items()}
        half = setup.lr * first(path.steps, path.loss, 0.5, "initial")
        halves.append([half, half_time(setup, context, given, depth, 3 * half)])
        context.say(f"L={depth} half times {halves[-1]} errors {errors.tolist()}")
    return found | {"half_time": halves}


def network(setup: Setup, context: Context, given: TwoClasses, depth: int, sigma: float) -> MLP:
    """The same draw for every sigma."""
    return MLP(
        given.x.shape[1],
        None,
        width=setup.width,
        hidden_layers=depth - 1,
        weight_variance=sigma**2,
        generator=context.generator(depth),
    ).to(context.device)


def half_time(setup: Setup, context: Context, given: TwoClasses, depth: int, limit: float) -> float:
    """When the network with larger weights has half its loss; nan if not within the limit."""
    model = network(setup, context, given, depth, setup.larger)
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.lr)
    losses: list[float] = []
    while len(losses) < limit / setup.lr:
        loss = (model(given.x) - given.y).square().mean()
        losses.append(float(loss.detach()))
        if losses[-1] < losses[0] / 2:
            return setup.lr * first(numpy.arange(len(losses)), numpy.array(losses), 0.5, "initial")
        optimizer.zero_grad()
        (loss / 2).backward()
        optimizer.step()
    return float("nan")


def grown(runs: Runs, depth: int) -> Array:
    """(S,): the step at which the norm of the kernel is a tenth of its last, the dashed lines of the paper."""
    pairs = zip(runs[f"{depth}/steps"], runs[f"{depth}/norm"], strict=True)
    return numpy.array([first(steps, norm, 0.1, "final") for steps, norm in pairs])


def finished(runs: Runs, depth: int, alignment: str) -> Array:
    """(S,): an alignment when the norm is a tenth of its last, as a share of its end."""
    rows = zip(grown(runs, depth), runs[f"{depth}/steps"], runs[f"{depth}/{alignment}"], strict=True)
    return numpy.array([numpy.interp(when, steps, values) / values[-1] for when, steps, values in rows])


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The sentences of the caption, at each depth."""
    half = runs["half_time"]
    powers = numpy.log(half[:, :, 0] / half[:, :, 1]) / numpy.log(setup.sigma / setup.larger)
    for i, depth in enumerate(setup.depths):
        if depth > 2:
            yield Claim(
                id=f"power-{depth}",
                claim=f"The half time scales as sigma^(2-L), as in linear networks (a): exponent for L = {depth}",
                paper=2.0 - depth,
                values=powers[:, i],
                band=(1.8 - depth, 2.2 - depth),
                band_from="choice",
                why=f"From sigma = {setup.larger:g} and {setup.sigma:g}.",
                least=Scale.LAPTOP,
            )
    for depth in setup.depths:
        yield Claim(
            id=f"silent-{depth}",
            claim=f"The kernel aligns early (b): alignment when it has grown to a tenth of its "
            f"last size, as a share of its end, L = {depth}",
            paper="about 1",
            values=finished(runs, depth, "alignment"),
            band=(0.9, 1.1),
            band_from="choice",
            least=Scale.LAPTOP,
            choices=[
                Choice(
                    made="the raw alignment, as printed",
                    other="the centered one",
                    values=finished(runs, depth, "centered_alignment"),
                ),
            ],
        )
    for depth in setup.depths:
        errors, correlations = runs[f"{depth}/error"], runs[f"{depth}/correlation"]
        yield Claim(
            id=f"final-{depth}",
            claim=f"Outputs on test data match regression with the final kernel (c): relative error, L = {depth}",
            paper="closely",
            values=errors[:, 0],
            band=(None, 0.15),
            band_from="choice",
            why="The band of Fig. 1b.",
            least=Scale.LAPTOP,
            choices=[
                Choice(
                    made="relative error", other="correlation, above 0.95", values=correlations[:, 0], band=(0.95, 1)
                ),
            ],
        )
        yield Claim(
            id=f"initial-{depth}",
            claim=f"They do not match regression with the initial kernel (c): relative error, L = {depth}",
            paper="not",
            values=errors[:, 1],
            band=(0.2, None),
            band_from="choice",
            why="The band of Fig. 1b.",
            least=Scale.LAPTOP,
        )


def plot(setup: Setup, runs: Runs) -> Any:
    """The three panels of the paper, b and c of the first seed."""
    figure, (left, middle, right) = panels(1, 3, height=2.7, titles=("a", "b", "c"))
    for i, depth in enumerate(setup.depths):
        label, color = f"L = {depth}", COLORS[i]
        times = setup.lr * runs[f"{depth}/steps"][0]
        curve(left, times, runs[f"{depth}/loss"][0], label, color=color)
        curve(middle, times, runs[f"{depth}/alignment"][0], label, color=color)
        curve(middle, times, runs[f"{depth}/centered_alignment"][0], f"_centered, {label}", color=color, style=":")
        middle.axvline(setup.lr * grown(runs, depth)[0], color=color, linestyle="--", label=f"_norm at 1/10, {label}")
        network, final, initial = runs[f"{depth}/predictions"][0][:, :80]
        right.scatter(
            network, initial, s=4, color=GRAY, linewidths=0, label="initial NTK" if i == 0 else f"_initial, {label}"
        )
        right.scatter(network, final, s=4, color=color, linewidths=0, label=f"final NTK, {label}")
    middle.plot([], [], ":", color="black", label="centered")
    middle.plot([], [], "--", color="black", label="norm at 1/10")
    right.axline((0, 0), slope=1, color="black", linewidth=0.6)
    left.set(xscale="log", xlabel="time", ylabel="loss", xlim=(0.5, None))
    middle.set(xscale="log", xlabel="time", ylabel="kernel-task alignment", xlim=(0.5, None), ylim=(0, None))
    right.set(xlabel="network", ylabel="regression")
    for ax in (left, middle, right):
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2 if ax is middle else 1)
    return figure


EXPERIMENT = Experiment(
    id="002/figE2",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(
                data="digits",
                samples=40,
                test_samples=40,
                pooling=1,
                depths=(2, 3),
                times=(14.0, 36.0),
                width=40,
                moments=10,
            ),
            seeds=1,
            seconds=4,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=120, mebibytes=200),
        Scale.PAPER: Size(
            setup=Setup(samples=3000, test_samples=7000, pooling=1),
            seeds=3,
            seconds=600,
            mebibytes=4000,
            device="cuda",
        ),
    },
    measure=measure,
)

FIG_E2 = Reproduction(
    id="002/figE2",
    about=(
        "ReLU networks of two to four weight layers of 100 units on whitened images of two classes of CIFAR-10. The "
        "paper has 3000 images to train on and 7000 to test, all of the two classes in the five batches; so has paper "
        "scale. At laptop scale 600 and 1400 of them, averaged to 16 x 16. There are fewer images than pixels and no "
        "direction is dropped, so that whitened inputs are orthogonal. They are given in coordinates of their span. "
        "The paper gives neither scale nor depths nor learning rate: ours are sigma = 0.1 (and 0.2, for the power of "
        "the half time), two to four layers, and 0.1. Regressions start from the network's first outputs (Theorem 1, "
        "corrected)."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
