"""A measurement: the network admitted, isolated, piloted on a few samples, then captured chunk by chunk."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from featlearn.capture.admission import admitted, unwrapped
from featlearn.capture.coupling import draws, refuse_difference
from featlearn.capture.coverage import disputed
from featlearn.capture.graph import backward
from featlearn.capture.isolation import Isolation, undisturbed
from featlearn.capture.pilots import PILOT, Pilots, counterparts, fixed_generator
from featlearn.capture.precision import cast_inputs, copied, needs_copy
from featlearn.capture.probe import Inputs, Probe, Readout
from featlearn.capture.sightings import Unconfirmed
from featlearn.capture.snapshot import Snapshot
from featlearn.capture.uses import Pattern
from featlearn.errors import CoupledSamplesError
from featlearn.ops import is_built_in


@dataclass(frozen=True)
class Measurement:
    """A network and its probes, ready to be captured."""

    model: nn.Module
    parameters: Mapping[str, Tensor]
    originals: Mapping[str, Tensor]
    """The user's own parameters under the same names: `parameters` may be copies in another precision."""
    probes: tuple[Probe, ...]
    pilots: tuple[Snapshot, ...]
    distrusted: dict[str, str]
    rounding: float
    """How large the terms are that the outputs are made of."""
    audit_anew: Callable[[], float] | None = None
    """Audits the pilots and gives `rounding`; None where that has been done, and not taken from an earlier call."""
    graphs: list[bool] = field(default_factory=list)
    """Whether the outputs carried a gradient, for every capture so far."""
    last: dict[tuple[int, int, int], Snapshot] = field(default_factory=dict)
    """The last capture, if `remembering`: several quantities of the same samples then share it."""
    remembering: bool = False

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

    def snapshot(self, probe: Probe, begin: int, end: int, first: Tensor | None = None) -> Snapshot:
        """Samples [begin, end) of a probe, captured, and checked for coupling.

        `first`: a mixture (C,) of the directions that will be asked for first. The sample axes of the pilot are then
        taken over where the graph is the same, and confirmed by those passes against a smaller batch, instead of passes
        to find them.
        """
        key = (id(probe), begin, end)
        if key in self.last:
            return self.last[key]
        self.last.clear()
        if self.graphs and not gc.isenabled():
            gc.collect(1)  # what earlier chunks have left
        generator = fixed_generator()
        indices = torch.arange(begin, end, device="cpu")
        drawn, again, pattern, seen = self._run_before(probe, indices, first, generator)
        expected = pattern if seen else None
        found = Snapshot(probe, indices, self.parameters, generator, self.distrusted, lambda _: expected)
        found.unconfirmed = seen if found.assumed else None
        found.audit_anew = self._distrusted_now
        self.graphs.append(found.graph is not None)
        self._refuse_differences(found, drawn, again)
        if unchecked := self._unchecked(found):
            reasons = disputed(found, unchecked, generator)
            self.distrusted.update(reasons)
            found.distrust(reasons)
        if self.remembering:
            self.last[key] = found
        return found

    def _run_before(
        self, probe: Probe, indices: Tensor, first: Tensor | None, generator: torch.Generator
    ) -> tuple[list[Tensor], list[Tensor], Pattern | None, Unconfirmed | None]:
        """Some samples of a chunk in smaller batches, before it, so that one graph is held at a time: their places,
        outputs, and, with a `first` direction, sample axes and gradients."""
        pilot = next((pilot for pilot in self.pilots if pilot.probe is probe), None)
        small = len(indices) <= 3 * PILOT
        if self.audit_anew and first is not None and pilot and len(indices) == probe.samples and not small:
            # The network is known, and the pilot has run some of these samples already.
            seen = None if pilot.graph is None else _seen_by(pilot, pilot.indices, first)
            return [pilot.indices], [pilot.outputs.detach()], pilot.pattern, seen
        # Small chunks are checked whole, since the overhead of a pass outweighs its work; of large ones a sixteenth.
        drawn = draws(len(indices), generator, thorough=small)
        pattern = None if pilot is None else pilot.pattern
        again, seen = [], None
        for batch in drawn:
            if first is not None and seen is None and len(indices) > 1 and pattern is not None:
                outputs, pattern, seen = self._seen(probe, indices, batch, first, pattern, generator)
            else:
                outputs = probe.outputs(indices[batch]).detach()
            again.append(outputs)
        return drawn, again, pattern, seen

    def _distrusted_now(self) -> Mapping[str, str]:
        """What an audit of these weights distrusts; raises if it finds samples coupled."""
        if self.audit_anew is not None:
            self.audit_anew()
        return self.distrusted

    def _refuse_differences(self, found: Snapshot, drawn: Sequence[Tensor], again: Sequence[Tensor]) -> None:
        rounding = self.rounding
        for batch, outputs in zip(drawn, again, strict=True):
            try:
                refuse_difference(found, outputs, batch, rounding)
            except CoupledSamplesError:
                if self.audit_anew is None:
                    raise
                # The weights may have grown since, and with them what is rounding.
                rounding = max(rounding, self.audit_anew())
                refuse_difference(found, outputs, batch, rounding)

    def _seen(
        self, probe: Probe, indices: Tensor, places: Tensor, direction: Tensor, pattern: Pattern,
        generator: torch.Generator,
    ) -> tuple[Tensor, Pattern | None, Unconfirmed | None]:  # fmt: skip
        """Outputs, sample axes (with what the pilot left open) and gradients of some of the samples alone."""
        chosen = indices[places]
        small = Snapshot(probe, chosen, self.parameters, generator, self.distrusted, lambda _: pattern, exemplary=True)
        seen = None if small.graph is None else _seen_by(small, places, direction)
        return small.outputs.detach(), small.pattern, seen

    def _unchecked(self, snapshot: Snapshot) -> list[str]:
        """Parameters that the pilot's samples do not use, and those read by rules that are not built in."""
        seen = {name for pilot in self.pilots for name in pilot.access}
        return [
            name
            for name, access in snapshot.access.items()
            if access.refusal is None and (name not in seen or not all(is_built_in(node) for node in access.uses.nodes))
        ]

    def outputs(self, probe: Probe, chunk: int = 256) -> Tensor:
        """(P, C) outputs of all samples, without a graph."""
        return torch.cat([probe.outputs(indices).detach() for indices in self._chunks(probe, chunk)])

    def pulled_back(self, probe: Probe, cotangent: Tensor, chunk: int = 256) -> dict[str, Tensor]:
        """J^T v for v of shape (P, C): the gradient of sum_i v_i . f_i, by plain backward passes over chunks."""
        totals = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        for indices in self._chunks(probe, chunk):
            outputs = probe.outputs(indices)
            if outputs.requires_grad:
                chosen = cotangent[indices.to(cotangent.device)].to(outputs)
                for name, gradient in zip(
                    totals, backward([outputs], list(self.parameters.values()), [chosen]), strict=True
                ):
                    if gradient is not None:
                        totals[name] += gradient.detach()
        return totals

    @staticmethod
    def _chunks(probe: Probe, chunk: int) -> tuple[Tensor, ...]:
        pieces: tuple[Tensor, ...] = torch.arange(probe.samples, device="cpu").split(chunk)
        return pieces


