"""What one process measures and writes of a run: rank 0 of a distributed training, or the only process."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featlearn.errors import MemoryBudgetError, NotFiniteError
from featlearn.monitoring.description import description, stored_state
from featlearn.monitoring.numbers import UserNumbers, floats
from featlearn.monitoring.observer import Observation, Observer
from featlearn.monitoring.probe_data import ProbeData, WatchedNetwork, kept_state
from featlearn.monitoring.run_log import RunLog
from featlearn.monitoring.schedule import Schedule, ScheduledQuantity
from featlearn.monitoring.work import Budget, Stopwatch, TrainingPasses, percent
from featlearn.record import Run, open_run
from featlearn.record.layout import USER

if TYPE_CHECKING:
    from featlearn.monitoring.alerts import Alert, AlertRules
    from featlearn.monitoring.replay_record import ReplayRecorder

Alerts = bool | Callable[[Mapping[str, Any]], Any]
"""True to print alerts, or a function of an alert."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """The arguments of `fl.watch`, checked."""

    watched: WatchedNetwork
    path: Path
    schedule: Schedule
    budget: float | None
    quantities: Sequence[ScheduledQuantity]
    entries: Mapping[str, Any]
    """What run.json says of the other arguments."""
    sinks: Sequence[Any] = ()
    send: Sequence[str] = ()
    """Patterns of the names of numbers that sinks get."""
    alerts: Alerts = False
    resume: bool = False
    overwrite: bool = False
    replay: ProbeData | None = None
    """Training samples for `fl.replay`."""


class Recording:
    """A run that is being measured and written."""

    def __init__(self, options: WatchOptions, observer: Observer) -> None:
        self._options, self._observer = options, observer
        self._quantities = list(options.quantities)
        self._budget = Budget(options.budget, options.schedule.logarithmic)
        self._passes, self._stopwatch = TrainingPasses(), Stopwatch()
        self.numbers = UserNumbers()
        """Numbers that the training loop passed."""
        self.begun_at = 0
        """The last step of earlier processes."""
        self._measured: set[int] = set()
        self._cost_known_from = 0
        self._skipped = 0
        self._rules: AlertRules | None = None
        self._diverged = False
        self._replay: ReplayRecorder | None = None
        with self._stopwatch.measuring():
            if options.resume and (options.path / "run.json").exists() and open_run(options.path).lines:
                self._resume()
            else:
                self._begin()
        self._passes.attach(self._model)

    @property
    def _model(self) -> Any:
        return self._observer.watched.model

    @property
    def measurements(self) -> int:
        """Number of measurements in the run, with those before a resume."""
        return len(self._measured - self._log.missing)

    def _begin(self) -> None:
        options, observer = self._options, self._observer
        observer.watched = replace(observer.watched, initial=kept_state(observer.watched.model))
        self._settle(reduce=self._budget.share is not None)
        observation = observer.observe(0, self._quantities, end=True)
        self._drop_failing(observation)
        replay_arrays = {} if options.replay is None else self._begin_replay(options.replay)
        config = description(observer.watched, options.watched, observation.outputs, **options.entries)
        state, names = stored_state(observer.watched.initial)
        config |= {"layer_names": dict(observer.names), "initial": names, "name": config["name"] or options.path.name}
        config |= {"replay": self._replay.description()} if self._replay else {}
        with self._replaced():
            self._log = self._open_log(config)
        if options.resume:
            self._log.describe(**config)  # a run that was killed before its first line may have other entries
        self._log.event("started", 0)
        self._log_failures(observation, 0)
        arrays = {**observation.record.arrays, **({"initial": state} if state else {}), **replay_arrays}
        self._log.measurement(0, {**self._rate(), **observation.record.scalars}, arrays, 0.0, 0.0)
        self._measured.add(0)
        self._say_reduced()
        self._raise_alerts(lambda rules: rules.after(0, observation.record))

    def _open_log(self, config: Mapping[str, Any]) -> RunLog:
        options = self._options
        return RunLog(options.path, config, resume=options.resume, sinks=options.sinks, send=options.send)

    def _raise_alerts(self, judge: "Callable[[AlertRules], Sequence[Alert]]") -> None:
        """Record what the rules find, if the user wants alerts."""
        alerts = self._options.alerts
        if not alerts:
            return
        if self._rules is None:
            from featlearn.monitoring.alerts import AlertRules  # late: few runs need it

            self._rules = AlertRules(self._observer.watched)
            if self.begun_at:
                self._rules.resume(open_run(self._options.path))
        try:
            for alert in judge(self._rules):
                self._log.alert(alert, alerts if callable(alerts) else None)
        except Exception as error:  # no rule may stop the training
            self._log.warn_once("alerts", f"alerts could not be judged: {type(error).__name__}: {error}")

    def _replaced(self) -> AbstractContextManager[None]:
        if not self._options.overwrite:
            return nullcontext()
        from featlearn.record.replacement import replaced  # late: few runs need it

        return replaced(self._options.path)

    def _settle(self, *, reduce: bool) -> None:
        self._observer.settle_readout()
        if self._budget.share is not None or self._observer.shared is not None:
            self._observer.settle(self._budget, self._quantities, reduce=reduce)

    def _resume(self) -> None:
        from featlearn.monitoring.resumption import (  # late: few runs need it
            cost_before,
            measured_by_share,
            measured_steps,
            resumed,
            trained_before,
        )

        observer, run = self._observer, open_run(self._options.path)
        self._log = self._open_log({})
        self.begun_at = max(self._log.last_step, 0)
        self._measured, cost = measured_steps(run), cost_before(run)
        self._cost_known_from = self.begun_at if cost is None else 0
        self._stopwatch.resume(cost, trained_before(run))
        resumed(observer, run)
        self._settle(reduce=False)
        self._budget.resume(*measured_by_share(run))
        if observer.watched.initial:
            observation = observer.observe_start(self._quantities, end=False)
        else:
            observation = observer.observe(self.begun_at, self._quantities)
            self._log.warn_once(
                "resume",
                "the initial weights were too large to be stored, so distances from the start are unknown after a "
                "resume",
            )
        self._drop_failing(observation)
        observer.follow(run)
        self._say_resumed(run)

    def _say_reduced(self) -> None:
        given, measured = self._options.watched.probe.samples, self._observer.watched.probe.samples
        if measured < given:
            print(
                f"featlearn: measuring {measured} of the {given} probe samples, so that a measurement costs about a "
                "second; budget=None measures all",
                file=sys.stderr,
            )

    def _say_resumed(self, run: Run) -> None:
        settings, before = self._options.entries["settings"], run.config.get("settings")
        changed = settings is not None and settings != before
        self._log.event("resumed", self.begun_at, **({"settings_before": before} if changed else {}))
        # If this process is killed, the total cost is unknown.
        unknown = dict.fromkeys(("overhead", "measuring", "wall_share"))
        self._log.describe(finished=False, **unknown, **({"settings": settings} if changed else {}))

    def _drop_failing(self, observation: Observation) -> None:
        """Raise for quantities that fail at the start if the user asked for them; drop the others."""
        for quantity, error in observation.failures:
            if quantity.asked or quantity.name == "kernel":
                raise error
            self._quantities.remove(quantity)
        self.numbers.taken = {name for name in observation.record.scalars if name.startswith(USER)}

    def describe(self, entries: Mapping[str, Any]) -> None:
        """Add entries to run.json."""
        self._log.describe(**entries)

    def add_step(self, step: int, loss: Any, scalars: Mapping[str, Any]) -> None:
        """Add the numbers of one step."""
        if loss is not None:
            self.numbers.add("loss", loss)
        if rare := self.numbers.add_step(step, scalars):
            self.write(step, rare)

    def _begin_replay(self, data: ProbeData) -> dict[str, dict[str, Any]]:
        from featlearn.monitoring.replay_record import ReplayRecorder  # late: few runs need it

        self._replay = ReplayRecorder(self._observer.watched, data)
        return self._replay.measure()

    def add_replay_step(self, step: int, samples: Any) -> None:
        """Add the samples of one step, and measure what `fl.replay` needs where it is due."""
        assert self._replay is not None
        if self._replay.add_step(step, samples):
            self._measure_replay()

    def _measure_replay(self) -> None:
        assert self._replay is not None
        step = self._replay.step
        self._passes.detach(self._model)
        try:
            with self._stopwatch.measuring():
                self._log.arrays(step, self._replay.measure())
        except Exception as error:
            self._log_failure("replay", error, step)
        finally:
            self._passes.attach(self._model)

    def log(self, step: int, loss: Any, scalars: Mapping[str, Any]) -> None:
        """Write numbers of the user at once."""
        self.write(step, floats(self.numbers.named(scalars) | ({} if loss is None else {"loss": loss})))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write one line."""
        with self._stopwatch.measuring():
            self._log.scalars(step, numbers, self._stopwatch.trained)
            self._check(step, numbers)

    def decide(self, step: int, due: Sequence[ScheduledQuantity]) -> list[ScheduledQuantity]:
        """Return the quantities that are measured at this step."""
        due = [quantity for quantity in due if quantity in self._quantities]
        training = self._budget.training(self._passes, step - self.begun_at, step)
        if training and (steps := self._budget.steps_for_rare(due, training / step)):
            self._raise_alerts(lambda rules: rules.unaffordable(step, steps))
        return self._budget.chosen(step, due, training)

    def skip(self, step: int) -> None:
        """Write what the training loop passed since the last line, at a scheduled step that is not measured."""
        self._skipped += 1
        self.write(step, self._line())

    def measure(self, step: int, quantities: Sequence[ScheduledQuantity], *, last: bool = False) -> None:
        """Measure quantities and write them."""
        self._observer.synchronize()
        self._passes.detach(self._model)
        try:
            with self._stopwatch.measuring():
                self._measure(step, quantities, last)
        finally:
            self._passes.attach(self._model)

    def _measure(self, step: int, quantities: Sequence[ScheduledQuantity], last: bool) -> None:
        numbers, log = self._line(), self._log
        try:
            observation = self._observer.observe(step, quantities, end=last, last=last)
        except Exception as error:
            self._log_failure("measurement", error, step)
            self.write(step, numbers)
            return
        if observation.change is not None:
            log.event("trained_set_changed", step, **observation.change)
        self._log_failures(observation, step)
        failed = {quantity.name for quantity, _ in observation.failures}
        log.recovered({"measurement", *(quantity.name for quantity in quantities)} - failed)
        self._check(step, numbers)
        record = observation.record
        overhead = self._stopwatch.cost.overhead
        log.measurement(step, {**numbers, **record.scalars}, record.arrays, self._stopwatch.trained, overhead)
        self._measured.add(step)
        self._raise_alerts(lambda rules: rules.after(step, record))

    def _log_failures(self, observation: Observation, step: int) -> None:
        for quantity, error in observation.failures:
            self._log_failure(quantity.name, error, step)
        if observation.undivided is not None:
            self._log.failure("undivided", "ranks", step, observation.undivided, message=observation.undivided)

    def _log_failure(self, what: str, error: Exception, step: int) -> None:
        kind = "diverged" if isinstance(error, NotFiniteError) else "failed"
        nothing = f"nothing could be measured at step {step}"
        words = nothing if what == "measurement" else f"{what} could not be measured"
        message = f"{type(error).__name__}: {error}"[:2000]
        self._log.failure(kind, what, step, f"{words}: {error}", message=message)
        if isinstance(error, MemoryBudgetError):
            self._raise_alerts(lambda rules: rules.failed(step, what, error))

    def _line(self) -> dict[str, float]:
        """Return means since the last line, and the current learning rate."""
        return {**self._rate(), **self.numbers.means()}

    def _rate(self) -> dict[str, float]:
        optimizer = self._observer.watched.optimizer
        return {} if optimizer is None else {"lr": float(optimizer.param_groups[0]["lr"])}

    def _check(self, step: int, numbers: Mapping[str, float]) -> None:
        if not math.isfinite(numbers.get("loss", 0.0)) and not self._diverged:
            self._diverged = True
            self._log.event("diverged", step, what="loss", value=str(numbers["loss"]))
            self._log.warn_once("diverged", f"the loss is {numbers['loss']} at step {step}")

    def end(self, step: int, error: BaseException | None, whole: bool) -> None:
        """Measure for the last time, if all weights are gathered, and close the run."""
        if error is not None:
            self._log.event("interrupted", step, message=f"{type(error).__name__}: {error}"[:500])
        try:
            if whole and self._replay is not None and self._replay.due_at_end:
                self._measure_replay()
            quantities = self._observer.missing_at_end(step, self._quantities)
            if whole and quantities and step and self._measured:
                self.measure(step, quantities, last=True)
        except KeyboardInterrupt:  # the user does not want to wait for it
            self._log.event("failed", step, message="the last measurement was interrupted")
            if error is None:
                raise
        finally:
            self._passes.detach(self._model)
            self._finish(step, error is None)

    def _finish(self, step: int, finished: bool) -> None:
        log, cost = self._log, self._stopwatch.cost
        summary = {
            "measurements": self.measurements,
            "overhead": cost.overhead,
            "measuring": cost.measuring,
            "wall_share": cost.wall_share,
        }
        if self._skipped:
            log.event("skipped", step, count=self._skipped, reason="budget")
        log.count_repeats(step)
        log.event("finished", step, complete=finished, last_line=log.last_line, **summary)
        log.describe(finished=finished, steps=step, **summary)
        log.close()
        lost = f", {log.not_written} entries not written" if log.not_written else ""
        since = f", since step {self._cost_known_from}" if self._cost_known_from else ""
        print(
            f"featlearn: {self.measurements} measurements in {step} steps, {cost}{self._budget_words(step)}{since}"
            f"{lost}: {log.path}",
            file=sys.stderr,
        )

    def _budget_words(self, step: int) -> str:
        budget = self._budget
        if budget.share is None:
            return ", no budget"
        training = budget.training(self._passes, step - self.begun_at, step)
        if not training:
            return "; no forward pass of the model in training mode was seen, so steps were fixed in advance"
        share = f", {percent(budget.measured / training)} of its work"
        if budget.measured <= budget.share * training:
            return f"{share}, within the budget of {percent(budget.share)}"
        return f"{share}; the budget of {percent(budget.share)} holds from {budget.holds_from(training, step)} steps on"
