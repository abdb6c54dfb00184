"""The pilots of a measurement: a few samples run first, to be refused, or read and audited.

An audit that an earlier call has made of the same graph is taken over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from featlearn.capture.coverage import Audit, audited
from featlearn.capture.graph import Graph, build_graph
from featlearn.capture.isolation import Isolation, undisturbed
from featlearn.capture.memory import Remembered, recalled, remember
from featlearn.capture.precision import cast_inputs, copied, kept_results
from featlearn.capture.probe import Probe
from featlearn.capture.snapshot import Snapshot
from featlearn.capture.uses import Pattern
from featlearn.errors import CoupledSamplesError, FeatlearnError, InputValueError, UnsupportedModelError

# Samples in a pilot: enough to tell samples from positions, few enough to cost little.
PILOT = 6


def fixed_generator() -> torch.Generator:
    """Chance that is the same in every measurement."""
    return torch.Generator("cpu").manual_seed(0)


@dataclass
class Pilots:
    """The pilots of all probes, and what is known of their graphs."""

    model: nn.Module
    original: nn.Module
    """The user's own, of which `model` may be a copy in another precision."""
    originals: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    isolation: Isolation
    recalling: bool
    """Whether audits of earlier calls serve again."""
    snapshots: list[Snapshot] = field(default_factory=list)
    distrusted: dict[str, str] = field(default_factory=dict)
    rounding: float = 0.0
    _earlier: list[Remembered | None] = field(default_factory=list)
    _generator: torch.Generator = field(default_factory=fixed_generator)

    def run(self, probes: Sequence[Probe]) -> None:
        """Run a few samples of every probe, and refuse what cannot be measured."""
        names = dict(self.model.named_parameters())
        foreign = {id(p) for p in self.originals.values()} - {id(p) for p in self.parameters.values()}
        for probe in probes:
            self._earlier.append(None)
            indices = torch.arange(probe.samples, device="cpu")[spread(probe.samples)]
            pilot = Snapshot(probe, indices, self.parameters, self._generator, {}, self._expected, exemplary=True)
            _refuse_rewriting(self.model, names, self.isolation)
            _refuse_pilot(pilot, foreign)
            if self.model is not self.original:
                _refuse_lost(self.original, self.originals, pilot)
            if not pilot.assumed:
                self._earlier[-1] = None
            self.snapshots.append(pilot)
        outputs = [pilot.outputs.shape[1] for pilot in self.snapshots]
        if len(set(outputs)) > 1:
            raise InputValueError(
                f"the model gives {outputs[0]} outputs on x and {outputs[1]} on x2, expected the same number; pass a "
                "readout= that makes them equal"
            )

    def _expected(self, graph: Graph) -> Pattern | None:
        """The sample axes that an earlier audit of this graph has found."""
        earlier = self._earlier[-1] = recalled(self.original, graph) if self.recalling else None
        return None if earlier is None else earlier.pattern

    def audit(self) -> None:
        """Audit every pilot that was not audited in an earlier call."""
        for pilot, earlier in zip(self.snapshots, self._earlier, strict=True):
            found = earlier or self._audited(pilot)
            self.distrusted |= found.distrusted
            self.rounding = max(self.rounding, found.rounding)
        self.trust_less(self.distrusted)

    def trust_less(self, reasons: Mapping[str, str]) -> None:
        """Send parameters to the fallback, in all pilots."""
        self.distrusted.update(reasons)
        for pilot in self.snapshots:
            pilot.distrust(self.distrusted)

    @property
    def recalled_any(self) -> bool:
        """Whether anything of an earlier call was taken over."""
        return any(self._earlier)

    @cached_property
    def rounding_now(self) -> float:
        """How large the terms of the outputs are by an audit of the weights as they are, which is made when asked."""
        found = [self._audited(pilot) for pilot in self.snapshots]
        for one in found:
            self.trust_less(one.distrusted)
        return max(one.rounding for one in found)

    def _audited(self, pilot: Snapshot) -> Remembered:
        found = _audit(self.model, pilot.probe, pilot, self.originals, self.original, self._generator)
        _refuse_underflow(found.largest, pilot.accumulate)
        # A pilot that distrusts parameters already does not look at them again.
        kept = Remembered(pilot.pattern, {**self.distrusted, **found.distrusted}, found.rounding)
        # Readings of gradients that vanish (behind weights that begin at zero) have not been checked.
        if pilot.graph is not None and self.recalling and not found.vanishing:
            remember(self.original, pilot.graph, kept)
        return kept


