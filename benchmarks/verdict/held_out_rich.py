"""Held-out runs that theory makes rich."""

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
    Trial,
)

ADAM, SGD = torch.optim.Adam, torch.optim.SGD


def mean_field(seed: int, width: int) -> Trial:
    model = net.scaled_mlp([64, width, 10], 1 / width, gain=2**0.5)
    task = tasks.unit_targets(tasks.digits(seed, 90))
    return Trial(model, *task, SQUARED, Descent(share=0.3, stride=0.02), 250)


def mean_field_one_hot(seed: int, width: int) -> Trial:
    """Targets a third of the size, so that the units move less: the hardest case."""
    model = net.scaled_mlp([64, width, 10], 1 / width, gain=2**0.5)
    return Trial(model, *tasks.digits(seed, 90), SQUARED, Descent(share=0.3, stride=0.02), 250)


def mean_field_steered(seed: int, width: int) -> Trial:
    """As `fl.steer.parametrize` makes it, the learning rate in proportion to the width."""
    model, groups = fl.steer.parametrize(
        net.mlp([64, width, 10]), "mean_field", lr=0.02, base_width=1, generator=tasks.generator(seed)
    )
    task = tasks.unit_targets(tasks.digits(seed, 90, raw=True))
    return Trial(model, *task, SQUARED, Fixed(SGD, groups[0]["lr"]), 400)


def mean_field_one_output(seed: int, variant: str) -> Trial:
    model = net.scaled_mlp([64, 400, 1], 1 / 400, nn.Tanh)
    how = Fixed(ADAM, 0.01) if variant == "Adam" else Descent(0.9, share=0.1, stride=0.02)
    return Trial(model, *tasks.digits(seed, 100, targets="odd"), SQUARED, how, 400)


def mean_field_cross_entropy(seed: int, _: Any) -> Trial:
    model = net.scaled_mlp([64, 500, 10], 1 / 500, nn.GELU, gain=1.5)
    task = tasks.digits(seed, 80, targets="labels")
    return Trial(model, *task, CROSS_ENTROPY, Descent(0.9, share=0.1, stride=0.02), 400, stop=0.2)


def mean_field_decay(seed: int, _: Any) -> Trial:
    model = net.scaled_mlp([64, 300, 10], 1 / 300, gain=2**0.5)
    return Trial(
        model, *tasks.unit_targets(tasks.digits(seed, 90)), SQUARED, Descent(stride=0.02, shrinking=0.2), 300, stop=0.0
    )


def small_large_targets(seed: int, _: Any) -> Trial:
    model = fl.steer.scale_init(net.mlp([64, 100, 100, 10]), 0.1)
    return Trial(
        model, *tasks.changed(tasks.digits(seed, 100), times=30.0), SQUARED, Descent(stride=0.02), 1800, stop=0.15
    )


def small_constant(seed: int, variant: float) -> Trial:
    model = net.small(net.mlp([64, 100, 10]), 0.05)
    return Trial(model, *tasks.changed(tasks.digits(seed, 100), plus=variant), SQUARED, Descent(stride=0.02), 900)


def small_deep(seed: int, _: Any) -> Trial:
    model = net.small(net.mlp([64, 70, 70, 70, 10], nn.Tanh), 0.2)
    return Trial(model, *tasks.digits(seed, 100), MSE, Descent(0.9, stride=0.02), 800)


def small_deep_linear(seed: int, _: Any) -> Trial:
    model = fl.steer.scale_init(net.mlp([20, 50, 50, 6], nn.Identity, bias=False), 0.05)
    return Trial(model, *tasks.low_rank_linear(seed, 100), SQUARED, Descent(stride=0.02), 1000)


def small_diagonal(seed: int, _: Any) -> Trial:
    task = tasks.sparse_linear(seed, 40, dimension=80)
    return Trial(net.DiagonalLinear(80, 0.01), *task, SQUARED, Descent(stride=0.02), 900)


def small_quadratic(seed: int, _: Any) -> Trial:
    """The readout is fixed: a sum of squares of the hidden units, half of them with a minus."""
    model = net.mlp([15, 60, 1], net.Square, bias=False)
    fl.steer.scale_init(model, 0.02)
    with torch.no_grad():
        model[-1].weight.copy_(torch.tensor([1.0, -1.0]).repeat(30) / 6)
    model[-1].requires_grad_(False)
    return Trial(model, *tasks.quadratic(seed, 120, dimension=15), SQUARED, Descent(stride=0.02), 900)


def small_teacher(seed: int, _: Any) -> Trial:
    model = net.small(net.mlp([15, 120, 1]), 0.05)
    task = tasks.index(seed, 400)
    return Trial(model, *task, MSE, Descent(0.5, share=0.3, stride=0.02), 800, probe=120, batch=100, stop=0.15)


