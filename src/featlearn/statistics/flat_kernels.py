"""Tangent kernels of a model as float64 matrices, whose rows are pairs of a sample and an output."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from featlearn.audited_model import AuditedModel
from featlearn.errors import InputValueError
from featlearn.network.checks import trainable_parameters, unwrapped
from featlearn.network.inputs import Inputs, batch_size, map_tensors
from featlearn.planning.memory import byte_budget
from featlearn.quantities.ntk import ntk_of

ROUNDING = 1e-12
"""Negative part of a covariance that rounding in double explains, relative to the prior variance."""


@dataclass(frozen=True)
class FlatKernels:
    """Kernels of one model, by layer or of the whole network (key `""`)."""

    audited: AuditedModel
    by: Literal["network", "layer"]

    def outputs(self, x: Inputs) -> Tensor:
        """Return the outputs (P, C), in float64."""
        with self.audited.measuring([x]) as measurement:
            (batch,) = measurement.batches
            return measurement.outputs(batch).double()

    def matrices(self, x: Inputs, x2: Inputs | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield each key with its kernel (P C, P2 C)."""
        measured = ntk_of(self.audited, x2, x=x, outputs="full", by=self.by)
        kernels = {"": measured} if isinstance(measured, Tensor) else dict(measured)
        for key in list(kernels):
            kernel = kernels.pop(key)
            rows, columns, outputs, _ = kernel.shape
            yield key, kernel.permute(0, 2, 1, 3).double().reshape(rows * outputs, columns * outputs)

    def weighted(self, precisions: Mapping[str, float], x: Inputs, x2: Inputs | None = None) -> Tensor:
        """Return sum_l K_l / precision_l, (P C, P2 C)."""
        total = None
        for key, kernel in self.matrices(x, x2):
            kernel /= precisions[key]
            total = kernel if total is None else total.add_(kernel)
        assert total is not None
        return total

    def squares(self) -> dict[str, float]:
        """Return the squared norm of the selected weights of each key."""
        totals: dict[str, float] = {}
        selected = trainable_parameters(unwrapped(self.audited.model), self.audited.request.parameters)
        for name, parameter in selected.items():
            key = name.rpartition(".")[0] if self.by == "layer" else ""
            totals[key] = totals.get(key, 0.0) + float(parameter.detach().abs().double().square().sum())
        return totals

    def state(self) -> dict[str, Tensor]:
        """Return the weights and buffers of the model; they share its memory."""
        state = unwrapped(self.audited.model).state_dict()
        return {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}

    def byte_budget(self) -> int:
        """Return how many bytes a call may take."""
        return byte_budget(self.audited.request.memory, next(iter(self.audited.model.parameters())).device)


def positive_part(covariance: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (..., n) and vectors (..., n, n) of covariances, with negative rounding set to zero.

    Raise an error if an eigenvalue is more negative than rounding of numbers of size `scale` explains; by default, of
    the largest eigenvalue.
    """
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    scale = float(values.max()) if scale is None else scale
    if not float(values.min()) >= -ROUNDING * scale:
        raise InputValueError(
            f"a variance of {float(values.min()):.3g} is left of {scale:.3g}: it is lost in rounding, expected one >= "
            "0; measure with dtype=torch.float64, or raise the noise or the precision"
        )
    return values.clamp(min=0.0), vectors


def transposed_product(roots: Tensor, matrix: Tensor) -> Tensor:
    """Return L^T M for block-diagonal L, with blocks (P, C, C) in `roots`, and a matrix M (P C, n)."""
    samples, outputs, _ = roots.shape
    return torch.bmm(roots.mT, matrix.reshape(samples, outputs, -1)).reshape(samples * outputs, -1)


def rows_of(x: Inputs, rows: slice) -> Inputs:
    """Return some of the samples of a batch; what all samples share is kept."""
    samples = batch_size(x)
    return map_tensors(x, lambda tensor: tensor[rows] if tensor.dim() and len(tensor) == samples else tensor)
