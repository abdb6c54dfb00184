"""Code shared by figures of Atanasov et al. 2022 about linear networks: a task, weights, moments, and trends."""

import numpy
import torch
from torch import Tensor

from featlearn.models import MLP
from featlearn_papers.frame.runs import Array


def whitened_task(samples: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """X (P, D) with X^T X / P = 1, y = X beta, and beta of length 1."""
    drawn = torch.randn(samples, inputs, generator=generator, dtype=torch.float64)
    left, _, right = torch.linalg.svd(drawn, full_matrices=False)
    beta = torch.randn(inputs, generator=generator, dtype=torch.float64)
    beta /= beta.norm()
    X = samples**0.5 * left @ right
    return X, X @ beta, beta


def random_weights(
    inputs: int, width: int, weight_layers: int, sigma: float, generator: torch.Generator
) -> list[Tensor]:
    """Of a linear network with one output, N(0, sigma^2 / fan_in), in double, first layer first."""
    model = MLP(
        inputs,
        None,
        width=width,
        hidden_layers=weight_layers - 1,
        activation="linear",
        weight_variance=sigma**2,
        generator=generator,
    ).double()
    return [weight.detach().clone() for weight in model.parameters()]


def dense_times(first: float, end: float, moments: int) -> Tensor:
    """From 0 to an end, dense on a linear and, from `first` on, on a logarithmic axis."""
    half = moments // 2
    grid = [numpy.linspace(0, end, moments - half + 1), numpy.geomspace(first, 0.999 * end, half)]
    return torch.as_tensor(numpy.sort(numpy.concatenate(grid)))


def rising(values: Array, axis: int = -1) -> Array:
    """(S,): whether values (S, ...) increase along an axis, everywhere."""
    up = (numpy.diff(values, axis=axis) > 0).reshape(len(values), -1)
    return numpy.array([bool(row.all()) for row in up])
