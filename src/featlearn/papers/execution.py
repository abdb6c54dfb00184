"""Run the seeds of an experiment that are not there yet, each in a process of its own where there are several."""

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import replace
from pathlib import Path
from tempfile import gettempprefix
from typing import Any

from featlearn.errors import FeatlearnError, WorkerKilledError
from featlearn.papers.context import STOOD_IN, Context
from featlearn.papers.experiment import AnyExperiment
from featlearn.papers.results import versions
from featlearn.papers.runs import Runs, key, save, saved
from featlearn.process_pool import ProcessPool

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


def execute(
    experiment: AnyExperiment, setup: Any, context: Context, *, seeds: Sequence[int], jobs: int, cache: Path
) -> Runs:
    """The numbers of all seeds; those already in the cache are not run again.

    With one job seeds run here, one after the other; with more each in a spawned process. A seed has one thread, so
    that its numbers do not depend on `jobs`. A process that is killed loses its seed and no other: run the same again.
    """
    folder = cache_folder(experiment, setup, context, cache)
    missing = [seed for seed in seeds if seed not in finished(folder, seeds)]
    tasks = [(_own(context, folder, seed), _place(folder, seed)) for seed in missing]
    if jobs == 1 or len(missing) < 2:
        for own, place in tasks:
            _run(experiment.measure, setup, own, place)
    else:
        _run_apart(experiment.measure, setup, tasks, jobs)
    found = [saved(_place(folder, seed)) for seed in seeds]
    if None in found:
        raise FeatlearnError(f"seed {seeds[found.index(None)]} left no numbers in {folder}; run the same again")
    return Runs(seeds, [one for one in found if one is not None])


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


def _run_apart(measure: Measure, setup: Any, tasks: Sequence[tuple[Context, Path]], jobs: int) -> None:
    try:
        with ProcessPool(min(jobs, len(tasks))) as pool:
            futures = [pool.submit(_run, measure, setup, context, place) for context, place in tasks]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
    except WorkerKilledError as error:
        raise FeatlearnError(f"{error}; finished seeds are kept: run the same again, with fewer --jobs") from error
