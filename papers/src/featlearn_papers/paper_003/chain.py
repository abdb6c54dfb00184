"""The chain monomial and the networks that learn it, as in Fig. 1, 4 and 11 of Beaglehole et al. 2024."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import featlearn as fl
from featlearn.models import MLP
from featlearn.quantities.layer_features import LayerFeatures
from featlearn_papers.frame.context import Context


class ChainTask(NamedTuple):
    """Samples to learn from, unseen ones, and the expected gradient outer product of the target."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    egop: Tensor


def chain(context: Context, samples: int, unseen: int, dimension: int, degree: int = 5) -> ChainTask:
    """Isotropic inputs (P, d) and targets (P,) of variance 1, from the seed's first stream."""
    data = fl.data.chain_monomial(samples + unseen, dimension, degree, generator=context.generator())
    assert data.egop is not None
    x, y = data.x.to(context.device), data.y.to(context.device)
    return ChainTask(x[:samples], y[:samples], x[samples:], y[samples:], data.egop.to(context.device))


def network(
    context: Context, task: ChainTask, width: int, scale: float, readout: float = 1.0, *, layers: str = "hidden.0"
) -> MLP:
    """Build two hidden ReLU layers without biases, initialized as torch does; scale some layers and the readout."""
    model = MLP(
        task.x.shape[1],
        None,
        width=width,
        hidden_layers=2,
        distribution="uniform",
        weight_variance=1 / 3,
        generator=context.generator(1),
    ).to(context.device)
    fl.steer.scale_init(model, scale, layers=layers)
    return fl.steer.scale_init(model, readout, layers="readout")


def first_layer(model: MLP, x: Tensor, initial: dict[str, Tensor] | None = None) -> LayerFeatures:
    """The features of the first layer.

    In double: in single precision some gate in some of the many measurements is too near to zero to be told.
    """
    return fl.neural_features(model, x, initial=initial, layers="hidden.0", dtype=torch.float64)["hidden.0"]


def squared_error(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Averaged over samples."""
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def descend(
    model: torch.nn.Module, task: ChainTask, optimizer: torch.optim.Optimizer, steps: int, at: Callable[[int], None]
) -> None:
    """Full-batch steps; `at(step)` is called before the first and after each."""
    at(0)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        squared_error(model, task.x, task.y).backward()
        optimizer.step()
        at(step)
