"""Run one seed of one point, wherever the executor puts it; its files say what came of it."""

import shutil
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featlearn.sweeps.folder import Outcome, SweepFolder, alone, outcome_at, write_outcome
from featlearn.sweeps.function import SweptFunction
from featlearn.sweeps.grid import Point
from featlearn.sweeps.outcome_values import outcome_values


def run_seed(function: SweptFunction, path: str, settings: Mapping[str, Any], seed: int) -> None:
    """Call the function and write what it returns or raises; nothing if another process has done it meanwhile."""
    sweep = Path(path)
    place = SweepFolder(sweep).place(Point(settings), seed)
    place.parent.mkdir(parents=True, exist_ok=True)
    with alone(place):
        if outcome_at(place).status != "missing":
            return
        if not function.resume:  # what a killed attempt left
            shutil.rmtree(place, ignore_errors=True)
        begun = time.perf_counter()
        try:
            if function.out:
                place.mkdir(exist_ok=True)
            returned = function.call(**function.arguments(settings, seed, place))
            values, run = outcome_values(returned)
        except (Exception, SystemExit) as error:
            failed = Outcome("failed", {}, None, time.perf_counter() - begun, one_line(error))
            write_outcome(place, failed, traceback.format_exc())
            return
        where = None if run is None else _relative(run, sweep)
        write_outcome(place, Outcome("done", values, where, time.perf_counter() - begun))


def one_line(error: BaseException) -> str:
    """Class and first line of the message."""
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _relative(run: Path, sweep: Path) -> str:
    """The path of a run from the sweep, for both to be moved together; as it is where it lies elsewhere."""
    run, sweep = run.resolve(), sweep.resolve()
    return str(run.relative_to(sweep)) if run.is_relative_to(sweep) else str(run)
