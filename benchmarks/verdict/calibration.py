"""The calibration suite: the runs on which thresholds are set.

Networks, data and seeds are others than those of the held-out suite. Sweeps also pass through settings whose regime
theory leaves open ("neither"), to show where the numbers are in between.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import featlearn as fl
from benchmarks.verdict import networks as net
from benchmarks.verdict import tasks
from benchmarks.verdict.constructions import (
    BCE,
    CROSS_ENTROPY,
    MSE,
    SQUARED,
    Construction,
    Descent,
    Fixed,
    Regime,
    Trial,
)

FIRST_SEED = 1
ADAMW, RMSPROP, SGD = torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD
SCALES = (0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
LAZY, RICH = 200.0, 1 / 30
"""Output scales of constructions that are not part of a sweep."""


def regime_of(scale: float) -> Regime:
    """By the output scale around a zero start; what lies between is not fixed by theory."""
    return "lazy" if scale >= 100 else "rich" if scale <= 0.1 else "neither"


def descent(scale: float, **settings: Any) -> Descent:
    """Slow enough for fifty steps and more where the kernel does not move, and within a stride where it does."""
    return Descent(share=0.1, **settings) if scale > 1 else Descent(share=0.3, stride=0.01, **settings)


# Output scale, by `fl.steer.scale_output`.


def swept_mlp(scale: float, seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.mlp([64, 80, 80, 5], nn.GELU), scale)
    return Trial(model, *tasks.few_digits(seed, 110), SQUARED, descent(scale), 1200)


def swept_cnn(scale: float, seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.cnn((8, 14), 5, activation=nn.Tanh, size=5), scale)
    return Trial(model, *tasks.few_digits(seed, 70), MSE, descent(scale, momentum=0.8), 700, stop=0.15)


def kinked_mlp(scale: float, seed: int, _: Any) -> Trial:
    """ReLU: units that switch are beyond any linearization, so that the gap falls more slowly with the scale."""
    model = fl.steer.scale_output(net.mlp([64, 50, 50, 5]), scale)
    return Trial(model, *tasks.few_digits(seed, 110), MSE, descent(scale), 900)


def kinked_cnn(scale: float, seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.cnn((10, 10), 5, size=5), scale)
    return Trial(model, *tasks.few_digits(seed, 70), SQUARED, descent(scale, momentum=0.8), 700, stop=0.15)


def transformer(scale: float, seed: int, variant: str) -> Trial:
    model = fl.steer.scale_output(net.Transformer(5, 16, 1, 2), scale)
    rate = 2e-5 if scale > 1 else 1e-2
    how = Fixed(ADAMW, rate) if variant == "AdamW" else descent(scale, momentum=0.9)
    return Trial(model, *tasks.few_digits(seed, 50, 50), SQUARED, how, 400, stop=0.2)


def cross_entropy(scale: float, seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.cnn((10, 12), 5, activation=nn.GELU), scale)
    task = tasks.few_digits(seed, 70, targets="labels")
    how = Descent(0.9, share=0.5) if scale > 1 else descent(scale, momentum=0.5)
    return Trial(model, *task, CROSS_ENTROPY, how, 500, stop=0.2)


def labels(scale: float, seed: int, variant: str) -> Trial:
    model = fl.steer.scale_output(net.mlp([64, 60, 60, 4], nn.Tanh), scale)
    how = Fixed(ADAMW, 1e-5 if scale > 1 else 5e-3) if variant == "AdamW" else descent(scale)
    return Trial(model, *tasks.few_digits(seed, 110, targets="thresholds"), BCE, how, 700, stop=0.2)


def rms_prop(scale: float, seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.mlp([30, 150, 1]), scale)
    how = Fixed(RMSPROP, 3e-6 if scale > 1 else 2e-3)
    return Trial(model, *tasks.cancer(seed, 300), SQUARED, how, 600, probe=100, batch=60, stop=0.2)


def layer_norm(scale: float, seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.mlp([40, 100, 4], norm=nn.LayerNorm), scale)
    return Trial(model, *tasks.mixture(seed, 100), SQUARED, descent(scale), 600)


def batch_norm(scale: float, seed: int, _: Any) -> Trial:
    """The readout starts at zero: a copy in eval mode would differ from the network by its batch statistics."""
    model = net.Multiplied(net.zero_readout(net.cnn((8, 10), 5, norm=nn.BatchNorm2d)), scale)
    # SGD: steps of Adam are as long for the body as for the readout, however small the gradient of the body is
    how = Fixed(SGD, 0.04 / scale**2, (("momentum", 0.8),)) if scale > 1 else Fixed(ADAMW, 1e-2)
    return Trial(model, *tasks.few_digits(seed, 300), SQUARED, how, 500, probe=80, batch=80, stop=0.15)


def dropout(seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.mlp([40, 150, 150, 4], nn.GELU, dropout=0.2), RICH)
    return Trial(model, *tasks.mixture(seed, 300), SQUARED, Fixed(ADAMW, 2e-3), 500, probe=100, batch=60, stop=0.15)


# Width, size of the weights and size of the targets.


def ntk(width: int, seed: int, _: Any) -> Trial:
    model = net.scaled_mlp([40, width, 4], width**-0.5, nn.Softplus)
    return Trial(model, *tasks.mixture(seed, 100), SQUARED, Descent(share=0.1), 300, stop=0.15)


def kinked_ntk(width: int, seed: int, _: Any) -> Trial:
    model = net.scaled_mlp([40, width, 4], width**-0.5, nn.ReLU, gain=2**0.5)
    return Trial(model, *tasks.mixture(seed, 100), SQUARED, Descent(share=0.1), 300, stop=0.15)


def mean_field(width: int, seed: int, times: float) -> Trial:
    model = net.scaled_mlp([40, width, 4], 1 / width, nn.Softplus)
    task = tasks.changed(tasks.unit_targets(tasks.mixture(seed, 100)), times=times)
    return Trial(model, *task, SQUARED, Descent(share=0.1, stride=0.01), 400)


def sized_weights(factor: float, seed: int, _: Any) -> Trial:
    model = net.small(net.Difference(net.mlp([30, 100, 1])), factor)
    return Trial(model, *tasks.cancer(seed, 100), MSE, descent(factor), 900, stop=0.2)


def sized_targets(times: float, seed: int, plus: float | None) -> Trial:
    model = net.Difference(net.mlp([40, 70, 70, 4], nn.Tanh))
    task = tasks.changed(tasks.mixture(seed, 100), times=times, plus=plus or 0.0)
    return Trial(model, *task, SQUARED, descent(1 / times), 900)


def small_constant(seed: int, variant: float) -> Trial:
    model = net.small(net.mlp([40, 90, 90, 4]), 0.1)
    return Trial(model, *tasks.changed(tasks.mixture(seed, 100), plus=variant), SQUARED, Descent(stride=0.02), 1200)


def weight_decay(seed: int, variant: float) -> Trial:
    model = net.Difference(net.scaled_mlp([40, 500, 4], 500**-0.5, gain=2**0.5, bias=False))
    return Trial(model, *tasks.mixture(seed, 80), SQUARED, Descent(share=0.2, shrinking=variant), 200, stop=0.0)


def small_weight_decay(seed: int, variant: float) -> Trial:
    model = net.small(net.mlp([40, 90, 4], nn.GELU), 0.1)
    return Trial(model, *tasks.mixture(seed, 100), SQUARED, Descent(stride=0.02, shrinking=variant), 600, stop=0.0)


# Exactly solvable ones.


class Powers(nn.Module):
    """A readout of fixed polynomial features."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.readout = nn.Linear(3 * inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.readout(torch.cat([x, x.square() / 2, x.pow(3) / 6], 1))


