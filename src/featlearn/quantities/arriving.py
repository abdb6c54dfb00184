"""Gradients of the outputs as they arrive at layers: df/dh for h = W x, some samples at a time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture.admission import matching
from featlearn.capture.measurement import Measurement, measuring
from featlearn.capture.probe import Inputs, Probe, Readout, map_tensors
from featlearn.capture.projections import Projection, Projections, projections
from featlearn.errors import FeatlearnError, InputValueError, UnsupportedModelError


class Arriving:
    """The samples [begin, end) of a probe, captured."""

    def __init__(self, measurement: Measurement, probe: Probe, begin: int, end: int, like: Projections) -> None:
        self._snapshot = measurement.snapshot(probe, begin, end)
        self._projections = projections(self._snapshot, like)

    def projection(self, name: str) -> Projection:
        """The weight of this name and where these samples met it."""
        found = self._projections
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
        chosen = {name: self.projection(name) for name in names}
        readings = [reading for one in chosen.values() for reading in one.readings]
        arrived = iter(self._snapshot.arriving(readings, direction))
        found = {}
        for name, one in chosen.items():
            whole = torch.cat([next(arrived) for _ in one.readings], 1)
            found[name] = whole if one.units is None else whole[..., one.units]
        return found


@contextmanager
def measured_layers(
    model: nn.Module, inputs: Sequence[Inputs], readout: Readout | None, dtype: torch.dtype | None, **options: Any
) -> Iterator[Measurement]:
    """A measurement whose ops keep the weights they meet: its inputs need gradients, where the model bears it."""

    def change(tensor: Tensor) -> Tensor:
        # No leaf: a model may write to its input.
        tensor = tensor.clone() if tensor.is_inference() else tensor
        return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor

    with ExitStack() as stack:
        try:
            with torch.inference_mode(False), torch.enable_grad():
                needing = [map_tensors(x, change) for x in inputs]
            measurement = stack.enter_context(measuring(model, needing, readout=readout, dtype=dtype, **options))
        except FeatlearnError:
            measurement = stack.enter_context(measuring(model, inputs, readout=readout, dtype=dtype, **options))
        if measurement.pilots[0].graph is None:
            raise InputValueError("the outputs carry no gradient, expected some that depend on trainable parameters")
        yield measurement


def chosen_layers(found: Projections, layers: str | Sequence[str] | None) -> list[str]:
    """Names of the projections that the globs match, by their own names or by those of their layers."""
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


def sample_chunk(measurement: Measurement, room: float) -> int:
    """How many samples may be captured at once in so many bytes."""
    # Activations, their gradients and what an op needs while it runs.
    each = max(3 * pilot.graph.output_bytes / len(pilot.indices) for pilot in measurement.pilots if pilot.graph)
    return max(1, min(1024, int(room // (each + 1))))
