"""The context manager around a training loop."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from featlearn.errors import InputValueError, RunError
from featlearn.monitoring.numbers import Names
from featlearn.monitoring.observer import Observer
from featlearn.monitoring.ranks import Ranks, gathered_weights
from featlearn.monitoring.recording import Recording, WatchOptions
from featlearn.monitoring.schedule import ScheduledQuantity
from featlearn.record import Run, open_run
from featlearn.record.layout import checked_step
from featlearn.signatures import raise_from_call


class Watch:
    """A watched training run, made by `fl.watch`.

    Use it as a context manager, and call `step` after every optimizer step. `run` is what has been recorded so far.
    `log` and `describe` record numbers and settings at once. `path`, `steps` and `measurements` say where it stands.
    """

    path: Path
    """Directory of the run."""
    steps: int
    """Number of training steps so far."""

    def __init__(self, options: WatchOptions) -> None:
        self.path, self.steps = options.path, 0
        self._options, self._observer = options, Observer(options.watched, Names())
        self._ranks: Ranks | None = None
        self._recording: Recording | None = None  # on rank 0 alone
        self._look_at = 0
        self._over = False

    @property
    def run(self) -> Run:
        """The run recorded so far, with the watched network, on which `fl.advise` can try changes."""
        run = open_run(self.path)
        run.network = self._observer.watched
        return run

    @property
    def measurements(self) -> int:
        """Number of measurements in the run, with those before a resume; 0 on ranks that do not write it."""
        return 0 if self._recording is None else self._recording.measurements

    def assume_start(self, initial: Mapping[str, Any]) -> None:
        """Set the state dict of step 0, before entering, in case that a resumed run was too large to store it."""
        self._observer.watched = replace(self._observer.watched, initial=initial)

    @raise_from_call
    def __enter__(self) -> "Watch":
        if self._ranks is not None:
            raise InputValueError("this watch has been used already, expected a new one for every run")
        ranks = self._ranks = Ranks(self.path)
        self._observer.share(ranks)
        with gathered_weights(self._observer.watched.model):
            if ranks.first:
                try:
                    self._recording = Recording(self._options, self._observer)
                except BaseException as error:
                    message = f"rank 0 could not begin: {error}"
                    ranks.agreed(lambda: json.dumps([message, 0]))
                    raise
                self.steps = self._recording.begun_at
        refusal, self.steps = json.loads(ranks.agreed(lambda: json.dumps(["", self.steps])))
        if refusal:
            raise RunError(refusal)
        self._options.schedule.due(self.steps)
        return self

    def step(self, loss: Any = None, *, step: int | None = None, samples: Any = None, **scalars: Any) -> None:
        """Call this after every optimizer step.

        Args:
            loss: Loss of this step. The mean since the last line, or since the run was resumed, is recorded.
            step: Number of this step, from 0; by default one more than before. It may go back to a checkpoint.
            samples: Indices of this step's samples among those of `replay=`, or a slice; only with `replay=`.
            scalars: Your own numbers, for example accuracy on test data. Numbers passed at every step are averaged like
                the loss, others are recorded at once. They keep their names; a name that the run itself records, such
                as `ntk/alignment`, becomes `user/ntk/alignment` in `Run`.
        """
        recording = self._recording
        if isinstance(samples, int | float) and self._options.replay is None:
            scalars["samples"] = samples  # a number of the user's own
        elif samples is not None or self._options.replay is not None:
            self._add_replay_step(step, samples)
        if step is None and not scalars and self.steps + 1 < self._look_at:
            # The common case must take microseconds only.
            self.steps += 1
            if loss is not None and recording is not None:
                recording.numbers.add("loss", loss)
            return
        number = self.steps + 1 if step is None else checked_step(step)
        ranks = self._entered()
        if number <= self.steps and step is not None:  # back to a checkpoint
            self._look_at = 0
        self.steps = number
        if recording is not None:
            recording.add_step(number, loss, scalars)
        if number >= self._look_at:
            self._look(ranks)

    def _add_replay_step(self, step: int | None, samples: Any) -> None:
        if self._options.replay is None:
            raise InputValueError("watch.step(samples=...) without replay=, expected fl.watch(..., replay=(x, y))")
        if self._entered().size > 1:
            raise InputValueError("replay=... with several ranks, expected one process: ranks see different samples")
        if self._recording is not None:
            self._recording.add_replay_step(self.steps + 1 if step is None else checked_step(step), samples)

    def _look(self, ranks: Ranks) -> None:
        """Measure what is due."""
        step, options = self.steps, self._options
        due = options.schedule.due(step)
        wanted = [
            quantity
            for quantity in options.quantities
            if (due if quantity.schedule is None else quantity.schedule.due(step))
        ]
        chosen: list[ScheduledQuantity] = []
        with gathered_weights(self._observer.watched.model, needed=bool(wanted)):
            if wanted:
                chosen, together = self._decided(ranks, wanted)
                if chosen:
                    self._act(lambda recording: recording.measure(step, chosen), together)
        if self._recording is not None and due and not chosen:
            self._recording.skip(step)
        own = [quantity.schedule for quantity in options.quantities if quantity.schedule is not None]
        self._look_at = min(schedule.following for schedule in (options.schedule, *own))

    def _decided(self, ranks: Ranks, wanted: list[ScheduledQuantity]) -> tuple[list[ScheduledQuantity], bool]:
        """Return the quantities to measure now, and whether all ranks do it together; rank 0 decides."""

        def decide() -> str:
            assert self._recording is not None
            names = [quantity.name for quantity in self._recording.decide(self.steps, wanted)]
            shared, samples = self._observer.shared, self._observer.watched.probe.samples
            return json.dumps([names, shared is not None and shared.divides(names, samples)])

        names, together = json.loads(ranks.agreed(decide))
        return [quantity for quantity in wanted if quantity.name in names], together

    def _act(self, act: Callable[[Recording], None], together: bool) -> None:
        """On rank 0: act. If all ranks measure together, the others measure their part of it."""
        recording, shared = self._recording, self._observer.shared if together else None
        if recording is not None:
            with nullcontext() if shared is None else shared.leading():
                act(recording)
        elif shared is not None:
            shared.follow()

    def log(self, loss: Any = None, **scalars: Any) -> None:
        """Record numbers at the current step at once."""
        self._entered()
        if self._recording is not None:
            self._recording.log(self.steps, loss, scalars)

    def describe(self, /, **entries: Any) -> None:
        """Add entries to run.json."""
        self._entered()
        if self._recording is not None:
            self._recording.describe(entries)

    def _entered(self) -> Ranks:
        if self._ranks is None or self._over or (self._ranks.first and self._recording is None):
            raise InputValueError("the watch is not running; write: with fl.watch(...) as watch: and step inside")
        return self._ranks

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        # A rank that ends with an error cannot ask the others for their part of the weights.
        if self._ranks is not None:
            observer = self._observer
            with gathered_weights(observer.watched.model, needed=error is None) as whole:
                together = observer.shared is not None and observer.shared.ends_together(error is None)
                self._act(lambda recording: recording.end(self.steps, error, whole), together)
            if error is None and observer.shared is not None:
                observer.shared.close()
        self._over, self._look_at = True, 0
        return False