def powers(seed: int, variant: str) -> Trial:
    how = Fixed(RMSPROP, 3e-4) if variant == "RMSprop" else Descent(0.8, share=0.2)
    return Trial(Powers(40, 4), *tasks.mixture(seed, 90), SQUARED, how, 600, stop=0.2)


def normed_features(seed: int, variant: int) -> Trial:
    """BatchNorm with frozen gains before the only layer that is trained."""
    model = nn.Sequential(nn.Linear(40, variant), nn.Tanh(), nn.BatchNorm1d(variant), nn.Linear(variant, 4))
    how = Fixed(ADAMW, 1e-3, (("weight_decay", 0.0),))
    return Trial(net.frozen(model), *tasks.mixture(seed, 300), MSE, how, 500, probe=90, batch=40, stop=0.2)


def deep_linear(seed: int, _: Any) -> Trial:
    model = net.small(net.mlp([30, 40, 40, 40, 4], nn.Identity, bias=False), 0.3)
    task = tasks.low_rank_linear(seed, 90, dimension=30, outputs=4, rank=2)
    return Trial(model, *task, SQUARED, Descent(stride=0.02), 1200)


def diagonal(start: float, seed: int, _: Any) -> Trial:
    how = Descent(share=0.02) if start > 1 else Descent(stride=0.02)
    return Trial(net.DiagonalLinear(50, start, depth=3), *tasks.sparse_linear(seed, 30, dimension=50), MSE, how, 900)


def chain(seed: int, _: Any) -> Trial:
    model = net.small(net.mlp([8, 100, 1]), 0.1)
    how = Descent(0.5, share=0.3, stride=0.02)
    return Trial(model, *tasks.chain(seed, 250, dimension=8, degree=2), SQUARED, how, 1500, probe=100, stop=0.2)


