"""The log of a run. Write errors never stop training: they are counted, and the user is warned once."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featlearn.errors import FeatlearnError
from featlearn.record import RunWriter
from featlearn.record.layout import shown_name

if TYPE_CHECKING:
    from featlearn.monitoring.alerts import Alert
    from featlearn.monitoring.sinks import Sink

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class RunLog:
    """Writes to the run on disk and to the sinks."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], *, resume: bool, sinks: Sequence[Any], send: Sequence[str]
    ) -> None:
        self.path = path
        self._writer = RunWriter(path, config, resume=resume)
        self._sinks: list[Sink] = []
        self._send = send
        if sinks:
            from featlearn.monitoring.sinks import open_sink  # late: few runs need it

            self._sinks = [open_sink(sink, path) for sink in sinks]
        self._warned: set[str] = set()
        self._failing: dict[tuple[str, str], int] = {}  # kind and what -> the latest step
        self._repeated: Counter[tuple[str, str]] = Counter()
        self._latest: tuple[int, set[str]] = (-1, set())
        self.not_written = 0
        """Number of lines and files that could not be written."""
        self.missing: set[int] = set()
        """Steps without a line, because of a write error or because there was nothing to write."""
        self.last_line = self._writer.last_step
        """The last step with a line; -1 if there is none."""

    @property
    def last_step(self) -> int:
        """Last step of a resumed run; -1 for a new one."""
        return self._writer.last_step

    def measurement(
        self,
        step: int,
        scalars: Mapping[str, float],
        arrays: Mapping[str, Mapping[str, Any]],
        seconds: float,
        overhead: float,
    ) -> None:
        """Write arrays, then the line: a line implies that its arrays exist. Sinks also get the overhead so far."""
        self.arrays(step, arrays)
        self.scalars(step, scalars, seconds, overhead)

    def arrays(self, step: int, arrays: Mapping[str, Mapping[str, Any]]) -> None:
        """Write one file per array."""
        for name, content in arrays.items():
            self._try(step, self._writer.array, name, step, **content)

    def scalars(self, step: int, values: Mapping[str, float], seconds: float, overhead: float | None = None) -> None:
        """Write one line to disk and to every sink, without the values already written at this step."""
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
        if self._sinks:
            from featlearn.monitoring.sinks import is_sent

            numbers = {**values, **({} if overhead is None else {"measuring/overhead": overhead})}
            sent = {shown_name(name, values): number for name, number in numbers.items() if is_sent(name, self._send)}
            if sent:
                self._pass_on(step, lambda sink: sink.log_metrics(sent, step))

    def alert(self, alert: "Alert", tell: Callable[[Mapping[str, Any]], Any] | None) -> None:
        """Record an alert, pass it to the user's function or print it, and send it to the sinks."""
        self.event(alert.kind, alert.step, number=alert.number, text=alert.text, action=alert.action)
        try:
            if tell is None:
                print(alert, file=sys.stderr)
            else:
                tell(alert._asdict())
        except Exception as error:
            self.event("failed", alert.step, what="alerts", message=f"{type(error).__name__}: {error}")
            self.warn_once("alerts", f"the function for alerts failed: {error}")

        def send(sink: Any) -> None:
            if hasattr(sink, "log_alert"):
                sink.log_alert(alert._asdict())
            else:
                sink.log_metrics({f"alert/{alert.kind}": alert.number}, alert.step)

        self._pass_on(alert.step, send)

    def _pass_on(self, step: int, send: Callable[["Sink"], None]) -> None:
        """Send something to every sink. One that raises gets nothing more."""
        for sink in list(self._sinks):
            try:
                send(sink)
            except Exception as error:
                self._sinks.remove(sink)
                self.event("failed", step, what=type(sink).__name__, message=f"{type(error).__name__}: {error}")
                self.warn_once("sink", f"{type(sink).__name__} failed and gets no more numbers: {error}")

    def event(self, kind: str, step: int | None = None, /, **details: Any) -> None:
        """Record an event."""
        self._try(step, self._writer.event, kind, step, **details)

    def failure(self, kind: str, what: str, step: int, told: str, **details: Any) -> None:
        """Record a failure and warn once; repeated failures of the same kind are only counted."""
        before = self._failing.get((kind, what))
        if before is None:
            self.event(kind, step, what=what, **details)
        elif before != step:
            self._repeated[kind, what] += 1
        self._failing[kind, what] = step
        self.warn_once(f"{kind} {what}", told)

    def recovered(self, names: Iterable[str]) -> None:
        """These quantities work again: their next failure is a new event."""
        fine = set(names)
        self._failing = {key: step for key, step in self._failing.items() if key[1] not in fine}

    def count_repeats(self, step: int) -> None:
        """Record how often each failure was repeated."""
        for (kind, what), count in self._repeated.items():
            self.event("repeated", step, what=what, of=kind, count=count)

    def describe(self, /, **entries: Any) -> None:
        """Add entries to run.json."""
        self._try(None, self._writer.describe, **entries)

    def warn_once(self, topic: str, message: str) -> None:
        """Warn once per topic."""
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(f"fl.watch: {message} (training goes on)", UserWarning, stacklevel=_outside())

    def close(self) -> None:
        """Close the run and the sinks."""
        if self.not_written:
            self.event("not_written", None, count=self.not_written)
        self._try(None, self._writer.close)
        for sink in self._sinks:
            try:
                getattr(sink, "close", lambda: None)()
            except Exception as error:
                self.warn_once("sink", f"{type(sink).__name__} could not be closed: {error}")

    def _try(self, step: int | None, write: Any, /, *args: Any, **kwargs: Any) -> bool:
        """Write, and return whether that succeeded."""
        try:
            write(*args, **kwargs)
            return True
        except FeatlearnError as error:
            self.not_written += 1
            self.warn_once("disk", f"{error}")
            if self.not_written == 1 and write != self._writer.event:
                # An event is small: it may fit on a disk that is too full for a kernel.
                self.event("not_written", step, message=str(error))
            return False


def _outside() -> int:
    """The stack level of the first caller outside this package, for warnings to point at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_PACKAGE + os.sep):
        level, frame = level + 1, frame.f_back
    return level
