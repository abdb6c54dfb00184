"""Points of a sweep file, and the function that workers call at each point."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import CycloptsError

from featlearn.cli.answer import UsageError
from featlearn.cli.settings import TrainingSettings, option
from featlearn.cli.sweep_file import SweepFile
from featlearn.cli.user_errors import reporting_user_errors
from featlearn.cli.user_task import BUILT_IN, load_function
from featlearn.errors import InputTypeError, InputValueError
from featlearn.sweeps.function import SweptFunction, check_function, source_digest
from featlearn.sweeps.grid import Point, points_of

if TYPE_CHECKING:
    from featlearn.record import Run


def train_and_watch(subject: str | None, first: int, *, seed: int, out: Path, **options: Any) -> "Run":
    """Train and watch as `featlearn diagnose` does, in the folder `out`.

    All seeds of a point use the learning rate of seed `first`, so that they can be averaged.
    """
    from featlearn.cli.training import learning_rate, train  # torch takes a second to load
    from featlearn.cli.training_progress import ProgressDisplay
    from featlearn.record import open_run

    if options.get("data_root") is not None:
        options["data_root"] = Path(options["data_root"])
    settings = TrainingSettings(**options, seed=seed)
    errors = nullcontext() if subject is None else reporting_user_errors(subject)
    with errors, redirect_stdout(sys.stderr):
        if seed != first:
            settings = replace(settings, lr=learning_rate(subject, replace(settings, seed=first)))
        train(subject, settings, out, ProgressDisplay(out.name, settings.steps, quiet=True))
    return open_run(out)


def call_function(path: str, **arguments: Any) -> Any:
    """Call the user's function at FILE.py:function, with its output on stderr."""
    with redirect_stdout(sys.stderr):
        return _load(path)(**arguments)


@lru_cache
def _load(path: str) -> Callable[..., Any]:
    from featlearn.cli.user_task import load_function

    return load_function(path)


def points_and_function(file: SweepFile, seeds: Sequence[int]) -> tuple[list[Point], SweptFunction]:
    """Return the points of a file and the function to call, or raise a usage error before anything runs."""
    try:
        points = points_of(file.grid)
        if file.function is not None:
            with reporting_user_errors(file.function):
                function = load_function(file.function)
            checked = check_function(function, points, list(seeds))
            return points, replace(checked, call=partial(call_function, file.function), name=file.function)
    except (InputValueError, InputTypeError) as error:
        raise UsageError(str(error)) from error
    checked_points = [Point(_checked_settings(point, file)) for point in points]
    name, source = "featlearn diagnose", ""
    if file.subject is not None:
        with reporting_user_errors(file.subject):
            name, source = f"featlearn diagnose {file.subject}", source_digest(load_function(file.subject))
    call = partial(train_and_watch, file.subject, seeds[0])
    return checked_points, SweptFunction(call=call, name=name, source=source, seed=True, out=True, resume=False)


def _checked_settings(point: Point, file: SweepFile) -> dict[str, Any]:
    """Check the settings of a point as options of `featlearn diagnose`."""
    from featlearn.cli.app import parsed

    words = ["diagnose"]
    for name, value in point.settings.items():
        if isinstance(value, list | dict):
            raise UsageError(f"{file.path} has {name} = {value}, expected numbers and words")
        if file.subject is not None and name in BUILT_IN:
            raise UsageError(
                f"{file.path} has {name} beside subject, expected one of the two: network, data and loss are what the "
                "function returns"
            )
        if isinstance(value, bool):
            words += [option(name)] * value
        else:
            words.append(f"{option(name)}={value}")
    try:
        settings: TrainingSettings = parsed(words)[1].arguments.get("settings", TrainingSettings())
    except CycloptsError as error:
        raise UsageError(f"{file.path}: {' '.join(str(error).split())}") from error
    return {name: _plain(getattr(settings, name)) for name in point.settings}


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
