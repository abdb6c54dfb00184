"""Held-out runs that theory makes lazy."""

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

# Linear in the trained weights: lazy at any size and any rate.


def linear_model(seed: int, variant: str) -> Trial:
    entropy = variant == "cross-entropy"
    task = tasks.digits(seed, 60, targets="labels" if entropy else "one-hot")
    return Trial(nn.Linear(64, 10), *task, CROSS_ENTROPY if entropy else SQUARED, Descent(), 600)


def random_features(seed: int, variant: str) -> Trial:
    model = net.frozen(net.mlp([64, 400, 10]))
    how = Fixed(ADAM, 1e-3) if variant == "Adam" else Descent(0.9, share=0.1)
    return Trial(model, *tasks.digits(seed, 120), MSE, how, 600)


def dropout_features(seed: int, _: Any) -> Trial:
    model = net.frozen(net.mlp([64, 500, 10], nn.GELU, dropout=0.2))
    return Trial(model, *tasks.digits(seed, 120), SQUARED, Descent(share=0.15), 800, stop=0.2)


def frozen_body(seed: int, variant: str) -> Trial:
    """A body that has learned whether digits are odd; only a new readout is trained."""
    conv = variant == "CNN"
    body = net.cnn((16, 20), 1) if conv else net.mlp([64, 80, 80, 80, 1], nn.Tanh)
    train, test = tasks.digits(seed, 120)
    odd = tasks.digits(seed, 120, targets="odd")[0]
    optimizer = ADAM(body.parameters(), 3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        (body(odd.x) - odd.y).square().mean().backward()
        optimizer.step()
    body[-1] = nn.Linear(80, 10)
    return Trial(net.frozen(body), train, test, SQUARED, Descent(0.9), 600, stop=0.2)


def normed_features(seed: int, variant: str) -> Trial:
    """BatchNorm, whose averages settle in training, before the only layer that is trained."""
    body: list[nn.Module] = [nn.Linear(64, 150), nn.ReLU(), nn.BatchNorm1d(150, affine=False)]
    if variant == "CNN":
        body = [
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 12, 3),
            nn.ReLU(),
            nn.BatchNorm2d(12, affine=False),
            nn.AvgPool2d(2),
            nn.Flatten(),
        ]
    model = net.frozen(nn.Sequential(*body, nn.Linear(108 if variant == "CNN" else 150, 10)))
    return Trial(
        model,
        *tasks.digits(seed, 400, raw=True),
        MSE,
        Fixed(SGD, 0.05, (("momentum", 0.9),)),
        600,
        probe=100,
        batch=50,
        stop=0.2,
    )


# Wide networks in the NTK parametrization, and networks whose output is multiplied.


def ntk_wide(seed: int, width: int) -> Trial:
    model = net.scaled_mlp([64, width, 10], width**-0.5, gain=2**0.5)
    return Trial(model, *tasks.digits(seed, 90), SQUARED, Descent(share=0.2), 250, stop=0.15)


def ntk_cross_entropy(seed: int, _: Any) -> Trial:
    model = net.Difference(net.scaled_mlp([64, 600, 10], 600**-0.5, nn.GELU, gain=1.5))
    task = tasks.digits(seed, 80, targets="labels")
    return Trial(model, *task, CROSS_ENTROPY, Descent(0.9, share=0.03), 250, stop=0.25)


def ntk_one_output(seed: int, _: Any) -> Trial:
    model = net.Difference(net.scaled_mlp([64, 800, 1], 800**-0.5, nn.Tanh))
    return Trial(model, *tasks.digits(seed, 80, targets="odd"), SQUARED, Descent(0.9, share=0.1), 250, stop=0.15)


def scaled_mlp(seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.mlp([64, 90, 90, 10]), 100)
    return Trial(model, *tasks.digits(seed, 100), SQUARED, Descent(0.9, share=0.2), 500)


def scaled_adam(seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.mlp([64, 100, 10], nn.Tanh), 100)
    return Trial(model, *tasks.digits(seed, 400), MSE, Fixed(ADAM, 2e-5), 600, probe=100, batch=64, stop=0.15)


def scaled_cnn(seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.cnn((12, 16), 10), 100)
    return Trial(model, *tasks.digits(seed, 80), SQUARED, Descent(0.9), 500, stop=0.2)


def scaled_transformer(seed: int, variant: str) -> Trial:
    model = fl.steer.scale_output(net.Transformer(10, 24, 2, 3), 100)
    how = Fixed(ADAM, 1e-5) if variant == "Adam" else Descent(0.9)
    return Trial(model, *tasks.digits(seed, 48, 40), SQUARED, how, 250, stop=0.25)


def scaled_layer_norm(seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.mlp([64, 80, 80, 10], nn.GELU, norm=nn.LayerNorm), 100)
    return Trial(model, *tasks.digits(seed, 100), SQUARED, Descent(0.9, share=0.2), 400)


def scaled_batch_norm(seed: int, _: Any) -> Trial:
    """The readout starts at zero: a copy in eval mode would differ from the network by its batch statistics."""
    model = net.Multiplied(net.zero_readout(net.mlp([64, 80, 120, 10], norm=nn.BatchNorm1d)), 100.0)
    return Trial(
        model,
        *tasks.digits(seed, 150),
        SQUARED,
        Fixed(SGD, 2e-6, (("momentum", 0.9),)),
        500,
        probe=100,
        batch=75,
        stop=0.2,
    )


