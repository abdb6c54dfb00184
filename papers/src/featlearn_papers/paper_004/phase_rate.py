"""Ours: output scale x learning rate of perceptrons on MNIST, and how the largest stable rate grows with the scale.

Theory: Atanasov, Meterez, Simon & Pehlevan (arXiv:2410.04642).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import BLACK, COLORS, WIDTH, curve
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_004.power_law import exponent
from featlearn_papers.paper_004.two_layers import loaded

ABOVE = 1e-3
"""share of the first loss by which a stable training may be above it: rounding"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Ten classes, full-batch descent on the squared error of (f - f0) / gamma."""

    data: str = "mnist"
    samples: int = 50
    pooling: int = 4
    """images are averaged over squares of so many pixels"""
    width: int = 32
    layers: tuple[int, ...] = (2, 3, 4)
    """L: of weights"""
    gammas: tuple[float, ...] = tuple(10 ** (i / 2) for i in range(-4, 13))
    rates: tuple[float, ...] = tuple(10 ** (i / 2) for i in range(-10, 17))
    """in units of the limit of stability at the start for gamma = 1"""
    steps: int = 1000
    halvings: int = 5
    """of the interval between two rates, in the logarithm, around the largest stable one"""
    lazy: float = 0.1
    """gammas up to it are lazy"""
    rich: float = 1000.0
    """gammas from it on are very rich"""

    def chosen(self, lazy: bool) -> Array:
        """Which gammas a fit takes."""
        gammas = numpy.array(self.gammas)
        rows: Array = gammas <= self.lazy * 1.001 if lazy else gammas >= self.rich * 0.999
        return rows


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Loss left (L, gammas, rates), nan where training was unstable, and the largest stable rate (L, gammas)."""
    x, labels = loaded(setup.data, "train", setup.samples, setup.pooling, context)
    y = torch.nn.functional.one_hot(labels, 10).to(x) - 0.1
    found: dict[str, list[Tensor]] = {"left": [], "limit": []}
    for i, layers in enumerate(setup.layers):
        model = MLP(x.shape[1], 10, width=setup.width, hidden_layers=layers - 1, generator=context.generator(1))
        unit = fl.steer.safe_lr(model, x.cpu(), loss="mean", share=1.0)
        weights = [weight.detach().to(context.device) for weight in model.parameters()]
        left, limit = stability(setup, weights, unit, x, y)
        found["left"].append(left)
        found["limit"].append(limit)
        context.progress(i + 1, len(setup.layers), layers=layers, largest=float(limit[-1]))
    return {name: torch.stack(values).cpu() for name, values in found.items()}


def stability(setup: Setup, weights: list[Tensor], unit: float, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The map of one network, and its boundary by bisection between the last stable rate and the next."""
    gammas, rates = torch.tensor(setup.gammas), torch.tensor(setup.rates)
    grid = torch.cartesian_prod(gammas, rates)
    left = losses_left(weights, grid[:, 0], grid[:, 1] * unit, x, y, setup.steps).view(len(gammas), len(rates))
    first = torch.isnan(left).double().argmax(1).clamp_min(1)  # 0 where all are stable, or none
    low, high = rates[first - 1].clone(), rates[first].clone()
    for _ in range(setup.halvings):
        middle = (low * high).sqrt()
        unstable = losses_left(weights, gammas, middle * unit, x, y, setup.steps).isnan().cpu()
        low, high = torch.where(unstable, low, middle), torch.where(unstable, middle, high)
    bounded = torch.isnan(left).any(1) & ~torch.isnan(left[:, 0])
    return left, torch.where(bounded, (low * high).sqrt(), torch.nan)