def divided_cnn(seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.cnn((12, 16), 10), 1 / 50)
    return Trial(model, *tasks.digits(seed, 80), SQUARED, Descent(0.9, stride=0.03), 700, stop=0.2)


def divided_transformer(seed: int, variant: str) -> Trial:
    model = fl.steer.scale_output(net.Transformer(10, 24, 2, 3), 1 / 50)
    how = Fixed(ADAM, 5e-3) if variant == "Adam" else Descent(0.9, stride=0.03)
    return Trial(model, *tasks.digits(seed, 40, 40), SQUARED, how, 350, stop=0.25)


def divided_bce(seed: int, variant: str) -> Trial:
    model = fl.steer.scale_output(net.mlp([64, 100, 5]), 1 / 50)
    how = Fixed(ADAM, 0.01) if variant == "Adam" else Descent(0.9, stride=0.02)
    return Trial(model, *tasks.digits(seed, 100, targets="attributes"), BCE, how, 700, stop=0.2)


def divided_cross_entropy(seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.mlp([64, 90, 90, 10]), 1 / 50)
    task = tasks.digits(seed, 100, targets="labels")
    return Trial(model, *task, CROSS_ENTROPY, Descent(stride=0.03), 700, stop=0.2)


def divided_layer_norm(seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.mlp([64, 80, 80, 10], nn.GELU, norm=nn.LayerNorm), 1 / 50)
    return Trial(model, *tasks.digits(seed, 100), SQUARED, Descent(0.9, stride=0.02), 600)


def divided_batch_norm(seed: int, _: Any) -> Trial:
    model = net.Multiplied(net.mlp([64, 80, 80, 10], norm=nn.BatchNorm1d), 1 / 50)
    return Trial(model, *tasks.digits(seed, 400), SQUARED, Fixed(ADAM, 0.01), 500, probe=100, batch=100)


def divided_dropout(seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.mlp([64, 120, 120, 10], dropout=0.1), 1 / 50)
    task = tasks.digits(seed, 400)
    return Trial(model, *task, SQUARED, Fixed(ADAM, 3e-3), 600, probe=100, batch=100, stop=0.15)


MEAN_FIELD = (
    "the output is a mean over hidden units and the rate grows with the width, so that every unit moves by order one "
    "at any width (Mei et al. 2018; Geiger et al. 2020)"
)
SMALL = "from small weights all layers must grow together, along the task, to fit it (Saxe et al. 2014; Atanasov 2022)"
DIVIDED = (
    "the output is divided by 50 around its start, so that weights must change by more than their size to fit the "
    "targets (Chizat et al. 2019)"
)

CONSTRUCTIONS = (
    Construction("mean field, squared error", "rich", MEAN_FIELD, mean_field, (256, 512, 1024), 2),
    Construction("mean field, one-hot targets", "rich", MEAN_FIELD, mean_field_one_hot, (256, 512, 1024), 2),
    Construction("mean field, fl.steer.parametrize", "rich", MEAN_FIELD, mean_field_steered, (256, 512, 1024), 2),
    Construction("mean field, one output", "rich", MEAN_FIELD, mean_field_one_output, ("momentum", "Adam"), 2),
    Construction("mean field, cross-entropy", "rich", MEAN_FIELD, mean_field_cross_entropy),
    Construction("mean field, weight decay", "rich", MEAN_FIELD, mean_field_decay),
    Construction("small weights, targets x 30", "rich", SMALL, small_large_targets, seeds=5),
    Construction("small weights, constant in the targets", "rich", SMALL, small_constant, (1.0, 10.0), 2),
    Construction("small weights, deep tanh MLP", "rich", SMALL, small_deep),
    Construction("small weights, deep linear network", "rich", SMALL, small_deep_linear),
    Construction(
        "small weights, diagonal linear network",
        "rich",
        "weights of 0.01 must grow a hundredfold to fit coefficients of order one (Woodworth et al. 2020)",
        small_diagonal,
    ),
    Construction(
        "small weights, squares of hidden units",
        "rich",
        "a factored matrix from small weights grows in few directions (Li et al. 2018)",
        small_quadratic,
    ),
    Construction("small weights, one direction, mini-batches", "rich", SMALL, small_teacher),
    Construction("output / 50, CNN", "rich", DIVIDED, divided_cnn),
    Construction("output / 50, transformer", "rich", DIVIDED, divided_transformer, ("SGD", "Adam"), 2),
    Construction("output / 50, multi-label BCE", "rich", DIVIDED, divided_bce, ("SGD", "Adam"), 2),
    Construction("output / 50, cross-entropy", "rich", DIVIDED, divided_cross_entropy),
    Construction("output / 50, LayerNorm", "rich", DIVIDED, divided_layer_norm),
    Construction("output / 50, BatchNorm in the body", "rich", DIVIDED, divided_batch_norm),
    Construction("output / 50, dropout", "rich", DIVIDED, divided_dropout),
)
