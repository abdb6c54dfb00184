"""Run a seed of a point in any process, and write its outcome to files."""

import shutil
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featlearn.sweeps.folder import Outcome, SweepFolder, lock, outcome_at, write_outcome
from featlearn.sweeps.function import SweptFunction
from featlearn.sweeps.grid import Point
from featlearn.sweeps.outcome_values import outcome_values


def run_seed(function: SweptFunction, path: str, settings: Mapping[str, Any], seed: int) -> None:
    """Call the function and write its result or error, unless another process has done so."""
    sweep = Path(path)
    folder = SweepFolder(sweep).place(Point(settings), seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock(folder):
        if outcome_at(folder).status != "missing":
            return
        if not function.resume:  # remains of a killed attempt
            shutil.rmtree(folder, ignore_errors=True)
        start = time.perf_counter()
        try:
            if function.out:
                folder.mkdir(exist_ok=True)
            returned = function.call(**function.arguments(settings, seed, folder))
            values, run = outcome_values(returned)
        except (Exception, SystemExit) as error:
            if _is_preempted(error):
                raise
            failed = Outcome("failed", {}, None, time.perf_counter() - start, one_line(error))
            write_outcome(folder, failed, traceback.format_exc())
            return
        run_path = None if run is None else _relative(run, sweep)
        write_outcome(folder, Outcome("done", values, run_path, time.perf_counter() - start))


def _is_preempted(error: BaseException) -> bool:
    """Return whether submitit ends this process from its signal handler, after it has submitted the job again."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    name = "" if innermost is None else innermost.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, SystemExit) and str(name).startswith("submitit.")


def one_line(error: BaseException) -> str:
    """Return class and first line of the message."""
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _relative(run: Path, sweep: Path) -> str:
    """Return the path of a run relative to the sweep if it is inside, so that both can be moved together."""
    run, sweep = run.resolve(), sweep.resolve()
    return str(run.relative_to(sweep)) if run.is_relative_to(sweep) else str(run)
