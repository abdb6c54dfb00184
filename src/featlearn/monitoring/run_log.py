"""Writing a run that never stops training: what cannot be written is counted, and the user is told once."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from featlearn.errors import FeatlearnError
from featlearn.monitoring.sinks import Sink, sinks
from featlearn.record import RunWriter

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class RunLog:
    """The run on disk and the sinks, once training is under way."""

    def __init__(self, path: str | os.PathLike[str], config: Mapping[str, Any], *, resume: bool, sinks_: Any) -> None:
        self.path = Path(path)
        self._writer = RunWriter(path, config, resume=resume)
        self._sinks: list[Sink] = sinks(sinks_, self.path)
        self._told: set[str] = set()
        self._troubled: dict[tuple[str, str], int] = {}  # kind and what -> the latest step
        self._repeated: Counter[tuple[str, str]] = Counter()
        self._latest: tuple[int, set[str]] = (-1, set())
        self.not_written = 0
        """How many lines and files were lost."""
        self.missing: set[int] = set()
        """Steps without a line: it could not be written, or there was nothing to write."""
        self.last_line = self._writer.last_step
        """The latest step with a line; -1 where there is none."""

    @property
    def last_step(self) -> int:
        """Where a run that goes on stood; -1 for a new one."""
        return self._writer.last_step

    def measurement(
        self, step: int, scalars: Mapping[str, float], arrays: Mapping[str, Mapping[str, Any]], seconds: float
    ) -> None:
        """Arrays first: a line then says that they are there."""
        self.arrays(step, arrays)
        self.scalars(step, scalars, seconds)

    def arrays(self, step: int, arrays: Mapping[str, Mapping[str, Any]]) -> None:
        """A file for each."""
        for name, content in arrays.items():
            self._try(step, self._writer.array, name, step, **content)

    def scalars(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """One line, on disk and in every sink; what was written at this step already is left out."""
        if self._latest[0] != step:
            self._latest = (step, set())
        values = {name: value for name, value in values.items() if name not in self._latest[1]}
        if not values:
            if not self._latest[1]:
                self.missing.add(step)
            return
        if self._try(step, self._writer.scalars, step, values, seconds=seconds):
            self.missing.discard(step)
            self.last_line = max(self.last_line, step)
        else:
            self.missing.add(step)
        self._latest[1].update(values)
        for sink in list(self._sinks):
            try:
                sink.log_metrics(dict(values), step)
            except Exception as error:
                self._sinks.remove(sink)
                self.event("failed", step, what=type(sink).__name__, message=f"{type(error).__name__}: {error}")
                self.tell("sink", f"{type(sink).__name__} takes no numbers any more: {error}")

    def event(self, kind: str, step: int | None = None, /, **details: Any) -> None:
        """Something that happened."""
        self._try(step, self._writer.event, kind, step, **details)

    def trouble(self, kind: str, what: str, step: int, told: str, **details: Any) -> None:
        """Something that went wrong, told once; while it lasts an event at first, and then only counted."""
        before = self._troubled.get((kind, what))
        if before is None:
            self.event(kind, step, what=what, **details)
        elif before != step:
            self._repeated[kind, what] += 1
        self._troubled[kind, what] = step
        self.tell(f"{kind} {what}", told)

    def well(self, names: Iterable[str]) -> None:
        """These went well: should they go wrong again, that is another event."""
        fine = set(names)
        self._troubled = {key: step for key, step in self._troubled.items() if key[1] not in fine}

    def sum_up(self, step: int) -> None:
        """How often what went wrong did so again."""
        for (kind, what), count in self._repeated.items():
            self.event("repeated", step, what=what, of=kind, count=count)

    def describe(self, /, **entries: Any) -> None:
        """Add to run.json."""
        self._try(None, self._writer.describe, **entries)

    def tell(self, topic: str, message: str) -> None:
        """A warning, once for each topic."""
        if topic not in self._told:
            self._told.add(topic)
            warnings.warn(f"fl.watch: {message} (training goes on)", UserWarning, stacklevel=_outside())

    def close(self) -> None:
        """Nothing more will come."""
        if self.not_written:
            self.event("not_written", None, count=self.not_written)
        self._try(None, self._writer.close)
        for sink in self._sinks:
            try:
                getattr(sink, "close", lambda: None)()
            except Exception as error:
                self.tell("sink", f"{type(sink).__name__} could not be closed: {error}")

    def _try(self, step: int | None, write: Any, /, *args: Any, **kwargs: Any) -> bool:
        """Whether it was written."""
        try:
            write(*args, **kwargs)
            return True
        except FeatlearnError as error:
            self.not_written += 1
            self.tell("disk", f"{error}")
            if self.not_written == 1 and write != self._writer.event:
                # Small, so that it may still fit where a kernel does not.
                self.event("not_written", step, message=str(error))
            return False


def _outside() -> int:
    """How many calls up the line of the user is, seen from who asks: the first that is not in this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_PACKAGE + os.sep):
        level, frame = level + 1, frame.f_back
    return level