def losses_left(weights: list[Tensor], gammas: Tensor, rates: Tensor, x: Tensor, y: Tensor, steps: int) -> Tensor:
    """(N,): share of the loss after gradient descent from the same weights, one network for each gamma and rate.

    nan where the loss was above its start, or not a number, at any step.
    """
    scale, rate = (values.to(x).view(-1, 1, 1) for values in (gammas, rates))
    layers = [weight.expand(len(scale), -1, -1).clone() for weight in weights]
    start, first = outputs([weight[None] for weight in weights], x), y.square().sum(1).mean()
    left = torch.full((len(scale),), torch.nan, dtype=x.dtype, device=x.device)
    running = torch.arange(len(scale), device=x.device)
    for step in range(steps + 1):
        for layer in layers:
            layer.requires_grad_()
        loss = ((outputs(layers, x) - start) / scale - y).square().sum(2).mean(1)
        gradients = torch.autograd.grad(loss.sum(), layers)
        stable = loss.detach() <= (1 + ABOVE) * first
        layers = [(layer.detach() - rate * slope)[stable] for layer, slope in zip(layers, gradients, strict=True)]
        scale, rate, running = scale[stable], rate[stable], running[stable]
        if step == steps:
            left[running] = loss.detach()[stable] / first
    return left


def outputs(layers: list[Tensor], x: Tensor) -> Tensor:
    """(N, P, C) of N ReLU networks without biases."""
    h = x.expand(len(layers[0]), -1, -1)
    for weight in layers[:-1]:
        h = torch.bmm(h, weight.transpose(1, 2)).relu()
    return torch.bmm(h, layers[-1].transpose(1, 2))


