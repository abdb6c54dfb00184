"""`fl.sweep`: call a function at every point of a grid, except where results exist."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

from featlearn.errors import FeatlearnError, InputTypeError, InputValueError, RunError, WorkerStartError
from featlearn.record.atomic import PART
from featlearn.signatures import name_keywords
from featlearn.sweeps.executors import Executor, batch, submit_all
from featlearn.sweeps.folder import (
    LOCK,
    MANIFEST,
    Outcome,
    SweepFolder,
    lock,
    remove_outcome,
    remove_sweep,
    write_outcome,
)
from featlearn.sweeps.function import SweptFunction, check_function, check_importable
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
    wait: bool = True,
    quiet: bool = False,
) -> Sweep:
    """Call a function at every point of a grid, in parallel, and store the results in a folder.

        def train(scale, width, seed, out):
            ...
            with fl.watch(model, (x, y), out=out) as watch:
                ...
            return watch.run

        if __name__ == "__main__":
            sweep = fl.sweep(train, {"scale": [0.1, 1, 10], "width": [64, 256]}, out="sweeps/a", seeds=3)
            sweep.map(x="scale", y="width", value="regime")

    If the process is killed, call it again to continue. Finished seeds are not repeated; interrupted seeds start over.
    With another grid or more seeds in the same folder, only new points and seeds run.

    Args:
        function: Called as `function(**point, seed=k)`. It returns a run (`watch.run`), the path of a run, a number, or
            a mapping of numbers and words. For a run, the table contains the verdict, its numbers, and last values of
            scalars. If the function takes `out`, it gets a separate folder, empty at each start. If it also takes
            `resume`, the folder keeps files of a killed attempt: `fl.watch(..., out, resume=resume)`. `seed` is
            optional for a single seed.
        grid: Name -> values, for all combinations (a single value is constant); or a list of points, each a mapping.
            Values are numbers and words, and lists or mappings of them.
        out: Folder of the sweep, with a subfolder per point, named by a hash of its settings. Another function, or a
            changed source, raises an error.
        seeds: Number of seeds, counted from 0, or a list of seeds.
        executor: Any object with `submit(function, *args)` that returns an object with `result()`. By default
            `featlearn.sweeps.ProcessPool()`, which runs a single-threaded process per core, replaces killed processes,
            and retries their seeds once. The function must then be importable; in a script, guard the call by `if
            __name__ == "__main__":`. `featlearn.sweeps.Serial()` runs all points in this process, for notebooks and
            debuggers. Dask clients and submitit executors work too. Jobs that an executor loses (for example with a
            node) count as failed, and the next call runs them again.
        on_error: `"keep"` records errors and continues. `"raise"` stops the sweep at the first failure, after running
            seeds end, and runs seeds again that failed before.
        retry: Run failed seeds again.
        resume: Continue although the source of the function has changed; keep existing results.
        overwrite: Remove the sweep in `out` first. Raises if `out` contains other files.
        wait: False submits the jobs and returns at once, for an executor whose jobs outlive this process (Slurm).
            `fl.open_sweep(out)` shows what is done; the same call without it runs what is still missing.
        quiet: Do not show progress on stderr.

    Returns a `Sweep`, with a table, maps, and a page. `fl.open_sweep(out)` reads it again.
    """
    points, seeds = points_of(grid), seeds_of(seeds)
    checked = check_function(function, points, seeds)
    if executor is None or isinstance(executor, ProcessPool | ProcessPoolExecutor):
        check_importable(function)
    return run_sweep(
        checked,
        points,
        seeds,
        Path(out),
        executor=executor,
        on_error=on_error,
        retry=retry,
        resume=resume,
        overwrite=overwrite,
        wait=wait,
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
    wait: bool = True,
    quiet: bool,
) -> Sweep:
    """Run `sweep` for a function that was checked against the points."""
    if on_error not in ("keep", "raise"):
        raise InputValueError(f"on_error={on_error!r}, expected 'keep' or 'raise'")
    if resume and overwrite:
        raise InputValueError("resume=True and overwrite=True, expected at most one of them")
    if not wait and (executor is None or isinstance(executor, ProcessPool | ProcessPoolExecutor)):
        raise InputValueError("wait=False, expected an executor whose jobs outlive this process, such as one of Slurm")
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise InputTypeError(f"executor is {type(executor).__name__}, expected an object with submit(function, *args)")
    pool = None if executor is not None else ProcessPool(min(available_cores(), len(points) * len(seeds)))
    try:
        folder = _begin_sweep(function, points, seeds, out, resume=resume, overwrite=overwrite)
        tasks = [(point, seed) for point in points for seed in seeds]
        for point, seed in tasks:
            outcome = folder.outcome(point, seed)
            if outcome.status == "failed" and (outcome.lost or retry or on_error == "raise"):
                remove_outcome(folder.place(point, seed))
        statuses = [folder.outcome(point, seed).status for point, seed in tasks]
        missing = [task for task, status in zip(tasks, statuses, strict=True) if status == "missing"]
        done = len(tasks) - len(missing)
        pool_context: AbstractContextManager[Any] = nullcontext() if pool is None else pool
        with SweepProgress(out.name, len(tasks), done, statuses.count("failed"), quiet=quiet) as progress, pool_context:
            _run(function, folder, missing, pool or executor, on_error, progress if wait else None)
    except OSError as error:
        raise RunError(f"the sweep cannot be written to {out}: {error}") from error
    return Sweep(out, [(point, list(seeds)) for point in points])


def _begin_sweep(
    function: SweptFunction, points: Sequence[Point], seeds: Sequence[int], out: Path, *, resume: bool, overwrite: bool
) -> SweepFolder:
    """Create the folder, or check that it is of the same function, and add the points."""
    if overwrite:
        remove_sweep(out)
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file, expected a folder for the sweep, or a new path; choose another out=")
    folder = SweepFolder(out)
    has_other_files = out.is_dir() and any(
        entry.name not in (LOCK, MANIFEST, MANIFEST + PART) for entry in out.iterdir()
    )
    if folder.manifest is None and has_other_files:
        raise RunError(f"{out} contains other files, expected a new folder, or the folder of a sweep")
    out.mkdir(parents=True, exist_ok=True)
    with lock(out / "sweep"):
        manifest = folder.manifest
        if manifest is None or _source_changed(function, manifest, out, resume=resume):
            folder.write_manifest(function=function.name, source=function.source)
        folder.add(points, seeds)
    return folder


def _source_changed(function: SweptFunction, manifest: dict[str, Any], out: Path, *, resume: bool) -> bool:
    """Return whether the source of the function has changed; raise if that is not allowed."""
    if manifest.get("function") != function.name:
        raise RunError(
            f"{out} holds a sweep of {manifest.get('function')}, expected one of {function.name}; choose another "
            "out=, or pass overwrite=True to remove it"
        )
    changed = bool(manifest.get("source") != function.source)
    if changed and not resume:
        raise RunError(
            f"{out} holds a sweep of {function.name}, whose source has changed since; pass overwrite=True to run all "
            "points again, resume=True to keep existing results, or another out="
        )
    return changed


def _run(
    function: SweptFunction,
    folder: SweepFolder,
    tasks: Sequence[Task],
    executor: Any,
    on_error: OnError,
    progress: SweepProgress | None,
) -> None:
    """Run the tasks; without `progress`, submit them only."""
    path = str(folder.path.resolve())
    calls = {
        number: (run_seed, function, path, dict(point.settings), seed) for number, (point, seed) in enumerate(tasks)
    }
    if progress is None:
        with batch(executor) if calls else nullcontext():
            for call in calls.values():
                executor.submit(*call)
        return
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
        message = "it ended without a result" if error is None else one_line(error)
        outcome = Outcome("failed", {}, error=message, lost=True)
        write_outcome(folder.place(point, seed), outcome, f"{message}\n")
    return outcome
