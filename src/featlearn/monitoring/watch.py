"""The context manager around a training loop."""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from featlearn.errors import InputValueError, NotFiniteError, RunError
from featlearn.monitoring.allocation import Allocation
from featlearn.monitoring.description import description
from featlearn.monitoring.means import Means, numbers_of
from featlearn.monitoring.names import Names, safe_path
from featlearn.monitoring.observer import Observation, Observer
from featlearn.monitoring.probe_data import WatchedNetwork, kept_state
from featlearn.monitoring.ranks import Ranks, gathered_weights
from featlearn.monitoring.resumption import (
    cost_before,
    costs_before,
    measured_by_class,
    measured_steps,
    resumed,
    stored_state,
    trained_before,
)
from featlearn.monitoring.run_log import RunLog
from featlearn.monitoring.schedule import Schedule
from featlearn.monitoring.scheduled_quantities import ScheduledQuantity
from featlearn.monitoring.stopwatch import Stopwatch
from featlearn.record import Run, open_run
from featlearn.record.layout import USER, checked_step
from featlearn.record.replacement import replaced


class Watch:
    """A watched training run; created by `fl.watch`."""

    def __init__(
        self,
        watched: WatchedNetwork,
        path: Path,
        schedule: Schedule,
        budget: float | None,
        chosen: list[ScheduledQuantity],
        settings: Mapping[str, Any],
        sinks: Any,
        resume: bool,
        overwrite: bool = False,
    ) -> None:
        self.path = path
        """The directory of the run."""
        self.steps = 0
        """Number of training steps so far."""
        self._observer = Observer(watched, Names())
        self._schedule, self._quantities = schedule, chosen
        self._allocation, self._stopwatch = Allocation(budget, logarithmic=schedule.logarithmic), Stopwatch()
        self._settings, self._sinks, self._resume, self._overwrite = settings, sinks, resume, overwrite
        self._ranks: Ranks | None = None
        self._run_log: RunLog | None = None
        self._means = Means()
        self._probe: Mapping[str, Any] = {}  # its entry in run.json
        self._frequent: dict[str, int] = {}
        self._quantity_names: set[str] = set()
        """Names under which quantities of the user are recorded."""
        self._look_at = self._skipped = self._cost_known_from = 0
        self._clocked = 0.0  # seconds of measuring on the clock of costs
        self._waited = 0.0  # seconds of training that the device was still busy with
        self._trained_before = 0.0  # seconds, by the processes that this one resumes
        self._trained = 0.0  # total seconds when the current action began
        self._measured: set[int] = set()
        self._recorded = -1
        self._diverged = self._writes = self._over = False

    @property
    def run(self) -> Run:
        """What has been recorded so far."""
        return open_run(self.path)

    @property
    def measurements(self) -> int:
        """Number of measurements in the run, including those before a resume."""
        return len(self._measured - (self._run_log.missing if self._run_log is not None else set()))

    def assume_start(self, initial: Mapping[str, Any]) -> None:
        """Before entering: the state dict of step 0, in case that a resumed run was too large to store it."""
        self._observer.watched = replace(self._observer.watched, initial=initial)

    def __enter__(self) -> "Watch":
        if self._ranks is not None:
            raise InputValueError("this watch has been used already, expected a new one for every run")
        self._ranks, begun = Ranks(self.path), time.perf_counter()
        self._observer.share(self._ranks)
        with gathered_weights(self._observer.watched.model):
            if self._ranks.first:
                try:
                    self._begin()
                except BaseException as error:
                    message = f"rank 0 could not begin: {error}"
                    self._ranks.agreed(lambda: json.dumps([message, 0]))
                    raise
        refusal, begins = json.loads(self._ranks.agreed(lambda: json.dumps(["", self.steps])))
        if refusal:
            raise RunError(refusal)
        if begins > self.steps:  # rank 0 has found where a resumed run goes on
            self.steps = begins
            self._schedule.due(begins)
        self._writes = self._ranks.first
        self._stopwatch.begin(time.perf_counter() - begun)
        return self

    def step(self, loss: Any = None, *, step: int | None = None, **scalars: Any) -> None:
        """Call this after every optimizer step.

        Args:
            loss: the loss of this step. The mean since the last line, or since the run was resumed, is recorded.
            step: the number of this step, from 0; by default one more than before. It may go back to a checkpoint.
            scalars: your own numbers, for example accuracy on test data. Numbers passed at every step are averaged like
                the loss, others are recorded at once. They keep their names; a name that the run itself records, such
                as `ntk/alignment`, becomes `user/ntk/alignment` in `Run`.
        """
        if step is None and not scalars and self.steps + 1 < self._look_at:
            # The common case must take microseconds only.
            self.steps += 1
            if loss is not None and self._writes:
                self._means.add("loss", loss)
            return
        step = None if step is None else checked_step(step)
        ranks, begun, before = self._entered(), time.perf_counter(), self._stopwatch.measuring + self._waited
        went_back = step is not None and step <= self.steps  # to a checkpoint
        self._look_at = 0 if went_back else self._look_at
        self.steps = self.steps + 1 if step is None else step
        try:
            self._advance(ranks, loss, scalars)
        finally:
            rest = time.perf_counter() - begun - (self._stopwatch.measuring + self._waited - before)
            self._stopwatch.spent(rest)

    def _advance(self, ranks: Ranks, loss: Any, scalars: Mapping[str, Any]) -> None:
        if ranks.first:
            self._note(loss, scalars)
        if self.steps < self._look_at:
            return
        due = self._schedule.due(self.steps)
        wanted = [one for one in self._quantities if (due if one.schedule is None else one.schedule.due(self.steps))]
        with gathered_weights(self._observer.watched.model, needed=bool(wanted)):
            chosen, together = self._decided(ranks, wanted) if wanted else ([], False)
            if chosen:
                self._observer.act(ranks.first, lambda: self._spend(lambda: self._observed(chosen)), together)
        if ranks.first and due and not chosen:
            self._skipped += 1
            self._spend(lambda: self._write(self._line()))
        own = [one.schedule for one in self._quantities if one.schedule is not None]
        self._look_at = min(schedule.following for schedule in (self._schedule, *own))

    def log(self, loss: Any = None, **scalars: Any) -> None:
        """Record numbers at the current step at once."""
        if self._entered().first:
            numbers = numbers_of(self._user_numbers(scalars) | ({} if loss is None else {"loss": loss}))
            self._spend(lambda: self._write(numbers))

    def describe(self, /, **entries: Any) -> None:
        """Add entries to run.json."""
        if self._entered().first:
            self._written().describe(**entries)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        # A rank that ends with an error cannot ask the others for their part of the weights.
        if (ranks := self._ranks) is not None:
            observer = self._observer
            with gathered_weights(observer.watched.model, needed=error is None) as whole:
                together = observer.shared is not None and observer.shared.ends_together(error is None)
                observer.act(ranks.first, lambda: self._end(error, whole), together)
            if error is None:
                observer.close()
        self._over, self._look_at = True, 0
        return False

    def _end(self, error: BaseException | None, whole: bool) -> None:
        """Measure for the last time, if all weights are there, and close the run."""
        if self._run_log is not None:
            if error is not None:
                self._run_log.event("interrupted", self.steps, message=f"{type(error).__name__}: {error}"[:500])
            try:
                if whole:
                    self._last()
            except KeyboardInterrupt:  # a user who does not want to wait for it
                self._run_log.event("failed", self.steps, message="the last measurement was interrupted")
                if error is None:
                    raise
            finally:
                self._finish(error is None)

    def _begin(self) -> None:
        observer = self._observer
        if self._resume and (self.path / "run.json").exists() and open_run(self.path).lines:
            self._resume_run()
            return
        observer.watched = replace(observer.watched, initial=kept_state(observer.watched.model))
        found = observer.observe(0, self._quantities, end=True)
        self._drop_failing(found)
        self._quantity_names = {name for name in found.record.scalars if name.startswith(USER)}
        config = description(observer.watched, found.outputs, **self._settings)
        state, names = stored_state(observer.watched.initial)
        config |= {"layer_names": dict(observer.names), "initial": names, "name": config["name"] or self.path.name}
        with replaced(self.path, self._overwrite):
            self._probe = config["probe"]
        self._run_log = RunLog(self.path, config, resume=self._resume, sinks_=self._sinks)
        if self._resume:
            self._run_log.describe(**config)  # a run that was killed before its first line may have other entries
        self._run_log.event("started", 0)
        self._log_failures(found, 0)
        arrays = {**found.record.arrays, **({"initial": state} if state else {})}
        self._run_log.measurement(0, {**self._rate(), **found.record.scalars}, arrays, 0.0)
        self._measured.add(0)
        self._allocation.note(0, found.costs, found.common)

    def _resume_run(self) -> None:
        run = open_run(self.path)
        self._probe = run.config.get("probe", {})
        self._run_log = RunLog(self.path, {}, resume=True, sinks_=self._sinks)
        self.steps = max(self._run_log.last_step, 0)
        self._measured, self._trained_before = measured_steps(run), trained_before(run)
        cost = cost_before(run)
        self._cost_known_from = self.steps if cost is None else 0
        self._stopwatch.resume(cost)
        self._allocation.resume(costs_before(run), measured_by_class(run))
        resumed(self._observer, run)
        found = self._observer.observe_start(self._quantities, end=False) if self._observer.watched.initial else None
        if found is None:
            found = self._observer.observe(self.steps, self._quantities)
            self._run_log.warn_once(
                "resume",
                "the initial weights were too large to be stored, so distances from the "
                "start are unknown after a resume",
            )
        self._drop_failing(found)
        self._quantity_names = {name for name in found.record.scalars if name.startswith(USER)}
        self._observer.follow(run)
        self._schedule.due(self.steps)
        self._say_resumed(run)
        self._allocation.note(0, found.costs, found.common)

    def _say_resumed(self, run: Run) -> None:
        log, settings, before = self._written(), self._settings["settings"], run.config.get("settings")
        changed = settings is not None and settings != before
        log.event("resumed", self.steps, **({"settings_before": before} if changed else {}))
        # If this process is killed, the total cost is unknown.
        log.describe(
            finished=False,
            overhead=None,
            measuring=None,
            wall_share=None,
            **({"settings": settings} if changed else {}),
        )

    def _drop_failing(self, found: Observation) -> None:
        """Raise for quantities that fail at the start if the user asked for them; drop the others."""
        for one, error in found.failures:
            if one.asked or one.name == "kernel":
                raise error
            self._quantities.remove(one)

    def _entered(self) -> Ranks:
        if self._ranks is None or self._over or (self._ranks.first and self._run_log is None):
            raise InputValueError("the watch is not running; write: with fl.watch(...) as watch: and step inside")
        return self._ranks

    def _note(self, loss: Any, scalars: Mapping[str, Any]) -> None:
        numbers = self._user_numbers(scalars)
        if loss is not None:
            self._means.add("loss", loss)
        rare = {}
        for name, value in numbers.items():
            if self._frequent.get(name) == self.steps - 1:
                self._means.add(name, value)
            else:
                rare[name] = value
            self._frequent[name] = self.steps
        if rare:
            self._spend(lambda: self._write(numbers_of(rare)))

    def _user_numbers(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Numbers of the user, by the names under which they are recorded."""
        numbers = {USER + safe_path(name): value for name, value in scalars.items()}
        if taken := sorted(self._quantity_names & numbers.keys()):
            name = taken[0].removeprefix(USER)
            raise InputValueError(
                f"{name!r} is passed as a number of a step, but one of your quantities records a number of that name; "
                "rename one of them"
            )
        return numbers

    def _decided(self, ranks: Ranks, wanted: list[ScheduledQuantity]) -> tuple[list[ScheduledQuantity], bool]:
        """The quantities to measure now, and whether all ranks do it together; decided by rank 0."""

        def decide() -> str:
            names = self._decision(wanted)
            asked = time.perf_counter()
            together = self._observer.divides(names)
            self._waited += time.perf_counter() - asked  # other ranks may still train
            return json.dumps([names, together])

        names, together = json.loads(ranks.agreed(decide))
        return [one for one in wanted if one.name in names], together

    def _decision(self, wanted: list[ScheduledQuantity]) -> list[str]:
        if self._allocation.timed_now(self.steps, self._observer.clock() - self._clocked):
            stride = self._allocation.stride(self._observer.watched.probe.samples)
            self._allocation.thin(stride)
            if stride > 1 and self._observer.watched.initial:
                self._spend(lambda: self._thin(stride))
            self._written().describe(costs=self._allocation.entry)
        return [one.name for one in self._allocation.chosen(self.steps, wanted)]

    def _thin(self, stride: int) -> None:
        log, observer = self._written(), self._observer
        observer.watched = observer.watched.thinned(stride)
        found = observer.observe_start(self._quantities)
        self._probe = {**self._probe, "measured": observer.watched.probe.samples}
        log.describe(thinned=observer.watched.stride, probe=self._probe)
        log.event("thinned", self.steps, samples=observer.watched.probe.samples, stride=observer.watched.stride)
        log.measurement(0, found.record.scalars, found.record.arrays, 0.0)

    def _spend(self, act: Callable[[], None]) -> None:
        """Run an action and count its time as measuring."""
        asked = time.perf_counter()
        self._observer.synchronize()
        begun, clock = time.perf_counter(), self._observer.clock()
        self._waited += begun - asked
        # what a step takes beside training is known when it ends: counted until then, it must not make seconds fall
        self._trained = max(self._trained, self._trained_before + self._stopwatch.training)
        try:
            act()
        finally:
            self._stopwatch.spent(time.perf_counter() - begun)
            self._clocked += self._observer.clock() - clock

    def _observed(self, chosen: Sequence[ScheduledQuantity], *, last: bool = False) -> None:
        log, numbers = self._written(), self._line()
        try:
            found = self._observer.observe(self.steps, chosen, end=last, last=last)
        except Exception as error:
            self._failed("measurement", error, self.steps)
            self._write(numbers)
            return
        self._log_failures(found, self.steps)
        log.recovered({"measurement", *(one.name for one in chosen)} - {one.name for one, _ in found.failures})
        self._allocation.note(self.steps, found.costs, found.common)
        self._check(numbers)
        log.measurement(self.steps, {**numbers, **found.record.scalars}, found.record.arrays, self._trained)
        self._measured.add(self.steps)
        self._recorded = self.steps

    def _log_failures(self, found: Observation, step: int) -> None:
        for one, error in found.failures:
            self._failed(one.name, error, step)
        if found.undivided is not None:
            self._written().failure("undivided", "ranks", step, found.undivided, message=found.undivided)

    def _failed(self, what: str, error: Exception, step: int) -> None:
        kind = "diverged" if isinstance(error, NotFiniteError) else "failed"
        nothing = f"nothing could be measured at step {step}"
        words = nothing if what == "measurement" else f"{what} could not be measured"
        said = f"{type(error).__name__}: {error}"[:2000]
        self._written().failure(kind, what, step, f"{words}: {error}", message=said)

    def _line(self) -> dict[str, float]:
        """Means since the last line, and the current learning rate."""
        return {**self._rate(), **self._means.taken()}

    def _rate(self) -> dict[str, float]:
        optimizer = self._observer.watched.optimizer
        return {} if optimizer is None else {"lr": float(optimizer.param_groups[0]["lr"])}

    def _write(self, numbers: Mapping[str, float]) -> None:
        self._written().scalars(self.steps, numbers, self._trained)
        self._check(numbers)

    def _check(self, numbers: Mapping[str, float]) -> None:
        log = self._written()
        if not math.isfinite(numbers.get("loss", 0.0)) and not self._diverged:
            self._diverged = True
            log.event("diverged", self.steps, what="loss", value=str(numbers["loss"]))
            log.warn_once("diverged", f"the loss is {numbers['loss']} at step {self.steps}")

    def _written(self) -> RunLog:
        assert self._run_log is not None
        return self._run_log

    def _last(self) -> None:
        chosen = self._observer.missing_at_end(self.steps, self._recorded, self._quantities)
        if chosen and self.steps and self._measured:
            self._spend(lambda: self._observed(chosen, last=True))

    def _finish(self, finished: bool) -> None:
        log, cost = self._written(), self._stopwatch.cost
        summary = {
            "measurements": self.measurements,
            "overhead": cost.overhead,
            "measuring": cost.measuring,
            "wall_share": cost.wall_share,
        }
        if self._skipped:
            log.event("skipped", self.steps, count=self._skipped, reason="budget")
        log.count_repeats(self.steps)
        log.event("finished", self.steps, complete=finished, last_line=log.last_line, **summary)
        log.describe(finished=finished, steps=self.steps, **summary)
        log.close()
        lost = f", {log.not_written} entries not written" if log.not_written else ""
        since = f", since step {self._cost_known_from}" if self._cost_known_from else ""
        print(
            f"featlearn: {self.measurements} measurements in {self.steps} steps, "
            f"{cost.summary(self._allocation.share)}{since}{lost}: {self.path}",
            file=sys.stderr,
        )
