"""A measurement: the network admitted, isolated, piloted on a few samples, then captured chunk by chunk."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from featlearn.capture.admission import (
    refuse_other_device,
    refuse_other_dtype,
    refuse_unmeasurable,
    trainable_parameters,
    unwrapped,
)
from featlearn.capture.coupling import refuse_coupled
from featlearn.capture.coverage import disputed
from featlearn.capture.isolation import undisturbed
from featlearn.capture.precision import cast_inputs, copied, needs_copy
from featlearn.capture.probe import Inputs, Probe, Readout, batch_size
from featlearn.capture.snapshot import Snapshot
from featlearn.errors import InputTypeError, InputValueError, UnsupportedModelError

# Samples in the pilot: enough to tell samples from positions, few enough to cost little.
PILOT = 5


@dataclass(frozen=True)
class Measurement:
    """A network and its probes, ready to be captured."""

    model: nn.Module
    parameters: Mapping[str, Tensor]
    originals: Mapping[str, Tensor]
    """The user's own parameters under the same names: `parameters` may be copies in another precision."""
    probes: tuple[Probe, ...]
    pilots: tuple[Snapshot, ...]
    distrusted: Mapping[str, str]

    @property
    def classes(self) -> int:
        """How many outputs the network has."""
        return self.pilots[0].outputs.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which kernels are accumulated."""
        return self.pilots[0].accumulate

    @property
    def device(self) -> torch.device:
        """Where the outputs, and so the kernels, live."""
        return self.pilots[0].outputs.device

    def snapshot(self, probe: Probe, begin: int, end: int) -> Snapshot:
        """Samples [begin, end) of a probe, captured; two of them, run again by themselves, must not differ."""
        generator = _generator()
        indices = torch.arange(begin, end, device="cpu")
        found = Snapshot(probe, indices, self.parameters, generator, self.distrusted)
        refuse_coupled(found, generator, thorough=False)
        return found


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


@contextmanager
def measuring(
    model: nn.Module, inputs: Sequence[Inputs], *, readout: Readout | None = None,
    parameters: str | Sequence[str] | None = None, dtype: torch.dtype | None = None,
) -> Iterator[Measurement]:  # fmt: skip
    """Admit, isolate and pilot; everything measured inside leaves no trace on the user's model."""
    given, model = model, unwrapped(model)
    if readout is not None and not callable(readout):
        raise InputTypeError(f"readout is {readout!r}, expected a function of the model's output, or of (output, x)")
    sizes = [batch_size(x, name) for x, name in zip(inputs, ("x", "x2"), strict=False)]
    refuse_unmeasurable(model)
    originals = trainable_parameters(given, parameters)
    for x, name in zip(inputs, ("x", "x2"), strict=False):
        refuse_other_device(model, x, name)
        if dtype is None:
            refuse_other_dtype(model, x, name)
    with undisturbed(model) as rewind:
        twin = copied(model, dtype) if needs_copy(model, dtype) else model
        if twin is model:
            yield _piloted(model, model, originals, inputs, sizes, readout, dtype, rewind)
        else:
            with undisturbed(twin):
                yield _piloted(twin, model, originals, inputs, sizes, readout, dtype, rewind)


def _counterparts(original: nn.Module, twin: nn.Module, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The parameters of a copy that stand where these stand in the original."""
    places = {id(p): name for name, p in original.named_parameters()}
    found = dict(twin.named_parameters())
    return [found[places[id(p)]] for p in parameters.values()]


def _piloted(
    model: nn.Module, original: nn.Module, originals: Mapping[str, Tensor], inputs: Sequence[Inputs],
    sizes: Sequence[int], readout: Readout | None, dtype: torch.dtype | None, rewind: Callable[[], None],
) -> Measurement:  # fmt: skip
    parameters = dict(zip(originals, _counterparts(original, model, originals), strict=True))
    probes = tuple(
        Probe(model, cast_inputs(x, dtype), size, readout, rewind) for x, size in zip(inputs, sizes, strict=True)
    )
    versions = {name: parameter._version for name, parameter in parameters.items()}
    generator = _generator()
    pilots: list[Snapshot] = []
    distrusted: dict[str, str] = {}
    for probe in probes:
        pilot = Snapshot(probe, torch.arange(min(PILOT, probe.samples), device="cpu"), parameters, generator, {})
        _refuse_pilot(pilot, {id(p) for p in originals.values()} - {id(p) for p in parameters.values()})
        refuse_coupled(pilot, generator, thorough=True)
        distrusted |= disputed(pilot, generator)
        pilots.append(pilot)
    if len({pilot.outputs.shape[1] for pilot in pilots}) > 1:
        raise InputValueError(
            f"the model gives {pilots[0].outputs.shape[1]} outputs on x and {pilots[1].outputs.shape[1]} on x2, "
            "expected the same number; pass a readout= that makes them equal"
        )
    rewritten = [name for name, parameter in parameters.items() if parameter._version != versions[name]]
    if rewritten:
        raise UnsupportedModelError(
            f"a forward pass in eval mode rewrites {', '.join(rewritten[:5])}; expected a model that only reads its "
            "weights (embeddings with max_norm do this)"
        )
    return Measurement(model, parameters, originals, probes, tuple(pilots), distrusted)


def _refuse_pilot(pilot: Snapshot, foreign: set[int]) -> None:
    graph = pilot.graph
    if graph is None:
        raise InputValueError(
            "the outputs carry no gradient: they are detached, or computed under no_grad inside the model; expected "
            "outputs that depend on the trainable parameters through differentiable operations"
        )
    if graph.variables & foreign:
        raise UnsupportedModelError(
            "a copy of the model still reaches the weights of the original (through a closure or a hook), so it cannot "
            "be measured in another precision; convert the model itself, model.double(), and measure that"
        )
