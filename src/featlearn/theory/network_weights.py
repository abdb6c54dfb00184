"""Weights of a network that a theory describes, read from its parameters and checked against its outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from featlearn.errors import InputTypeError, InputValueError
from featlearn.theory.network_path import Assumption, assumption, checked_data

AGREEMENT = 1e-4
"""Largest relative difference of outputs between a network and the formula of its weights, for float32 models."""


@dataclass(frozen=True)
class NetworkWeights:
    """A network f(x) = factor * W^L ... W^1 x + offset, with or without an activation between its layers."""

    layers: tuple[Tensor, ...]
    """Weight matrices (outputs, inputs) in double, first layer first, each times |factor|^(1/L): f has no factor."""
    x: Tensor
    """(P, D): inputs as rows."""
    targets: Tensor
    """(P,) or (P, C): the targets less the offset."""
    offset: Tensor
    """Constants added to the outputs, which no weight changes; as the targets. Zero but for centered outputs."""
    unit: float
    """|factor|^(2/L): rates in the weights of `layers` over rates in the network's own, and kernels likewise."""
    structure: Assumption

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return len(self.layers[-1])


def network_weights(
    model: nn.Module, x: Any, y: Any, activation: Callable[[Tensor], Tensor] | None, layers: int | None
) -> NetworkWeights:
    """Read the weights of a bias-free network of linear layers, and check its outputs against them.

    The layers are the trainable matrices in the order of `named_parameters()`. Factors in the forward pass and a
    constant that is subtracted from the outputs are found by doubling the last layer.

    Args:
        model: Module to read; it is not changed.
        x: Inputs (P, ...).
        y: Targets (P,) or (P, C).
        activation: What stands between two layers, or None.
        layers: Number of weight matrices that the theory describes, or None for any.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    rows, targets = checked_data(x, y)
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    vectors = [name for name, value in parameters.items() if value.dim() != 2]
    if vectors:
        raise InputValueError(
            f"the model trains {', '.join(vectors[:3])}, which no matrix of a linear layer is; this theory describes "
            "layers without biases: nn.Linear(..., bias=False)"
        )
    matrices = [value.detach().double() for value in parameters.values()]
    shapes = [tuple(matrix.shape) for matrix in matrices]
    if not matrices or shapes[0][1] != rows.shape[1] or any(a[0] != b[1] for a, b in pairwise(shapes)):
        raise InputValueError(
            f"the trained weights have shapes {', '.join(map(str, shapes)) or '()'}, expected layers (N1, "
            f"{rows.shape[1]}), (N2, N1), ... that follow one another"
        )
    if layers is not None and len(matrices) != layers:
        raise InputValueError(f"the model has {len(matrices)} weight layers, expected {layers} for this theory")
    plain = rows
    for index, matrix in enumerate(matrices):
        plain = plain @ matrix.T
        if activation is not None and index + 1 < len(matrices):
            plain = activation(plain)
    last = list(parameters)[-1]
    now = _outputs(model, x, {}, plain)
    moved = _outputs(model, x, {last: 2 * parameters[last].detach()}, plain) - now
    factor = float((moved * plain).sum() / plain.square().sum().clamp_min(torch.finfo(torch.float64).tiny))
    difference = float((moved - factor * plain).norm() / moved.norm().clamp_min(torch.finfo(torch.float64).tiny))
    offset = now - factor * plain
    constant = offset if float(offset.norm()) > AGREEMENT * float(moved.norm()) else torch.zeros_like(offset)
    if targets.reshape(len(rows), -1).shape != plain.shape:
        raise InputValueError(
            f"targets have shape {tuple(targets.shape)}, expected {tuple(plain.shape)}, as the outputs; pass one-hot "
            "targets for classes"
        )
    constant = constant.reshape(targets.shape)
    root = abs(factor) ** (1 / len(matrices))
    scaled = [root * matrix for matrix in matrices]
    scaled[-1] = scaled[-1] if factor >= 0 else -scaled[-1]
    form = "linear layers" if activation is None else f"linear layers with {activation.__name__} between them"
    return NetworkWeights(
        tuple(scaled),
        rows,
        targets - constant,
        constant,
        root**2,
        assumption(f"the network is {form}", difference, AGREEMENT, "difference of its outputs from the formula's"),
    )


@torch.no_grad()
def _outputs(model: nn.Module, x: Any, weights: dict[str, Tensor], like: Tensor) -> Tensor:
    """Return the outputs (P, C) in double, with some weights replaced."""
    buffers = {name: value.clone() for name, value in model.named_buffers()}  # a pass may write into them
    with torch.random.fork_rng(devices=[]):
        output: Tensor = functional_call(model, buffers | weights, (x,)).double()
    if output.numel() != like.numel():
        raise InputValueError(f"the model's output has shape {tuple(output.shape)}, expected {tuple(like.shape)}")
    return output.reshape(like.shape)
