"""Run the seeds of an experiment that are not there yet, each in a process of its own where there are several."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from tempfile import gettempprefix
from threading import Thread
from typing import Any

from featlearn.errors import FeatlearnError
from featlearn.papers.context import STOOD_IN, Context
from featlearn.papers.experiment import AnyExperiment
from featlearn.papers.results import versions
from featlearn.papers.runs import Runs, key, save, saved

# before a library loads that would start one thread for each core
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

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
    spawn, count = get_context("spawn"), min(jobs, len(tasks))
    with _one_thread(), ProcessPoolExecutor(count, mp_context=spawn, initializer=_end_with_parent) as pool:
        futures = [pool.submit(_run, measure, setup, context, place) for context, place in tasks]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BrokenProcessPool as error:
            raise FeatlearnError(
                "a process of a seed was killed, perhaps for want of memory; finished seeds are kept: run the same "
                "again, with fewer --jobs"
            ) from error
        except KeyboardInterrupt:
            for process in list(pool._processes.values()):  # otherwise seeds under way would be waited for
                process.terminate()
            raise
        finally:
            for future in futures:
                future.cancel()


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: killed, it cannot say so, and a worker waits for ever."""

    def watch() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    Thread(target=watch, daemon=True).start()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
