"""Where many jobs run beside a pool of processes: a scheduler of dask, or Slurm through submitit.

An executor is any object with `submit(function, *args)` that returns something with `result()`. What a job has done is
in its files, so that executors need no memory of their own: the same call again runs what is missing.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

from featlearn.errors import FeatlearnError, InputValueError
from featlearn.sweeps.process_pool import available_cores

Key = TypeVar("Key")
POLL = 0.02
"""Seconds between two checks of pending jobs."""
LOCAL = "local"
"""In place of an address of dask: a cluster of this machine. In place of Slurm: processes of this machine."""


class Executor(Protocol):
    """What runs jobs: a pool of `concurrent.futures`, a client of dask, an executor of submitit ..."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Begin a job; returns something with `result()`."""


@contextmanager
def submit_all(
    calls: Mapping[Key, tuple[Callable[..., Any], *tuple[Any, ...]]], executor: Executor
) -> Iterator[Iterator[tuple[Key, Exception | None]]]:
    """Submit all calls, and iterate over (key, error or None) as they end. At exit, cancel those that are pending."""
    jobs: dict[Key, Any] = {}
    try:
        for key, call in calls.items():
            jobs[key] = executor.submit(*call)
        yield _results(jobs)
    finally:
        for job in jobs.values():
            if callable(cancel := getattr(job, "cancel", None)):
                cancel()


def _results(jobs: dict[Key, Any]) -> Iterator[tuple[Key, Exception | None]]:
    """Remove jobs as they end. A job without `done()` is waited for in its turn."""
    while jobs:
        ready = [key for key, job in jobs.items() if callable(getattr(job, "done", None)) and job.done()]
        first = next(iter(jobs))
        if not ready and not callable(getattr(jobs[first], "done", None)):
            ready = [first]
        if not ready:
            time.sleep(POLL)
        for key in ready:
            error: Exception | None = None
            try:
                jobs.pop(key).result()
            except Exception as raised:
                error = raised
            yield key, error


class DaskExecutor:
    """Jobs on the workers of a dask scheduler.

    A job whose worker is killed is begun again by dask on another one, up to four times in all; then it fails with a
    `KilledWorker`.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Begin a job; unlike the client itself, also one that was run before with equal arguments."""
        return self._client.submit(function, *args, pure=False)


@contextmanager
def dask_executor(address: str) -> Iterator[DaskExecutor]:
    """The scheduler at an address, as tcp://host:8786; `local` starts a worker of one thread on each core."""
    distributed = _import_extra("distributed", "dask")
    if address == LOCAL:
        dask = import_module("dask")
        # A worker gets a job when it is free: one that waits at a worker that is killed would count as its job.
        with (
            dask.config.set({"distributed.scheduler.worker-saturation": 1.0}),
            distributed.LocalCluster(
                n_workers=available_cores(), threads_per_worker=1, dashboard_address=None, silence_logs=50
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            # A worker whose restart fails too, on a busy machine, is replaced: jobs would wait for ever.
            cluster.adapt(minimum=available_cores(), maximum=available_cores())
            yield DaskExecutor(client)
        return
    try:
        client = distributed.Client(address, timeout="10s")
    except (OSError, ValueError, TypeError) as error:
        raise FeatlearnError(
            f"no dask scheduler answers at {address!r} ({error}), expected an address as tcp://host:8786, or "
            f"{LOCAL!r} for workers on this machine"
        ) from error
    with client:
        yield DaskExecutor(client)


def slurm_executor(settings: str, folder: Path) -> Executor:
    """Jobs of Slurm, one for each call, through submitit; their logs go to `folder`, which all nodes must see.

    `settings`: key=value, divided by commas: timeout_min, mem_gb, gpus_per_node, cpus_per_task, name, or options of
    sbatch as submitit has them (partition, account, constraint, qos ...). `cluster=local` runs them on this machine.
    A job that is killed fails, and submitit says so; it is not begun again.
    """
    submitit = _import_extra("submitit", "slurm")
    given = slurm_settings(settings)
    cluster = given.pop("cluster", "slurm")
    shared = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")
    named = {key if key in shared else f"slurm_{key}": value for key, value in given.items()}
    try:
        executor: Executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**named)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError, NameError, AssertionError) as error:
        said = " ".join(str(error).split())
        raise InputValueError(
            f"--slurm {settings} cannot be used: {said}; expected a machine with Slurm's sbatch and settings such as "
            "partition=gpu,timeout_min=60"
        ) from error
    return executor


def slurm_settings(settings: str) -> dict[str, Any]:
    """The settings by name, numbers as numbers."""
    found: dict[str, Any] = {}
    for item in settings.split(","):
        key, sign, value = (part.strip() for part in item.partition("="))
        if not sign or not key.isidentifier() or not value or key in found:
            raise InputValueError(
                f"--slurm has {item!r}, expected key=value divided by commas, each key once, as in "
                "partition=gpu,timeout_min=60"
            )
        found[key] = int(value) if value.isdigit() else value
    return found


def _import_extra(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise FeatlearnError(f"{module} cannot be imported ({error}); pip install 'featlearn[{extra}]'") from error