SCALED = "the output is multiplied around a zero start: from 100 on lazy, to 0.1 rich, between not fixed (Chizat 2019)"
LINEAR = "the outputs are linear in the trained weights"
NTK = "NTK parametrization: lazy up to 1 / sqrt(width) (Jacot et al. 2018); below a width of 200 not fixed"
MEAN_FIELD = "mean-field parametrization with targets of at least its order: every unit moves by order one (Mei 2018)"
SIZED = "homogeneous of degree 2: weights times s are an output times s^2 (Chizat et al. 2019)"
TARGETS = "on squared error and from zero, targets times t are an output divided by t (Chizat et al. 2019)"
SMALL = "from small weights all layers must grow together (Saxe et al. 2014; Atanasov et al. 2022)"
DECAY = "both layers shrink by one factor, which does not turn the kernel; around it the wide network is linear"


def both(name: str, make: Callable[..., Trial], variants: tuple[Any, ...] = (None,)) -> list[Construction]:
    """A construction at a large and at a small output scale."""
    return [
        Construction(f"output x {scale:.3g}, {name}", regime_of(scale), SCALED, partial(make, scale), variants, 2)
        for scale in (LAZY, RICH)
    ]


def sweep(
    name: str, make: Callable[..., Trial], values: dict[float, Regime], reason: str, variants: tuple[Any, ...] = (None,)
) -> list[Construction]:
    """A construction for each value, which is the first argument."""
    return [
        Construction(f"{name} {value:g}", regime, reason, partial(make, value), variants, 2)
        for value, regime in values.items()
    ]


SWEPT = {scale: regime_of(scale) for scale in SCALES}
KINKED = {scale: regime_of(scale) for scale in (0.01, 0.1, 1.0, 10.0, 100.0, 300.0)}
RICH_WIDTHS: dict[float, Regime] = {192: "rich", 384: "rich", 768: "rich"}
LAZY_WIDTHS: dict[float, Regime] = {48: "neither", 96: "neither", 192: "lazy", 384: "lazy", 768: "lazy"}

CONSTRUCTIONS = (
    *sweep("MLP, output x", swept_mlp, SWEPT, SCALED),
    *sweep("CNN, output x", swept_cnn, SWEPT, SCALED),
    *sweep("ReLU MLP, output x", kinked_mlp, KINKED, SCALED),
    *sweep("ReLU CNN, output x", kinked_cnn, KINKED, SCALED),
    *both("transformer", transformer, ("SGD", "AdamW")),
    *both("CNN, cross-entropy", cross_entropy),
    *both("multi-label BCE", labels, ("SGD", "AdamW")),
    *both("RMSprop, mini-batches", rms_prop),
    *both("LayerNorm", layer_norm),
    *both("BatchNorm in the body", batch_norm),
    Construction("output x 0.0333, dropout", "rich", SCALED, dropout, seeds=2),
    *sweep("NTK, width", ntk, LAZY_WIDTHS, NTK),
    *sweep("ReLU NTK, width", kinked_ntk, LAZY_WIDTHS, NTK),
    *sweep("mean field, width", mean_field, RICH_WIDTHS, MEAN_FIELD, (1.0, 3.0)),
    Construction(
        "mean field, small targets",
        "neither",
        "units move by the size of the targets: little",
        partial(mean_field, 384),
        (0.1, 0.3),
        2,
    ),
    *sweep("weights x", sized_weights, {0.05: "rich", 0.2: "rich", 1.0: "neither", 10.0: "lazy"}, SIZED),
    *sweep("targets x", sized_targets, {0.005: "lazy", 0.1: "neither", 1.0: "neither", 20.0: "rich"}, TARGETS),
    Construction("weights x 0.1, constant in the targets", "rich", SMALL, small_constant, (1.0, 5.0), 2),
    Construction("targets x 0.005, constant", "lazy", TARGETS, partial(sized_targets, 0.005), (0.01,), 2),
    Construction("NTK, weight decay", "lazy", DECAY, weight_decay, (0.1, 0.3, 0.6), 2),
    Construction("small weights, weight decay", "rich", SMALL, small_weight_decay, (0.1, 0.4), 2),
    Construction("polynomial features", "lazy", LINEAR, powers, ("SGD", "RMSprop"), 2),
    Construction("BatchNorm with frozen gains before the readout", "lazy", LINEAR, normed_features, (60, 200), 2),
    Construction("deep linear network, small weights", "rich", SMALL, deep_linear),
    *sweep("diagonal linear network of depth 3, weights", diagonal, {0.1: "rich", 8.0: "lazy"}, SIZED),
    Construction("small weights, products of two coordinates", "rich", SMALL, chain, seeds=2),
)
