"""A kernel of a network that was measured before, on as many samples.

What follows from its graph is known: how it is read, what it costs. What may have changed with the weights or the
samples is asked for as in every call (six samples are run alone and found again among all of them), but waited for
once, at the end; of plain networks less is asked. Where an answer is not as it should be, nothing is taken over, and
the kernel is measured as if for the first time.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from featlearn.capture.admission import admitted, unwrapped
from featlearn.capture.coupling import expect_finite, expect_same_outputs
from featlearn.capture.isolation import Isolation, undisturbed
from featlearn.capture.measurement import Measurement
from featlearn.capture.memory import recalled
from featlearn.capture.pilots import PILOT, fixed_generator, spread
from featlearn.capture.plain import is_plain
from featlearn.capture.probe import Inputs, Probe, Readout, tensors_in
from featlearn.capture.recipe import Recipe, recipe_of
from featlearn.capture.sightings import Sightings, Unconfirmed, mixed, sightings
from featlearn.capture.snapshot import Snapshot
from featlearn.linalg.collapse import Collapse
from featlearn.linalg.gram import Route, in_memory_order
from featlearn.linalg.later import Later
from featlearn.linalg.matrices import RowGrams, tiles_ahead
from featlearn.linalg.rates import LITTLE
from featlearn.ops import Outer
from featlearn.quantities.blocks import Captured, Kernels, add_kernels, empty_kernels, kernel_block, kernel_keys
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
    one_by_one: bool
    """Whether directions are captured and multiplied one after the other."""

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
        scratch = _scratch(known.plan, self.memory, known.device)
        if scratch == 0:
            return None
        later = Later()
        with undisturbed(self.model, lambda parts: is_plain(parts, self.x, self.readout)) as isolation:
            # The GPU begins with what the first layer will need while the rest is prepared.
            ahead = tiles_ahead(self.x, scratch) if isolation.plain and known.directions.mode == "sum" else None
            kernels = self._asked(known, isolation, scratch, later, ahead)
            if not later.hold():
                return None
            isolation.state.settle()
        return kernels

    def _asked(self, known: _Known, isolation: Isolation, scratch: int, later: Later, ahead: Tensor | None) -> Kernels:
        """The kernels, with everything that has to hold for them asked for.

        `ahead`: inner products of the inputs, in tiles.
        """
        parameters, (samples,) = admitted(self.model, [self.x], self.readout, self.parameters)
        probe = Probe(self.model, self.x, samples, self.readout, isolation.rewind, waiting=False,
                      copying=not isolation.plain)  # fmt: skip
        whole = Snapshot(probe, slice(0, samples), parameters, fixed_generator(), {}, recipe=known.all)
        whole.later = later
        if isolation.plain:
            expect_finite(later, whole)
        else:
            whole.unconfirmed = self._unconfirmed(known, whole, later)
        tiled = {} if ahead is None else dict.fromkeys(_multiplied_by(whole, self.x), ahead)
        kernels = _added(known, whole, kernel_keys(parameters, self.by), scratch, later, tiled)
        isolation.state.expect_unchanged(later)
        return kernels

    def _unconfirmed(self, known: _Known, whole: Snapshot, later: Later) -> Unconfirmed:
        """Six samples that are yet to be run alone."""
        places = spread(whole.count)

        def alone() -> Sightings:
            outputs = whole.probe.outputs(places)
            expect_same_outputs(later, whole, outputs.detach(), places)
            nodes = known.few.nodes(outputs, whole.parameters)
            return sightings(outputs, nodes, known.few.used(nodes), known.mixture)

        return Unconfirmed(places, alone)

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
            one_by_one = directions.mode == "each" and _shares_rows(whole, directions.count)
            if one_by_one:
                routes = {p.name: Route.PAIRS for p in plan.parameters if p.route == Route.PAIRS.value}
            self._made = _Known(few, everything, plan, directions, measurement.dtype, rows, mixed(rows), routes,
                                collapsed, one_by_one)  # fmt: skip

    def remember(self) -> None:
        """Keep what was noted, now that all went well."""
        if self._made is not None:
            kept = _calls.setdefault(self.model, {})
            kept[self._key] = self._made
            while len(kept) > _MOST:
                oldest = next(iter(kept))
                del kept[oldest]
                _patience.get(self.model, {}).pop(oldest, None)


def _multiplied_by(whole: Snapshot, x: Tensor) -> list[str]:
    """Parameters that are used once, by the inputs as they are."""
    found = []
    for name, access in whole.access.items():
        if access.coordinates is not None and len(access.uses.readings) == 1:
            form = access.uses.readings[0].form
            rows = form.rows() if isinstance(form, Outer) else None
            if (
                isinstance(rows, Tensor)
                and rows.shape == (len(x), 1, 1, x.shape[1])
                and rows.data_ptr() == x.data_ptr()
            ):
                found.append(name)
    return found


def _added(
    known: _Known, whole: Snapshot, keys: dict[str, str], scratch: int, later: Later, tiled: Mapping[str, Tensor]
) -> Kernels:
    names, mode, count = known.plan.groups[0].names, known.directions.mode, known.directions.count
    kernels = empty_kernels(keys, known.plan.kernel_shape, mode, known.dtype, known.device)
    ends: dict[str, list[Tensor]] = defaultdict(list)

    def add(chosen: slice, captured: Captured, kept: defaultdict[str, RowGrams] | None = None) -> None:
        for kernel in kernels.values():
            kernel_block(kernel, mode, chosen).zero_()
        add_kernels(kernels, keys, (whole.probe,), whole.count, chosen, mode, scratch, lambda *_: captured,
                    later=later, routes=known.routes, kept=kept, tiled=tiled)  # fmt: skip
        for key, kernel in kernels.items():
            block = kernel_block(kernel, mode, chosen)
            if known.directions.divisor != 1:
                block /= known.directions.divisor
            if not block.is_cuda:  # at once, while it is in the cache
                ends[key] += in_memory_order(block).aminmax()

    if known.one_by_one:
        kept: defaultdict[str, RowGrams] = defaultdict(dict)
        for k, captured in enumerate(whole.each_direction(names, known.rows)):
            add(slice(k, k + 1), captured, kept)
    else:
        collapse = None if known.collapsed is None else Collapse(known.collapsed, later)
        captured = whole.each_gradient(names, known.rows, collapse=collapse, apart=mode == "each", last=True)
        add(slice(0, count), captured)
    used = {keys[name] for name in whole.access}  # the kernel of a parameter without use is zero
    for key, kernel in kernels.items():
        test = partial(_is_a_kernel, torch.finfo(known.dtype).tiny if key in used else 0.0)
        if kernel.is_cuda:
            later.expect_sizes(test, [in_memory_order(kernel)])
        else:
            later.expect(test, *ends[key])
    return kernels


def _is_a_kernel(tiny: float, *ends: float) -> bool:
    """Finite, and not too small to be right."""
    return all(map(math.isfinite, ends)) and max(map(abs, ends)) >= tiny


# That many gradients take longer to be put side by side than directions to be captured one by one.
_MANY_NUMBERS = 2**21


def _shares_rows(whole: Snapshot, directions: int) -> bool:
    """Whether the gradients of all directions are many numbers, and more than the inner products of rows, which are
    kept where one direction is captured after the other.

    A GPU captures all of them at once. With several positions other routes may be better, and positions are left out.
    """
    forms = [reading.form for access in whole.access.values() if access.coordinates is not None
             for reading in access.uses.readings]  # fmt: skip
    single = [form for form in forms if isinstance(form, Outer) and form.positions == 1]
    if whole.outputs.is_cuda or directions == 1 or not forms or len(single) < len(forms):
        return False
    gradients = directions * sum(form.blocks * form.grad_size for form in single)
    return whole.count * len(single) < gradients and whole.count * gradients > _MANY_NUMBERS


def _scratch(plan: Plan, memory: str | int | None, device: torch.device) -> int:
    """Bytes for temporaries, 0 if there is less memory than the plan needs."""
    if memory is not None or plan.peak < LITTLE:
        return plan.scratch  # granted as before, or there in any case: to ask takes time
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] // 2 >= 0.9 * plan.memory:
        return plan.scratch
    budget = byte_budget(memory, device)
    if budget >= 0.9 * plan.memory:
        return plan.scratch
    return min(plan.scratch, budget // 10) if budget > 4 * plan.peak else 0
