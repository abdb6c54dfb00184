"""A run that is being written, as far as it was read: its curves, where it stands, and its verdict so far."""

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from featlearn.errors import FeatlearnError, RunError
from featlearn.record import Run, open_run
from featlearn.record.files import opened
from featlearn.record.growth import GrowingLines
from featlearn.record.layout import SCALARS
from featlearn.record.reader import measurement
from featlearn.record.text import object_in

AT_ONCE = 2**21
"""Bytes that are read of a run in one go."""
LARGEST_VERDICT = 2**30
"""Bytes on disk up to which a run is diagnosed while it is written."""
POINTS = 400
"""Points to which a curve is thinned when it has twice as many."""
NAMES = 200
"""Curves of a run; further ones are counted."""
FEW = 50
"""Lines up to which new ones are sent one by one; more come as whole curves."""

Curve = tuple[list[float], list[float | None]]


class FollowedRun:
    """One run; every error of its files becomes a sentence for the page."""

    def __init__(self, path: Path, key: str) -> None:
        self.key, self.path = key, path
        self._errors: dict[str, str] = {}  # by what was done
        self.lines = 0
        """Lines that were read."""
        self.views: dict[str, dict[str, Any]] = {}
        """The verdict and the pictures so far, by these names."""
        self.seen: dict[str, int] = {}
        """How many lines each of them saw."""
        self._begin()
        self._told: dict[str, Any] = {}

    def _begin(self) -> None:
        self._growing = GrowingLines(self.path, SCALARS)
        self.curves: dict[str, Curve] = {}
        self._left_out: set[str] = set()
        self._step, self._config = -1, dict[str, Any]()
        self._seconds: float | None = None

    @property
    def error(self) -> str:
        """What is wrong with it, in sentences."""
        return "; ".join(dict.fromkeys(filter(None, self._errors.values())))

    @property
    def finished(self) -> bool:
        """Whether it says that no more is coming."""
        return self._config.get("finished") is True

    @property
    def more(self) -> bool:
        """Whether there was more to read than is read at once."""
        return self._growing.more

    def news(self) -> dict[str, Any] | None:
        """Read what was added; what the page is to be told, None if nothing."""
        found, anew = self._safely("read", self._read) or ([], False)
        told = {"error": self.error, "facts": self._facts()}
        news: dict[str, Any] = {} if told == self._told else dict(told)
        self._told = told
        if anew or len(found) > FEW:
            news["curves"] = self.curves
        elif found:
            news["lines"] = [
                [line["step"], {n: _plain(v) for n, v in line["values"].items() if n in self.curves}] for line in found
            ]
        return {"run": self.key, **news} if news else None

    def whole(self) -> dict[str, Any]:
        """All that the page shows of it."""
        return {"run": self.key, "curves": self.curves, **self.views, "error": self.error, "facts": self._facts()}

    def behind(self, what: str) -> int:
        """Lines that the last verdict, or the last pictures, did not see."""
        return self.lines - self.seen.get(what, 0)

    def view(self, what: str, look: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
        """The verdict on what is there now, or its pictures; the last ones stay where that fails."""
        self.seen[what] = self.lines
        found = self._safely(what, lambda: self._looked(look))
        if found is None:
            return {"run": self.key, "error": self.error}
        self.views[what] = found
        return {"run": self.key, what: found, "error": self.error}

    def _looked(self, look: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
        files = opened(self.path)
        size = sum(files.weight(place) or 0 for place in files.names())
        if size > LARGEST_VERDICT:
            raise RunError(
                f"the run takes {size} bytes, more than the {LARGEST_VERDICT} that are diagnosed while it "
                f"is written; featlearn diagnose {self.path} does it"
            )
        return look(open_run(self.path))

    def _read(self) -> tuple[list[dict[str, Any]], bool]:
        """New lines, and whether the run began anew."""
        config = open_run(self.path).config
        replaced = bool(self._config) and config.get("created") != self._config.get("created")
        if replaced:
            self._begin()
            self.lines, self.seen, self.views = 0, {}, {}
        self._config = config
        lines, shorter = self._growing.read(AT_ONCE)
        if shorter:
            self.curves, self._left_out = {}, set()
        if shorter or replaced:
            self._errors["line"] = ""
        checked = [self._safely("line", partial(self._checked, line)) for line in lines]
        found = [line for line in checked if line is not None]
        for line in found:
            self._add(line)
        return found, replaced or shorter

    def _checked(self, line: bytes) -> dict[str, Any]:
        where = self.path / SCALARS
        try:
            return measurement(object_in(line, where))
        except OverflowError as error:
            raise RunError(f"{where} has a line {str(line)[:80]}: {error}") from error

    def _add(self, line: dict[str, Any]) -> None:
        step = float(line["step"])
        self.lines += 1
        self._step, self._seconds = max(self._step, line["step"]), line["seconds"] or self._seconds
        for name, value in line["values"].items():
            if name not in self.curves and len(self.curves) >= NAMES:
                self._left_out.add(name)
                continue
            steps, values = self.curves.setdefault(name, ([], []))
            at = bisect_left(steps, step)  # of lines repeated at one step the last counts
            if at < len(steps) and steps[at] == step:
                values[at] = _plain(value)
            else:
                steps.insert(at, step)
                values.insert(at, _plain(value))
            if len(steps) >= 2 * POINTS:
                from featlearn.reporting.content_blocks import thinned

                places, kept = thinned(steps, list(range(len(steps))), POINTS)
                self.curves[name] = (places, [values[int(i)] for i in kept])

    def _facts(self) -> dict[str, Any]:
        """Name, step, training time, share of measuring, time left; None where unknown."""
        config, seconds = self._config, self._seconds
        name, settings = config.get("name"), config.get("settings")
        given = settings.get("steps") if isinstance(settings, dict) else None
        whole = given if isinstance(given, int) and not isinstance(given, bool) and given > 0 else None
        left = (whole - self._step) * seconds / self._step if whole and seconds and self._step > 0 else None
        return {
            "name": str(name)[:NAMES] if isinstance(name, str) and name else self.path.name,
            "step": self._step if self._step >= 0 else None,
            "steps": whole,
            "seconds": _plain(seconds) if seconds is not None else None,
            "left": None if self.finished or left is None else _plain(max(left, 0.0)),
            "budget": _share(config.get("budget")),
            "spent": _share(config.get("overhead")) if self.finished else self._spent(seconds),
            "finished": self.finished,
            "left_out": len(self._left_out),
        }

    def _spent(self, seconds: float | None) -> float | None:
        """Time since the run began that was no training, times training: an estimate until the run says it."""
        created = self._config.get("created")
        try:
            latest = (self.path / SCALARS).lstat().st_mtime
        except OSError:
            return None
        if not seconds or not isinstance(created, float) or not 0 < created <= latest:
            return None
        return _plain(max(latest - created - seconds, 0.0) / seconds)

    def _safely(self, what: str, act: Callable[[], Any]) -> Any:
        """What `act` returns; None, and a sentence in `error`, where it fails. No run may end the server."""
        try:
            found = act()
        except FeatlearnError as error:
            self._errors[what] = str(error)[:600]
        except MemoryError:
            self._errors[what] = f"{self.path} needs more memory than there is"
        except Exception as error:
            self._errors[what] = f"{self.path} cannot be shown: {type(error).__name__}: {error}"[:600]
        else:
            if what != "line":  # a damaged line stays damaged
                self._errors[what] = ""
            return found
        return None


def _plain(value: float) -> float | None:
    """A number that JSON can hold."""
    return float(value) if math.isfinite(value) else None


def _share(value: object) -> float | None:
    return _plain(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