def counterparts(original: nn.Module, twin: nn.Module, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The parameters of a copy that stand where these stand in the original."""
    places = {id(p): name for name, p in original.named_parameters()}
    found = dict(twin.named_parameters())
    return [found[places[id(p)]] for p in parameters.values()]


def _audit(
    model: nn.Module, probe: Probe, pilot: Snapshot, originals: Mapping[str, Tensor], original: nn.Module,
    generator: torch.Generator,
) -> Audit:  # fmt: skip
    try:
        return audited(pilot, generator)
    except CoupledSamplesError:
        if not _independent_in_double(model, probe, pilot, originals, original):
            raise
        return audited(pilot, generator, coupling=False)


def _independent_in_double(
    model: nn.Module, probe: Probe, pilot: Snapshot, originals: Mapping[str, Tensor], original: nn.Module
) -> bool:
    """A second opinion on samples that seem coupled: in single precision an activation that is zero but for rounding
    has one sign in one batch and another in the next, and its gradient jumps."""
    if pilot.outputs.dtype == torch.float64:
        return False
    try:
        twin = copied(model, torch.float64)
        with undisturbed(twin) as isolation:
            x = cast_inputs(probe.x, torch.float64)
            doubled = Probe(twin, x, probe.samples, probe.readout, isolation.rewind, probe.name)
            parameters = dict(zip(originals, counterparts(original, twin, originals), strict=True))
            audited(Snapshot(doubled, pilot.indices, parameters, fixed_generator(), {}), fixed_generator())
    except FeatlearnError:
        return False
    return True


def spread(samples: int) -> slice:
    """A few samples from everywhere, at equal distances: data may be sorted."""
    count = min(PILOT, samples)
    step = max(1, (samples - 1) // max(count - 1, 1))
    return slice(0, step * (count - 1) + 1, step)


def _refuse_rewriting(model: nn.Module, before: Mapping[str, Tensor], isolation: Isolation) -> None:
    """A forward pass that sets weights (max_norm, initialisation from data) or makes new ones."""
    after = dict(model.named_parameters())
    rewritten = isolation.state.rewritten()
    changed = [name for name in {**before, **after} if after.get(name) is not before.get(name)]
    changed = changed or [name for name, parameter in before.items() if id(parameter) in rewritten]
    if changed:
        raise UnsupportedModelError(
            f"a forward pass in eval mode rewrites {', '.join(changed[:5])}, expected a model that only reads its "
            "weights; run it once on a batch of your own if it initialises itself from data"
        )


def _refuse_underflow(largest: float, dtype: torch.dtype) -> None:
    """Gradients whose squares are not numbers of this precision any more would give a kernel of zeros."""
    if 0.0 < largest < torch.finfo(dtype).tiny ** 0.5:
        raise InputValueError(
            f"the largest gradient is {largest:.1e}, whose square {str(dtype).removeprefix('torch.')} cannot hold; "
            "measure with dtype=torch.float64, or scale the outputs with readout="
        )


def _refuse_lost(original: nn.Module, originals: Mapping[str, Tensor], pilot: Snapshot) -> None:
    """Parameters that act through a result computed once and kept: a copy of the model keeps its value alone."""
    for kept in kept_results(original):
        reached = build_graph(kept, originals).leaves
        lost = [name for name in reached if name not in pilot.access]
        if lost:
            raise UnsupportedModelError(
                f"{', '.join(lost[:5])} act through a tensor that the model computed once and keeps, which a copy in "
                "another precision cannot follow; convert the model itself, model.double(), and measure that"
            )


def _refuse_pilot(pilot: Snapshot, foreign: set[int]) -> None:
    graph = pilot.graph
    if graph is not None and graph.variables & foreign:
        raise UnsupportedModelError(
            "a copy of the model still reaches the weights of the original (through a closure or a hook), so it cannot "
            "be measured in another precision; convert the model itself, model.double(), and measure that"
        )