def scaled_bce(seed: int, variant: str) -> Trial:
    task = tasks.digits(seed, 100, targets="attributes")
    if variant == "NTK":
        model: nn.Module = net.Difference(net.scaled_mlp([64, 700, 5], 700**-0.5, gain=2**0.5))
        return Trial(model, *task, BCE, Descent(0.9, share=0.02), 250, stop=0.25)
    model = fl.steer.scale_output(net.mlp([64, 100, 5]), 100)
    return Trial(model, *task, BCE, Descent(0.9, share=0.02), 500, stop=0.25)


def scaled_one_output(seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.mlp([64, 60, 60, 1], nn.Tanh), 100)
    task = tasks.digits(seed, 400, targets="odd")
    return Trial(model, *task, SQUARED, Descent(0.9, share=0.1), 500, probe=100, batch=64, stop=0.2)


def small_targets(seed: int, _: Any) -> Trial:
    model = net.Difference(net.mlp([64, 70, 70, 10]))
    return Trial(model, *tasks.changed(tasks.digits(seed, 100), times=0.01), SQUARED, Descent(0.9, share=0.2), 500)


def lazy_constant(seed: int, _: Any) -> Trial:
    model = fl.steer.scale_output(net.mlp([64, 120, 10]), 300)
    return Trial(model, *tasks.changed(tasks.digits(seed, 100), plus=5.0), SQUARED, Descent(0.9), 600)


def lazy_weight_decay(seed: int, variant: str) -> Trial:
    task = tasks.digits(seed, 90)
    if variant == "random features":
        how = Fixed(SGD, 0.003, (("momentum", 0.9), ("weight_decay", 1e-2)))
        return Trial(net.frozen(net.mlp([64, 350, 10])), *task, SQUARED, how, 600, stop=0.15)
    model = net.Difference(net.scaled_mlp([64, 500, 10], 500**-0.5, gain=2**0.5, bias=False))
    return Trial(model, *task, SQUARED, Descent(shrinking=0.4), 200, stop=0.0)


def large_diagonal(seed: int, _: Any) -> Trial:
    task = tasks.sparse_linear(seed, 40, dimension=80)
    return Trial(net.DiagonalLinear(80, 20.0), *task, SQUARED, Descent(share=0.02), 400)


LINEAR = "the outputs are linear in the trained weights, so that the linearization is exact"
WIDE = "a wide network in the NTK parametrization follows its linearization up to 1 / sqrt(width) (Jacot et al. 2018)"
SCALED = (
    "the output is multiplied by 100 around a zero start, so that a change of order 1/100 of the weights fits the "
    "targets (Chizat et al. 2019)"
)

CONSTRUCTIONS = (
    Construction("linear model", "lazy", LINEAR, linear_model, ("squared error", "cross-entropy"), 2),
    Construction("random features", "lazy", LINEAR, random_features, ("momentum", "Adam"), 2),
    Construction("random features, dropout", "lazy", LINEAR, dropout_features),
    Construction("frozen body", "lazy", LINEAR, frozen_body, ("MLP", "CNN"), 2),
    Construction(
        "BatchNorm before the only trained layer",
        "lazy",
        LINEAR + "; only averages settle",
        normed_features,
        ("MLP", "CNN"),
        4,
    ),
    Construction("NTK parametrization, squared error", "lazy", WIDE, ntk_wide, (256, 512, 1024), 2),
    Construction("NTK parametrization, cross-entropy", "lazy", WIDE, ntk_cross_entropy),
    Construction("NTK parametrization, one output", "lazy", WIDE, ntk_one_output),
    Construction("output x 100, MLP", "lazy", SCALED, scaled_mlp, seeds=4),
    Construction("output x 100, Adam, mini-batches", "lazy", SCALED, scaled_adam),
    Construction("output x 100, CNN", "lazy", SCALED, scaled_cnn),
    Construction("output x 100, transformer", "lazy", SCALED, scaled_transformer, ("SGD", "Adam"), 2),
    Construction("output x 100, LayerNorm", "lazy", SCALED, scaled_layer_norm),
    Construction("output x 100, BatchNorm in the body", "lazy", SCALED, scaled_batch_norm),
    Construction(
        "output x 100 or NTK, multi-label BCE", "lazy", SCALED + " or " + WIDE, scaled_bce, ("output x 100", "NTK"), 2
    ),
    Construction("output x 100, one output, mini-batches", "lazy", SCALED, scaled_one_output),
    Construction(
        "targets / 100, zero start",
        "lazy",
        "on squared error targets divided by 100 are an output multiplied by 100 (Chizat et al. 2019)",
        small_targets,
    ),
    Construction(
        "output x 300, constant in the targets",
        "lazy",
        SCALED.replace("100", "300") + "; the constant is 5",
        lazy_constant,
    ),
    Construction(
        "weight decay, random features",
        "lazy",
        LINEAR + ", with or without weight decay",
        lazy_weight_decay,
        ("random features",),
    ),
    Construction(
        "weight decay, NTK parametrization",
        "lazy",
        "both layers shrink by the same factor, which multiplies the kernel and does not turn it; around the "
        "shrunken start the wide network is linear",
        lazy_weight_decay,
        ("NTK",),
    ),
    Construction(
        "diagonal linear network, large weights",
        "lazy",
        "weights of 20 change by 1/800 to fit coefficients of order one (Woodworth et al. 2020)",
        large_diagonal,
    ),
)
