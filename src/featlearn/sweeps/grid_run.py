"""`fl.sweep`: a function at every point of a grid; what is done already is not done again."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

from featlearn.errors import FeatlearnError, InputTypeError, InputValueError, RunError, WorkerStartError
from featlearn.record.atomic import PART
from featlearn.signatures import name_keywords
from featlearn.sweeps.executors import Executor, submit_all
from featlearn.sweeps.folder import LOCK, MANIFEST, Outcome, SweepFolder, alone, forget, remove_sweep, write_outcome
from featlearn.sweeps.function import SweptFunction, check_importable, swept_function
from featlearn.sweeps.grid import Grid, Point, points_of, seeds_of
from featlearn.sweeps.point_run import one_line, run_seed
from featlearn.sweeps.process_pool import ProcessPool, available_cores
from featlearn.sweeps.progress import SweepProgress
from featlearn.sweeps.results import Sweep

Task = tuple[Point, int]
"""A point and a seed."""
OnError = Literal["keep", "raise"]


@name_keywords()
def sweep(
    function: Callable[..., Any],
    grid: Grid,
    *,
    out: str | os.PathLike[str],
    seeds: int | Iterable[int] = 1,
    executor: Executor | None = None,
    on_error: OnError = "keep",
    retry: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> Sweep:
    """Call a function at every point of a grid, in parallel, and keep what it returns in a folder.

        def train(scale, width, seed, out):
            ...
            with fl.watch(model, (x, y), out=out) as watch:
                ...
            return watch.run

        if __name__ == "__main__":
            sweep = fl.sweep(train, {"scale": [0.1, 1, 10], "width": [64, 256]}, out="sweeps/a", seeds=3)
            sweep.map(x="scale", y="width", value="regime")

    Killed at any time and called again, it goes on: what is done is not run again, and a seed that was under way is
    begun anew. With another grid or more seeds in the same folder only what is new runs.

    Args:
        function: called as `function(**point, seed=k)`. It returns a run (`watch.run`), the path of one, a number, or a
            mapping of numbers and words; of a run the table has the verdict, its numbers, and last values of scalars.
            Where it takes `out`, it gets a folder of its own, empty at each start. Where it also takes `resume`, that
            is True and the folder keeps what a killed attempt left: `fl.watch(..., out, resume=resume)`. `seed` may be
            left out where there is one seed.
        grid: name -> values, of which all combinations are taken (a single value stays the same); or a list of points,
            each a mapping. Values are numbers and words, and lists or mappings of them.
        out: a folder for the sweep, with one folder for each point, named by a hash of its settings. It belongs to one
            function: another function, or a changed source, is refused.
        seeds: how many, from 0 on, or which.
        executor: any object with `submit(function, *args)` that returns something with `result()`. By default
            `featlearn.sweeps.ProcessPool()`, which runs one process of one thread for each core, replaces a process
            that is killed and starts its seed once more. The function must then be importable; functions of a script
            are, under `if __name__ == "__main__":`. `featlearn.sweeps.Serial()` runs all points in this process, for
            notebooks and debuggers.
            A client of dask and an executor of submitit are executors too. What an executor loses, a node that went
            away say, has failed for now and is run again by the next call.
        on_error: `"keep"`: what fails is kept with its error, and the rest goes on. `"raise"`: the first failure stops
            the sweep; seeds under way end. What failed before is run again.
        retry: run again what failed before.
        resume: go on although the source of the function has changed since; what is done is kept.
        overwrite: remove the sweep in `out` first, and nothing else than a sweep.
        quiet: no progress on stderr.

    Returns a `Sweep`: a table, a picture, a page. `fl.open_sweep(out)` reads it again.
    """
    points, seeds = points_of(grid), seeds_of(seeds)
    swept = swept_function(function, points, seeds)
    if executor is None or isinstance(executor, ProcessPool | ProcessPoolExecutor):
        check_importable(function)
    return run_sweep(
        swept,
        points,
        seeds,
        Path(out),
        executor=executor,
        on_error=on_error,
        retry=retry,
        resume=resume,
        overwrite=overwrite,
        quiet=quiet,
    )


def run_sweep(
    function: SweptFunction,
    points: Sequence[Point],
    seeds: Sequence[int],
    out: Path,
    *,
    executor: Executor | None,
    on_error: OnError,
    retry: bool,
    resume: bool,
    overwrite: bool,
    quiet: bool,
) -> Sweep:
    """`sweep`, of a function that is known to take these points."""
    if on_error not in ("keep", "raise"):
        raise InputValueError(f"on_error={on_error!r}, expected 'keep' or 'raise'")
    if resume and overwrite:
        raise InputValueError("resume=True and overwrite=True, expected one of them: go on, or start anew")
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise InputTypeError(f"executor is {type(executor).__name__}, expected an object with submit(function, *args)")
    pool = None if executor is not None else ProcessPool(min(available_cores(), len(points) * len(seeds)))
    try:
        folder = _begin_sweep(function, points, seeds, out, resume=resume, overwrite=overwrite)
        tasks = [(point, seed) for point in points for seed in seeds]
        for point, seed in tasks:
            before_now = folder.outcome(point, seed)
            if before_now.status == "failed" and (before_now.lost or retry or on_error == "raise"):
                forget(folder.place(point, seed))
        before = [folder.outcome(point, seed).status for point, seed in tasks]
        missing = [task for task, status in zip(tasks, before, strict=True) if status == "missing"]
        done = len(tasks) - len(missing)
        closing: AbstractContextManager[Any] = nullcontext() if pool is None else pool
        with SweepProgress(out.name, len(tasks), done, before.count("failed"), quiet=quiet) as progress, closing:
            _run(function, folder, missing, pool or executor, on_error, progress)
    except OSError as error:
        raise RunError(f"the sweep cannot be written to {out}: {error}") from error
    return Sweep(out, [(point, list(seeds)) for point in points])


def _begin_sweep(
    function: SweptFunction, points: Sequence[Point], seeds: Sequence[int], out: Path, *, resume: bool, overwrite: bool
) -> SweepFolder:
    """The folder, new or of the same function, in which the points are noted."""
    if overwrite:
        remove_sweep(out)
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file, expected a folder for the sweep, or nothing; choose another out=")
    folder = SweepFolder(out)
    strangers = out.is_dir() and any(one.name not in (LOCK, MANIFEST, MANIFEST + PART) for one in out.iterdir())
    if folder.manifest is None and strangers:
        raise RunError(f"{out} is a folder with other files in it, expected a new one, or that of a sweep")
    out.mkdir(parents=True, exist_ok=True)
    with alone(out / "sweep"):
        there = folder.manifest
        if there is None or _checked(function, there, out, resume=resume):
            folder.write_manifest(function=function.name, source=function.source)
        folder.add(points, seeds)
    return folder


def _checked(function: SweptFunction, there: dict[str, Any], out: Path, *, resume: bool) -> bool:
    """Whether the source of the function of a sweep has changed, where that is allowed."""
    if there.get("function") != function.name:
        raise RunError(
            f"{out} holds a sweep of {there.get('function')}, expected one of {function.name}; choose another out=, or "
            "pass overwrite=True to remove it"
        )
    changed = bool(there.get("source") != function.source)
    if changed and not resume:
        raise RunError(
            f"{out} holds a sweep of {function.name}, whose source has changed since; pass overwrite=True to run all "
            "again, resume=True to keep what is done as it is, or another out="
        )
    return changed


def _run(
    function: SweptFunction,
    folder: SweepFolder,
    tasks: Sequence[Task],
    executor: Any,
    on_error: OnError,
    progress: SweepProgress,
) -> None:
    path = str(folder.path.resolve())
    calls = {
        number: (run_seed, function, path, dict(point.settings), seed) for number, (point, seed) in enumerate(tasks)
    }
    with submit_all(calls, executor) as results:
        for number, error in results:
            point, seed = tasks[number]
            if isinstance(error, WorkerStartError):
                raise error
            outcome = _outcome(error, folder, point, seed)
            progress.finish_seed(f"{point}, seed {seed}", outcome.error if outcome.status == "failed" else None)
            if outcome.status == "failed" and on_error == "raise":
                place = folder.place(point, seed)
                raise FeatlearnError(f"{point}, seed {seed} failed: {outcome.error} ({place}.error.txt)")


def _outcome(error: Exception | None, folder: SweepFolder, point: Point, seed: int) -> Outcome:
    """Return the outcome that the job wrote, or write that it failed without one."""
    outcome = folder.outcome(point, seed)
    if outcome.status == "missing":
        words = "it ended without a result" if error is None else one_line(error)
        outcome = Outcome("failed", {}, error=words, lost=True)
        write_outcome(folder.place(point, seed), outcome, f"{words}\n")
    return outcome
