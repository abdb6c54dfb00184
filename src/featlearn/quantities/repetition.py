"""A kernel of a network that was measured before, on as many samples.

What follows from its graph is known: how it is read, what it costs. What may have changed with the weights or the
samples is asked for as in every call (six samples are run alone and found again among all of them), but waited for
once, at the end. Where an answer is not as it should be, nothing is taken over, and the kernel is measured as if for
the first time.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from featlearn.capture.admission import admitted, unwrapped
from featlearn.capture.coupling import expect_same_outputs
from featlearn.capture.isolation import Isolation, undisturbed
from featlearn.capture.measurement import Measurement
from featlearn.capture.memory import recalled
from featlearn.capture.pilots import PILOT, fixed_generator, spread
from featlearn.capture.probe import Inputs, Probe, Readout, tensors_in
from featlearn.capture.recipe import Recipe, recipe_of
from featlearn.capture.sightings import Sightings, Unconfirmed, mixed, sightings
from featlearn.capture.snapshot import Snapshot
from featlearn.linalg.collapse import Collapse
from featlearn.linalg.gram import Route
from featlearn.linalg.later import Later
from featlearn.quantities.blocks import Captured, Kernels, add_kernels, empty_kernels, kernel_keys
from featlearn.quantities.budget import byte_budget
from featlearn.quantities.directions import Directions, Outputs
from featlearn.quantities.plan import Plan


@dataclass(frozen=True)
class _Known:
    """What a call has found."""

    few: Recipe
    """Of the samples that are run alone."""
    all: Recipe
    plan: Plan
    directions: Directions
    dtype: torch.dtype
    rows: Tensor
    """All directions, where they are needed and as they are needed."""
    mixture: Tensor
    """Something of each of them, which the few are asked for."""
    routes: Mapping[str, Route]
    collapsed: frozenset[str] | None
    """Parameters for which one direction stands for all, if they may."""

    @property
    def device(self) -> torch.device:
        """Where the outputs are."""
        return self.rows.device


# Calls with a few kinds of arguments for each network.
_MOST = 8
_ROUTES = {route.value for route in Route}
_calls: WeakKeyDictionary[nn.Module, dict[Hashable, _Known]] = WeakKeyDictionary()


@dataclass
class _Patience:
    """Calls that did not repeat themselves are tried again after a while, and then more and more seldom."""

    failures: int = 0
    wait: int = 0

    def is_spent(self) -> bool:
        """Whether this call is not worth a try."""
        self.wait -= 1
        return self.wait >= 0

    def learn(self, succeeded: bool) -> None:
        """Wait twice as long after every failure."""
        self.failures = 0 if succeeded else self.failures + 1
        self.wait = 0 if succeeded else 2**self.failures


_patience: WeakKeyDictionary[nn.Module, dict[Hashable, _Patience]] = WeakKeyDictionary()


@dataclass
class Call:
    """The arguments of one call."""

    model: nn.Module
    x: Inputs
    outputs: Outputs
    readout: Readout | None
    by: str
    parameters: str | Sequence[str] | None
    memory: str | int | None
    _made: _Known | None = None

    def again(self) -> Kernels | None:
        """The kernels, if a call like this one was made before and all is as it was; None otherwise."""
        earlier = _calls.get(self.model) if isinstance(self.model, nn.Module) else None
        try:
            known = earlier.get(self._key) if earlier else None
        except (TypeError, RuntimeError):  # arguments that will be refused
            known = None
        if known is None:
            return None
        patience = _patience.setdefault(self.model, {}).setdefault(self._key, _Patience())
        if patience.is_spent():
            return None
        try:
            kernels = self._kernels(known)
        except Exception:  # what it means is said by the call that begins from the start
            kernels = None
        patience.learn(kernels is not None)
        return kernels

    @cached_property
    def _key(self) -> Hashable:
        """What calls must share."""
        globs = self.parameters if isinstance(self.parameters, str | None) else frozenset(self.parameters)
        shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors_in(self.x))
        plain = (self.outputs, self.by, globs, self.memory)
        return (shapes, plain, tuple(map(type, plain)))  # 1, 1.0 and True are equal

    def _kernels(self, known: _Known) -> Kernels | None:
        parameters, (samples,) = admitted(self.model, [self.x], self.readout, self.parameters)
        scratch = _scratch(known.plan, self.memory, known.device)
        if scratch == 0:
            return None
        later = Later()
        with undisturbed(self.model) as isolation:
            kernels = self._asked(known, parameters, samples, isolation, scratch, later)
            if not later.hold():
                return None
            isolation.state.settle()
        return kernels

    def _asked(
        self, known: _Known, parameters: Mapping[str, Tensor], samples: int, isolation: Isolation, scratch: int,
        later: Later,
    ) -> Kernels:  # fmt: skip
        """The kernels, with everything that has to hold for them asked for."""
        probe = Probe(self.model, self.x, samples, self.readout, isolation.rewind, waiting=False)
        whole = Snapshot(probe, slice(0, samples), parameters, fixed_generator(), {}, recipe=known.all)
        whole.later, places = later, spread(samples)

        def alone() -> Sightings:
            outputs = probe.outputs(places)
            expect_same_outputs(later, whole, outputs.detach(), places)
            nodes = known.few.nodes(outputs, parameters)
            return sightings(outputs, nodes, known.few.used(nodes), known.mixture)

        whole.unconfirmed = Unconfirmed(places, alone)
        kernels = _added(known, whole, kernel_keys(parameters, self.by), scratch, later)
        isolation.state.expect_unchanged(later)
        return kernels

    def made(
        self, measurement: Measurement, whole: Snapshot, plan: Plan, directions: Directions, collapse: Collapse | None
    ) -> None:
        """Take note of a kernel that was measured in one chunk."""
        pilot = measurement.pilots[0]
        usual = self.model is unwrapped(self.model) and isinstance(self.outputs, str | int)
        at_once = len(plan.groups) == 1 and plan.groups[0].directions >= directions.count
        if not usual or not at_once or whole.count <= 3 * PILOT or pilot.graph is None or whole.graph is None:
            return
        same = pilot.access.keys() == whole.access.keys() and not measurement.distrusted
        if not same or recalled(self.model, pilot.graph) is None:  # nothing that was not audited
            return
        few, everything = recipe_of(pilot.graph, pilot.access), recipe_of(whole.graph, whole.access)
        if few is not None and everything is not None:
            rows = directions.rows(slice(0, directions.count)).to(whole.outputs)
            # On a CPU positions without gradient are left out, which the plan does not know of.
            planned = {p.name: p.route for p in plan.parameters if p.route in _ROUTES and rows.is_cuda}
            routes = {name: Route(route) for name, route in planned.items()}
            collapsed = None if collapse is None else frozenset(collapse.found)
            for name in collapsed or ():
                routes.pop(name, None)
            self._made = _Known(
                few, everything, plan, directions, measurement.dtype, rows, mixed(rows), routes, collapsed
            )

    def remember(self) -> None:
        """Keep what was noted, now that all went well."""
        if self._made is not None:
            kept = _calls.setdefault(self.model, {})
            kept[self._key] = self._made
            while len(kept) > _MOST:
                oldest = next(iter(kept))
                del kept[oldest]
                _patience.get(self.model, {}).pop(oldest, None)


def _added(known: _Known, whole: Snapshot, keys: dict[str, str], scratch: int, later: Later) -> Kernels:
    mode, count = known.directions.mode, known.directions.count
    kernels = empty_kernels(keys, known.plan.kernel_shape, mode, known.dtype, known.device)

    def capture(probe: Probe, block: slice) -> Captured:
        del probe, block
        collapse = None if known.collapsed is None else Collapse(known.collapsed, later)
        names, apart = known.plan.groups[0].names, mode == "each"
        return whole.each_gradient(names, known.rows, collapse=collapse, apart=apart)

    chosen = slice(0, count)
    add_kernels(
        kernels, keys, (whole.probe,), whole.count, chosen, mode, scratch, capture, later=later, routes=known.routes
    )
    tiny = torch.finfo(known.dtype).tiny
    for kernel in kernels.values():
        if known.directions.divisor != 1:
            kernel /= known.directions.divisor
        later.expect(lambda low, high: tiny <= max(-low, high) < math.inf and -math.inf < low, *kernel.aminmax())
    return kernels


def _scratch(plan: Plan, memory: str | int | None, device: torch.device) -> int:
    """Bytes for temporaries, 0 if there is less memory than the plan needs."""
    if memory is not None:
        return plan.scratch  # granted as before
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] // 2 >= 0.9 * plan.memory:
        return plan.scratch
    budget = byte_budget(memory, device)
    if budget >= 0.9 * plan.memory:
        return plan.scratch
    return min(plan.scratch, budget // 10) if budget > 4 * plan.peak else 0
