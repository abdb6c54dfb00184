"""Convert return values of a swept function to numbers and words by name."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featlearn.errors import InputTypeError, InputValueError, RunError
from featlearn.record import Run, open_run

EXPECTED = "expected a run (watch.run), the path of a run, a number, or a mapping of numbers and words"


def outcome_values(returned: Any) -> tuple[dict[str, Any], Path | None]:
    """Return numbers and words by name, and the path of the run for runs."""
    if isinstance(returned, Run):
        return _run_values(returned), returned.path
    if isinstance(returned, str | os.PathLike):
        try:
            run = open_run(returned)
        except RunError as error:
            raise InputValueError(f"the function returned {str(returned)[:80]!r}, {EXPECTED}: {error}") from error
        return _run_values(run), run.path
    if isinstance(returned, Mapping):
        if not returned:
            raise InputValueError(f"the function returned an empty mapping, {EXPECTED}")
        return {_name(name): _plain(value, str(name)) for name, value in returned.items()}, None
    return {"value": _plain(returned, "the result")}, None


def _run_values(run: Run) -> dict[str, Any]:
    """Return the verdict on a run, its numbers, and the last value of every scalar except per-layer scalars."""
    from featlearn.diagnosis import diagnose

    diagnosis = diagnose(run)
    last = {name: float(run.scalar(name)[1][-1]) for name in run.names if name.count("/") < 2}
    return {
        "regime": diagnosis.regime,
        "diverged": diagnosis.diverged,
        **{name: float(number) for name, number in diagnosis.numbers.items()},
        **last,
    }


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 200:
        raise InputTypeError(f"the function returned a number named {str(name)[:80]!r}, expected a word")
    return name


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, bool | int | float | str) or (value is None and name != "the result"):
        return value
    if getattr(value, "shape", ()) == () or getattr(value, "numel", lambda: 0)() == 1:
        try:
            number = value.item() if hasattr(value, "item") else float(value)
        except (TypeError, ValueError, RuntimeError):
            number = None
        if isinstance(number, bool | int | float | str):
            return number
    raise InputTypeError(f"the function returned {type(value).__name__} as {name}, {EXPECTED}")


def is_number(value: Any) -> bool:
    """Return whether a table value is a finite number; booleans count as words."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
