"""Gradients of outputs with respect to preactivations, df/dh for h = W x, for some samples at a time."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from featlearn.errors import UnsupportedModelError
from featlearn.gradients.formed import preactivation_gradients
from featlearn.linear_maps.weight_matrices import WeightMatrices, WeightMatrix, weight_matrices
from featlearn.measurement import Measurement
from featlearn.network.checks import matching
from featlearn.network.inputs import ModelWithInputs


class PreactivationGradients:
    """Captured samples [begin, end) of a batch."""

    def __init__(
        self, measurement: Measurement, batch: ModelWithInputs, begin: int, end: int, like: WeightMatrices
    ) -> None:
        self._chunk = measurement.chunk(batch, begin, end)
        measurement.confirm(self._chunk)
        self._matrices = weight_matrices(self._chunk, like)

    def weight_matrix(self, name: str) -> WeightMatrix:
        """Return the weight of this name, with its uses for these samples."""
        matrices = self._matrices
        if name not in matrices.by_name:
            reason = matrices.left_out.get(name, "only some of the samples use it")
            raise UnsupportedModelError(f"{name} cannot be measured on all samples: {reason}; exclude it with layers=")
        return matrices.by_name[name]

    def at(self, names: Sequence[str], direction: Tensor) -> Mapping[str, Tensor]:
        """Return gradients of direction . f with respect to h, (samples, positions, units), by name.

        `direction` is (C,), or (samples, C).
        """
        matrices = {name: self.weight_matrix(name) for name in names}
        readings = [reading for matrix in matrices.values() for reading in matrix.readings]
        gradients = iter(preactivation_gradients(self._chunk, readings, direction))
        result = {}
        for name, matrix in matrices.items():
            joined = torch.cat([next(gradients) for _ in matrix.readings], 1)
            result[name] = joined if matrix.units is None else joined[..., matrix.units]
        return result


def select_layers(weight_matrices: WeightMatrices, layers: str | Sequence[str] | None) -> list[str]:
    """Return the names of weights that the globs match, by weight name or layer name."""
    if layers is None:
        if not weight_matrices.by_name:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in weight_matrices.left_out.items())
            raise UnsupportedModelError(f"the model has no trainable weights that multiply their inputs. {reasons}")
        return list(weight_matrices.by_name)
    unread = {name.rpartition(".")[0]: name for name in weight_matrices.left_out} | {
        name: name for name in weight_matrices.left_out
    }
    owners = {matrix.layer for matrix in weight_matrices.by_name.values()}
    names = list(dict.fromkeys([*weight_matrices.by_name, *sorted(owners), *unread]))
    matched = set(matching(names, layers, "layers", "layer"))
    selected = [name for name, matrix in weight_matrices.by_name.items() if name in matched or matrix.layer in matched]
    if not selected:
        name = unread[next(name for name in names if name in matched)]
        raise UnsupportedModelError(f"{name} is not a linear map: {weight_matrices.left_out[name]}")
    return selected