def slopes(setup: Setup, limit: Array, *, lazy: bool) -> Array:
    """(S, L): exponent of the largest stable rate (S, L, gammas) over the lazy or the very rich gammas."""
    rows = setup.chosen(lazy)
    return exponent(numpy.array(setup.gammas)[rows], limit[:, :, rows])


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The two exponents for each depth, and where the lazy boundary lies."""
    lazy, rich = (slopes(setup, runs["limit"], lazy=choice) for choice in (True, False))
    for i, layers in enumerate(setup.layers):
        yield Claim(
            id=f"lazy-{layers}",
            claim=f"{layers} layers, gamma up to {setup.lazy:g}: exponent of the largest stable rate over gamma",
            paper=2.0,
            values=lazy[:, i],
            band=(1.9, 2.1),
            band_from="theory",
            why="The kernel of f / gamma goes as gamma^-2 and does not change.",
        )
        yield Claim(
            id=f"rich-{layers}",
            claim=f"{layers} layers, gamma from {setup.rich:g} on: exponent of the largest stable rate over gamma",
            paper=2 / layers,
            values=rich[:, i],
            band=(2 / layers - 0.1, 2 / layers + 0.1),
            band_from="theory",
            least=Scale.LAPTOP,
            why=f"Weights grow to gamma^(1/{layers}), where the kernel is gamma^(-2/{layers}). The range of gamma was "
            "chosen by the one that needs most: with 4 layers, weights are beyond their initial scale from 1000 on.",
        )
    yield Claim(
        id="order",
        claim="Very rich, deeper networks gain less: the exponent falls from each depth to the next",
        paper="yes",
        values=numpy.all(numpy.diff(rich) < 0, axis=1),
        band=(1, None),
        band_from="theory",
        least=Scale.LAPTOP,
    )
    rows = setup.chosen(True)
    limit = runs["limit"][:, :, rows] / numpy.array(setup.gammas)[rows] ** 2
    yield Claim(
        id="limit",
        claim="The lazy boundary is 2 / largest eigenvalue of the Hessian at the start: measured rate "
        "relative to it, furthest from 1",
        paper=1.0,
        values=furthest(limit),
        band=(0.9, 1.1),
        band_from="theory",
        least=Scale.LAPTOP,
        why="A loss slightly beyond the limit needs many steps to rise above its start.",
        choices=[Choice(made=f"{setup.steps} steps", other="more")],
    )


def furthest(values: Array) -> Array:
    """(S,): the one furthest from 1."""
    flat = values.reshape(len(values), -1)
    found: Array = numpy.take_along_axis(flat, abs(numpy.log(flat)).argmax(1)[:, None], axis=1)[:, 0]
    return found


def plot(setup: Setup, runs: Runs) -> Any:
    """Maps of the loss that is left, a panel for each depth, with the largest stable rate; below their exponents."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
    axes = figure.subplots(1, len(setup.layers), sharey=True, squeeze=False)[0]
    x, y = numpy.array(setup.gammas), numpy.array(setup.rates)
    for i, (ax, layers) in enumerate(zip(axes, setup.layers, strict=True)):
        left = numpy.where(numpy.isnan(runs["left"][:, i]).any(0), numpy.nan, runs["left"][:, i].mean(0))
        ax.set_facecolor("0.8")
        image = ax.pcolormesh(x, y, left.T, cmap="Blues_r", vmin=0, vmax=1, shading="nearest", label="loss left")
        curve(ax, x, runs["limit"][:, i], "largest stable rate", color=COLORS[1], style="o-")
        for lazy, style in ((True, "--"), (False, ":")):
            power, rows = 2.0 if lazy else 2 / layers, setup.chosen(lazy)
            middle = numpy.exp(numpy.log(runs["limit"][:, i][:, rows]).mean())
            here = x if lazy else x[x >= 1]
            line = middle * (here / numpy.exp(numpy.log(x[rows]).mean())) ** power
            inside = (line >= y[0]) & (line <= y[-1])
            measured = with_error(slopes(setup, runs["limit"], lazy=lazy)[:, i])
            name = (r"$\gamma^2$: " if lazy else rf"$\gamma^{{2/{layers}}}$: ") + measured
            curve(ax, here[inside], line[inside], name, color=BLACK, style=style)
        ax.set_title(f"{layers} layers", loc="left", fontweight="bold")
        ax.set(xscale="log", yscale="log", xlabel=r"output scale $\gamma$", xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
        ax.set_xticks(10.0 ** numpy.arange(numpy.log10(x[0]), numpy.log10(x[-1]), 2))
        lines = [line for line in ax.lines if not str(line.get_label()).startswith("_")]
        ax.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    axes[0].set_ylabel(r"rate / limit at $\gamma = 1$ (gray: unstable)")
    figure.colorbar(image, ax=list(axes), label="share of the loss left")
    return figure


def with_error(values: Array) -> str:
    """A mean over seeds with its standard error."""
    error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{error}"


EXPERIMENT = Experiment(
    id="004/phase-rate",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(
                data="digits",
                samples=20,
                pooling=2,
                width=16,
                layers=(2,),
                gammas=(0.01, 0.1, 1000.0, 3000.0),
                rates=tuple(10.0**i for i in range(-5, 6)),
                steps=60,
                halvings=3,
            ),
            seeds=1,
            seconds=1,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=200, mebibytes=600),
    },
    measure=measure,
)

PHASE_RATE = Reproduction(
    id="004/phase-rate",
    about=(
        "Not in the paper: where gradient descent is stable, over output scale and learning rate. Perceptrons with "
        "2, 3 and 4 layers of weights (ReLU, width 32) learn 50 images of MNIST (7 x 7) by full-batch descent on the "
        "squared error of (f - f0) / gamma: small gamma is lazy, large gamma rich. A training is unstable if its "
        "loss is ever above the first one within 1000 steps (the boundary is the same with 4000). The largest stable "
        "rate is found by bisection; its exponents over gamma are fitted for gamma up to 0.1 and from 1000 on, and "
        "shown above the maps with standard errors over seeds. Theory (Atanasov, Meterez, Simon & Pehlevan, "
        "arXiv:2410.04642): 2 where training is lazy, 2 / L where it is very rich. The range of the second fit was "
        "chosen after trials with another seed: up to gamma = 1000 four layers had exponents of 0.7 to 0.95, from "
        "1000 on 0.52."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
