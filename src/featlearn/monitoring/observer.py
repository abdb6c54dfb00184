"""Measurements of one run, each compared with the first and with the previous one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from featlearn.audited_model import AuditedModel
from featlearn.errors import CoupledSamplesError, FeatlearnError
from featlearn.monitoring.numbers import Names
from featlearn.monitoring.probe_data import WatchedNetwork
from featlearn.monitoring.ranks import Ranks
from featlearn.monitoring.records import Record, RecordContext, probe
from featlearn.monitoring.schedule import ScheduledQuantity
from featlearn.monitoring.step_measurement import (
    Baseline,
    RunMemory,
    measured_step,
    sizes_of,
)
from featlearn.monitoring.work import FEWEST, FIRST, Budget, forward_work, quantity_work
from featlearn.network.copies import network_at
from featlearn.readouts import DefaultReadout, LogProbability
from featlearn.record import Run

if TYPE_CHECKING:
    from featlearn.monitoring.shared_measurement import SharedMeasurement


class Observation(NamedTuple):
    """Result of one measurement."""

    record: Record
    failures: list[tuple[ScheduledQuantity, Exception]]
    outputs: Tensor
    """(P, C), on the CPU."""
    change: dict[str, list[str]] | None = None
    """Names of parameters "added" to the trained ones and "removed" from them since the last measurement."""
    undivided: str | None = None
    """Why this rank has measured alone what all ranks should have measured together."""


WITH_LAST_ARRAYS = {"kernel", "test", "optimizer", "pictures"}
"""Quantities that record more at the last measurement than in the middle of a run."""


class Observer:
    """Measures a network on its probe, step after step."""

    def __init__(self, watched: WatchedNetwork, names: Names) -> None:
        self.watched, self.names = watched, names
        self.baseline: Baseline | None = None
        self._audited = AuditedModel(watched.model, readout=watched.readout)
        self._memory = RunMemory.of(watched)
        self._first: Sequence[ScheduledQuantity] = ()
        self._previous: tuple[int, Tensor] | None = None
        self.latest: tuple[int, set[str]] = (-1, set())
        """The step of the latest measurement, and the quantities that were measured."""
        self._past: Run | None = None
        self.shared: SharedMeasurement | None = None
        """The ranks that may measure together; None for a single one."""

    def observe(
        self, step: int, chosen: Sequence[ScheduledQuantity], *, end: bool = False, last: bool = False
    ) -> Observation:
        """Measure the network as it is now."""
        change = self._follow_trained_set()
        return self._observe(self.watched, step, chosen, end, last)._replace(change=change)

    def _follow_trained_set(self) -> dict[str, list[str]] | None:
        """Compare with the start of the run by the same parameters, if others are trained now; return the change."""
        before, now = self._memory, RunMemory.of(self.watched)
        if self.baseline is not None and before.names == now.names:
            return None
        self._memory = now
        if self.baseline is None:
            return None
        if self.watched.initial:
            self.observe_start(self._first, end=False)
        else:
            self.baseline = None
        self._previous = self._past = None
        self.latest = (-1, set())
        return {
            "added": [name for name in now.names if name not in before.names],
            "removed": [name for name in before.names if name not in now.names],
        }

    def settle_readout(self) -> None:
        """Choose the default readout by what the model gives for a few samples.

        Targets that the readout compares outputs with are no targets of the outputs.
        """
        watched = self.watched
        with self._audited.measuring([watched.probe.x]):
            pass
        readout = watched.readout or self._audited.audits.default
        if isinstance(readout, DefaultReadout | LogProbability):
            test = None if watched.test is None else watched.test.read_by(readout)
            self.watched = replace(watched, readout=readout, probe=watched.probe.read_by(readout), test=test)

    def settle(self, budget: Budget, chosen: Sequence[ScheduledQuantity], *, reduce: bool) -> None:
        """Tell the budget the work of each quantity; `reduce` the probe until the first measurement is affordable."""
        watched, names = self.watched, {quantity.name for quantity in chosen}
        with self._audited.measuring([watched.probe.x]) as measurement:
            device, stride = measurement.device.type, 1
            while True:
                part = watched.reduced(stride)
                sizes = sizes_of(part, measurement.classes)
                work = quantity_work(measurement, sizes, ends=True)
                first = sum(work[name] for name in names & work.keys())
                affordable = first <= FIRST.get(device, FIRST["cpu"])
                if not reduce or affordable or watched.probe.samples // (2 * stride) < FEWEST:
                    break
                stride *= 2
            work = quantity_work(measurement, sizes, ends=False)
            budget.begin(work, first, forward_work(measurement), device)
            if self.shared is not None:
                self.shared.work = work["kernel"]
        self.watched = part if reduce else watched

    def observe_start(self, chosen: Sequence[ScheduledQuantity], *, end: bool = True) -> Observation:
        """Measure the network at the start of the run; later measurements are compared with it."""
        start = replace(self.watched, model=network_at(self.watched.model, self.watched.initial), optimizer=None)
        self.baseline, self._previous = None, None
        return self._observe(start, 0, chosen, end, False)

    def share(self, ranks: Ranks) -> None:
        """From now on ranks may measure together."""
        if ranks.size > 1:
            from featlearn.monitoring.shared_measurement import SharedMeasurement

            self.shared = SharedMeasurement(ranks, self.watched, self._audited)

    def missing_at_end(self, step: int, chosen: Sequence[ScheduledQuantity]) -> Sequence[ScheduledQuantity]:
        """Return what is to be measured at the last step, of these: what has no arrays of a last measurement yet."""
        latest, measured = self.latest
        return [one for one in chosen if latest != step or one.name not in measured or one.name in WITH_LAST_ARRAYS]

    def follow(self, past: Run) -> None:
        """Take the previous kernel from a resumed run on disk."""
        self._past, self._previous = past, None

    def _before(self, step: int) -> tuple[int, Tensor] | None:
        """Step and kernel of the measurement before this step; None if unknown."""
        if self._previous is not None or self._past is None:
            return self._previous
        earlier = [number for number in self._past.arrays.get("kernel", ()) if number < step]
        if not earlier:
            return None
        try:
            kernel = torch.from_numpy(self._past.array("kernel", earlier[-1])["mean"])
        except (FeatlearnError, KeyError):  # damaged: skip one number rather than stop
            return None
        return (earlier[-1], kernel) if kernel.shape == (self.watched.probe.samples,) * 2 else None

    def synchronize(self) -> None:
        """Wait for pending device work, so that it is not counted as measuring."""
        if self._on_gpu:
            torch.cuda.synchronize()

    @property
    def _on_gpu(self) -> bool:
        return any(p.device.type == "cuda" for p in self.watched.model.parameters())

    def _observe(
        self, watched: WatchedNetwork, step: int, chosen: Sequence[ScheduledQuantity], end: bool, last: bool
    ) -> Observation:
        audited = self._audited
        if watched.model is not audited.model:
            audited = AuditedModel(watched.model, readout=watched.readout)
        context = RecordContext(self.names, end, last, self._before(step))
        failures: list[tuple[ScheduledQuantity, Exception]] = []
        shared = self.shared if audited is self._audited else None
        arguments = {"step": step, "memory": self._memory, "end": end, "shared": shared}
        with measured_step(watched, audited, baseline=self.baseline, **arguments) as now:
            record = probe(now, context)
            for one in chosen:
                try:
                    record.add(one.read(now, context))
                except CoupledSamplesError:
                    raise
                except Exception as error:
                    failures.append((one, error))
            measured = {one.name for one in chosen} - {one.name for one, _ in failures}
            if self.baseline is None:
                self._first = chosen
                self.baseline = now.as_baseline(kernel="kernel" in measured, layers="layers" in measured)
            if "kernel" in measured:
                self._previous = (step, now.kernel)
            self.latest = (step, measured)
            outputs = now.outputs
        undivided = None if shared is None else shared.untold_failure()
        return Observation(record, failures, outputs, undivided=undivided)