def _seen_by(small: Snapshot, places: Tensor, direction: Tensor) -> Unconfirmed:
    """What a smaller batch sees now: it is gone when the larger one has run."""
    seen = small.sightings(direction)
    return Unconfirmed(places, lambda: seen, direction)


@contextmanager
def measuring(
    model: nn.Module, inputs: Sequence[Inputs], *, readout: Readout | None = None,
    parameters: str | Sequence[str] | None = None, dtype: torch.dtype | None = None,
    audited_before: Measurement | None = None, remembering: bool = False, recalling: bool = False,
) -> Iterator[Measurement]:  # fmt: skip
    """Admit, isolate and pilot; everything measured inside leaves no trace on the user's model.

    `audited_before`: an earlier measurement of the same model and probes, whose audit is not made again. `recalling`:
    the audit of an earlier call serves again if the graph is the same.
    """
    originals, sizes = admitted(model, inputs, readout, parameters)
    model = unwrapped(model)
    with ExitStack() as stack:
        isolation = stack.enter_context(undisturbed(model))
        twin = copied(model, dtype) if needs_copy(model, dtype) else model
        if twin is not model:
            isolation = stack.enter_context(undisturbed(twin))
        measurement = _piloted(
            twin, model, originals, inputs, sizes, readout, dtype, isolation, audited_before, remembering, recalling
        )
        stack.callback(measurement.last.clear)  # it leads back here: its memory would wait for the collector
        yield measurement


def _piloted(
    model: nn.Module, original: nn.Module, originals: Mapping[str, Tensor], inputs: Sequence[Inputs],
    sizes: Sequence[int], readout: Readout | None, dtype: torch.dtype | None, isolation: Isolation,
    audited_before: Measurement | None, remembering: bool, recalling: bool,
) -> Measurement:  # fmt: skip
    parameters = originals
    if model is not original:
        parameters = dict(zip(originals, counterparts(original, model, originals), strict=True))
    probes = tuple(
        Probe(model, cast_inputs(x, dtype), size, readout, isolation.rewind, name)
        for x, size, name in zip(inputs, sizes, ("x", "x2"), strict=False)
    )
    pilots = Pilots(model, original, originals, parameters, isolation, recalling)
    pilots.run(probes)
    if audited_before is None:
        pilots.audit()
    else:
        pilots.trust_less(audited_before.distrusted)
        pilots.rounding = audited_before.rounding
    known = audited_before is None and pilots.recalled_any
    return Measurement(
        model, parameters, originals, probes, tuple(pilots.snapshots), pilots.distrusted, pilots.rounding,
        (lambda: pilots.rounding_now) if known else None, remembering=remembering,
    )  # fmt: skip
