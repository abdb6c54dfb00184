"""Run the seeds of an experiment that are not there yet, each in a process of its own where there are several."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import gettempprefix
from typing import Any

from featlearn.errors import FeatlearnError, InputValueError, WorkerKilledError
from featlearn.sweeps.executors import Executor, submit_all
from featlearn.sweeps.process_pool import ProcessPool
from featlearn_papers.frame.context import STOOD_IN, Context
from featlearn_papers.frame.experiment import AnyExperiment
from featlearn_papers.frame.results import versions
from featlearn_papers.frame.runs import Runs, key, save, saved

Measure = Callable[[Any, Context], Any]


def cache_folder(experiment: AnyExperiment, setup: Any, context: Context, cache: Path) -> Path:
    """Where the seeds of a set-up are: CACHE/EXPERIMENT/SETTINGS-CODE."""
    device = context.device.split(":")[0]
    name = key(experiment.id, setup, experiment.measure, device=device, fallback=context.fallback_digits)
    return cache / experiment.id / name


def finished(folder: Path, seeds: Sequence[int]) -> list[int]:
    """Those of the seeds that are there."""
    return [seed for seed in seeds if saved(_place(folder, seed)) is not None]


def stood_in(folder: Path) -> list[str]:
    """Data sets that digits stood in for."""
    return sorted({name for path in folder.glob(f"seed-*/{STOOD_IN}") for name in path.read_text().splitlines()})


Task = tuple[Measure, Any, Context, Path]
"""What one seed is made of: how it is measured, its set-up, its context, and the file of its numbers."""


def missing_seeds(
    experiment: AnyExperiment, setup: Any, context: Context, *, seeds: Sequence[int], cache: Path
) -> list[Task]:
    """The seeds whose numbers are not there yet."""
    folder = cache_folder(experiment, setup, context, cache)
    missing = [seed for seed in seeds if seed not in finished(folder, seeds)]
    return [(experiment.measure, setup, _own(context, folder, seed), _place(folder, seed)) for seed in missing]


def execute(
    experiment: AnyExperiment, setup: Any, context: Context, *, seeds: Sequence[int], jobs: int, cache: Path
) -> Runs:
    """The numbers of all seeds; those already in the cache are not run again.

    With one job seeds run here, one after the other; with more each in a spawned process. A seed has one thread, so
    that its numbers do not depend on `jobs`. A process that is killed loses its seed and no other: run the same again.
    """
    tasks = missing_seeds(experiment, setup, context, seeds=seeds, cache=cache)
    if jobs == 1 or len(tasks) < 2:
        for task in tasks:
            _run(*task)
    else:
        with ProcessPool(min(jobs, len(tasks))) as pool:
            refuse_failures(run_apart(tasks, pool), len(tasks))
    folder = cache_folder(experiment, setup, context, cache)
    found = [saved(_place(folder, seed)) for seed in seeds]
    if None in found:
        raise FeatlearnError(f"seed {seeds[found.index(None)]} left no numbers in {folder}; run the same again")
    return Runs(seeds, [one for one in found if one is not None])


def run_apart(tasks: Sequence[Task], executor: Executor) -> dict[Path, Exception]:
    """Run seeds on an executor. Return the errors of those that left no numbers."""
    with submit_all({task[3]: (_run, *task) for task in tasks}, executor) as results:
        return {
            place: error or FeatlearnError("it ended without numbers")
            for place, error in results
            if saved(place) is None
        }


def refuse_failures(failures: Mapping[Path, Exception], count: int) -> None:
    """Raise if seeds have failed: their own error where it says what is wrong with all of them, else a list."""
    if not failures:
        return
    first = next(iter(failures.values()))
    if isinstance(first, InputValueError) and len({str(error) for error in failures.values()}) == 1:
        raise first
    listed = [f"{place.stem.replace('-', ' ')}: {_one_line(error)}" for place, error in failures.items()]
    fewer = ", with fewer --jobs" if any(isinstance(e, WorkerKilledError) for e in failures.values()) else ""
    raise FeatlearnError(
        f"{len(failures)} of {count} seeds failed: {'; '.join(listed)}; finished seeds are kept: run the same again"
        f"{fewer}"
    ) from first


def _one_line(error: Exception) -> str:
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return message if isinstance(error, FeatlearnError) else f"{type(error).__name__}: {message}"


def _place(folder: Path, seed: int) -> Path:
    return folder / f"seed-{seed}.npz"


def _own(context: Context, folder: Path, seed: int) -> Context:
    return replace(context, seed=seed, folder=folder / f"seed-{seed}", started=time.monotonic())


def _run(measure: Measure, setup: Any, context: Context, place: Path) -> None:
    import torch

    context.folder.mkdir(parents=True, exist_ok=True)
    for left in context.folder.glob(f"{gettempprefix()}*"):  # by an attempt that was killed: kernels, many megabytes
        shutil.rmtree(left, ignore_errors=True)
    begin, threads, made = time.monotonic(), torch.get_num_threads(), versions()
    if context.device.startswith("cuda"):
        made["gpu"] = torch.cuda.get_device_name(context.device)
    torch.set_num_threads(1)
    try:
        numbers = measure(setup, context)
    finally:
        torch.set_num_threads(threads)
    save(place, numbers, time.monotonic() - begin, made)
    if not any(context.folder.iterdir()):
        context.folder.rmdir()
    context.say("done")
