"""Writing a run that never stops training: what cannot be written is counted, and the user is told once."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featlearn.errors import FeatlearnError
from featlearn.record import RunWriter
from featlearn.watch.sinks import Sink, sinks


class Ledger:
    """The run on disk and the sinks, once training is under way."""

    def __init__(self, path: str | os.PathLike[str], config: Mapping[str, Any], *, resume: bool, sinks_: Any) -> None:
        self.path = Path(path)
        self._writer = RunWriter(path, config, resume=resume)
        self._sinks: list[Sink] = sinks(sinks_, self.path)
        self._told: set[str] = set()
        self._latest: tuple[int, set[str]] = (-1, set())
        self.not_written = 0
        """How many lines and files were lost."""

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
            return
        self._try(step, self._writer.scalars, step, values, seconds=seconds)
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

    def describe(self, /, **entries: Any) -> None:
        """Add to run.json."""
        self._try(None, self._writer.describe, **entries)

    def tell(self, topic: str, message: str) -> None:
        """A warning, once for each topic."""
        if topic not in self._told:
            self._told.add(topic)
            warnings.warn(f"fl.watch: {message} (training goes on)", UserWarning, stacklevel=2)

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

    def _try(self, step: int | None, write: Any, /, *args: Any, **kwargs: Any) -> None:
        try:
            write(*args, **kwargs)
        except FeatlearnError as error:
            self.not_written += 1
            self.tell("disk", f"{error}")
            if self.not_written == 1 and write != self._writer.event:
                # Small, so that it may still fit where a kernel does not.
                self.event("not_written", step, message=str(error))
