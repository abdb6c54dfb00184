"""Measurements of one run, each compared with the first and with the one before."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.errors import CoupledSamplesError, FeatlearnError
from featlearn.measurement import Measurement
from featlearn.quantities.neural_features import network_at
from featlearn.record import Run
from featlearn.watch.instruments import Instrument
from featlearn.watch.moment import Moment, Origin, audit_of, moment
from featlearn.watch.names import Names
from featlearn.watch.readings import Place, Reading, probe
from featlearn.watch.seen import Seen

COMPARED = {"features": 3.0}
"""Quantity -> how many times longer it takes once there is a start to compare with."""


class Observation(NamedTuple):
    """What one measurement gave."""

    reading: Reading
    failures: list[tuple[Instrument, Exception]]
    outputs: Tensor
    """(P, C), on the CPU."""
    costs: dict[str, float]
    """Seconds that each quantity will take in the middle of a run, by what it took now."""
    common: float
    """Seconds that all of them need, without the audit that only the first measurement makes."""


class Latest(NamedTuple):
    """What is kept of the latest measurement, lest it be the last."""

    step: int
    tried: set[str]
    """Names of the quantities."""
    read: set[str]
    """Those that could be read."""
    outputs: int
    """C"""


class Observer:
    """Reads the network through its probe, step after step."""

    def __init__(self, seen: Seen, names: Names) -> None:
        self.seen, self.names = seen, names
        self.origin: Origin | None = None
        self._audited: Measurement | None = None
        self._previous: tuple[int, Tensor] | None = None
        self.latest: Latest | None = None
        self._past: Run | None = None

    def observe(self, step: int, chosen: Sequence[Instrument], *, end: bool = False, last: bool = False) -> Observation:
        """The network as it is now."""
        return self._observe(self.seen, step, chosen, end, last)

    def observe_start(self, chosen: Sequence[Instrument], *, end: bool = True) -> Observation:
        """The network as it was when the run began; later measurements are compared with it."""
        start = replace(self.seen, model=network_at(self.seen.model, self.seen.initial), optimizer=None)
        before, self.origin, self._previous = self.origin, None, None
        found = self._observe(start, 0, chosen, end, False)
        origin: Origin | None = self.origin
        if origin is not None and before is not None and before.rates is not None:
            origin.rates = before.rates
        return found

    def follow(self, past: Run) -> None:
        """Of a run that goes on: the kernel before the next is on disk."""
        self._past, self._previous = past, None

    def _before(self, step: int) -> tuple[int, Tensor] | None:
        """Step and kernel of the measurement before this step, None where they are not known."""
        if self._previous is not None or self._past is None:
            return self._previous
        earlier = [number for number in self._past.arrays.get("kernel", ()) if number < step]
        if not earlier:
            return None
        try:
            kernel = torch.from_numpy(self._past.array("kernel", earlier[-1])["mean"])
        except (FeatlearnError, KeyError):  # damaged: a number less, and no reason to stop
            return None
        return (earlier[-1], kernel) if kernel.shape == (self.seen.probe.samples,) * 2 else None

    def synchronise(self) -> None:
        """Wait for what is under way: it is not measuring that takes this time."""
        if any(p.device.type == "cuda" for p in self.seen.model.parameters()):
            torch.cuda.synchronize()

    def _observe(self, seen: Seen, step: int, chosen: Sequence[Instrument], end: bool, last: bool) -> Observation:
        self.synchronise()
        try:
            return self._read(seen, step, chosen, end, last)
        except CoupledSamplesError:
            if self._audited is None:
                raise
            # Rounding may have grown since the first measurement; a new audit tells it from coupling.
            self._audited = None
            return self._read(seen, step, chosen, end, last)

    def _read(self, seen: Seen, step: int, chosen: Sequence[Instrument], end: bool, last: bool) -> Observation:
        begun = time.perf_counter()
        place = Place(self.names, end, last, self._before(step))
        failures: list[tuple[Instrument, Exception]] = []
        costs: dict[str, float] = {}
        with moment(seen, step, self.origin, self._audited) as now:
            begun = time.perf_counter() if self._audited is None else begun
            reading = probe(now, place)
            for one in chosen:
                started, before = time.perf_counter(), place.apart
                try:
                    reading.add(one.read(now, place))
                except CoupledSamplesError:
                    raise
                except Exception as error:
                    failures.append((one, error))
                costs[one.name] = time.perf_counter() - started - (place.apart - before)
            tried = {one.name for one in chosen}
            self._keep(now, Latest(step, tried, tried - {one.name for one, _ in failures}, now.outputs.shape[1]))
            outputs = now.outputs
        self.synchronise()
        common = time.perf_counter() - begun - sum(costs.values()) - place.apart
        if now.origin is None:
            costs = {name: cost * COMPARED.get(name, 1.0) for name, cost in costs.items()}
        return Observation(reading, failures, outputs, costs, common)

    def _keep(self, now: Moment, latest: Latest) -> None:
        step, read = latest.step, latest.read
        if self.origin is None:
            self.origin = now.as_origin(kernel="kernel" in read, layers="layers" in read)
        if "kernel" in read:
            self._previous = (step, now.kernel)
        self.latest = latest
        self._audited = audit_of(now)
