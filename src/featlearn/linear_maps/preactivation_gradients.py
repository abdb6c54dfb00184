"""Gradients of the outputs at layers' preactivations: df/dh for h = W x, some samples at a time."""

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
    """The samples [begin, end) of a batch, captured."""

    def __init__(
        self, measurement: Measurement, batch: ModelWithInputs, begin: int, end: int, like: WeightMatrices
    ) -> None:
        self._chunk = measurement.chunk(batch, begin, end)
        measurement.confirm(self._chunk)
        self._matrices = weight_matrices(self._chunk, like)

    def weight_matrix(self, name: str) -> WeightMatrix:
        """The weight of this name and where these samples met it."""
        found = self._matrices
        if name not in found.found:
            reason = found.left_out.get(name, "only some of the samples use it")
            raise UnsupportedModelError(
                f"{name} cannot be measured on all samples: {reason}; leave it out with layers="
            )
        return found.found[name]

    def at(self, names: Sequence[str], direction: Tensor) -> Mapping[str, Tensor]:
        """Gradients of direction . f with respect to h: (samples, positions, units) for every name.

        `direction` is (C,), or (samples, C).
        """
        chosen = {name: self.weight_matrix(name) for name in names}
        readings = [reading for one in chosen.values() for reading in one.readings]
        arrived = iter(preactivation_gradients(self._chunk, readings, direction))
        found = {}
        for name, one in chosen.items():
            whole = torch.cat([next(arrived) for _ in one.readings], 1)
            found[name] = whole if one.units is None else whole[..., one.units]
        return found


def chosen_layers(found: WeightMatrices, layers: str | Sequence[str] | None) -> list[str]:
    """Names of the weights that the globs match, by their own names or by those of their layers."""
    if layers is None:
        if not found.found:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in found.left_out.items())
            raise UnsupportedModelError(f"the model has no trainable weights that multiply their inputs. {reasons}")
        return list(found.found)
    unread = {name.rpartition(".")[0]: name for name in found.left_out} | {name: name for name in found.left_out}
    owners = {one.layer for one in found.found.values()}
    names = list(dict.fromkeys([*found.found, *sorted(owners), *unread]))
    matched = set(matching(names, layers, "layers", "layer"))
    chosen = [name for name, one in found.found.items() if name in matched or one.layer in matched]
    if not chosen:
        name = unread[next(name for name in names if name in matched)]
        raise UnsupportedModelError(f"{name} is not read as a linear map: {found.left_out[name]}")
    return chosen
