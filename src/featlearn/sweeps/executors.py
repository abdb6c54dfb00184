"""Executors on other machines: a dask scheduler, or Slurm through submitit.

An executor is any object with `submit(function, *args)` that returns an object with `result()`. Results are stored in
files, so executors need no state: a repeated call runs only what is missing.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

from featlearn.errors import FeatlearnError, InputValueError
from featlearn.sweeps.process_pool import available_cores

Key = TypeVar("Key")
POLL = 0.02
"""Seconds between two checks of pending jobs."""
LOCAL = "local"
"""Run a dask cluster, or processes in place of Slurm, on this machine."""


class Executor(Protocol):
    """Anything that runs jobs: a `concurrent.futures` pool, a dask client, a submitit executor."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Start a job; return an object with `result()`."""


@contextmanager
def submit_all(
    calls: Mapping[Key, tuple[Callable[..., Any], *tuple[Any, ...]]], executor: Executor
) -> Iterator[Iterator[tuple[Key, Exception | None]]]:
    """Submit all calls, and yield an iterator over (key, error or None) as they end. Cancel pending calls at exit."""
    jobs: dict[Key, Any] = {}
    try:
        with batch(executor) if calls else nullcontext():
            for key, call in calls.items():
                jobs[key] = executor.submit(*call)
        yield _results(jobs)
    finally:
        for job in jobs.values():
            if callable(cancel := getattr(job, "cancel", None)):
                cancel()


def batch(executor: Executor) -> AbstractContextManager[Any]:
    """Return a context that submits its jobs together, where the executor has `batch()`: Slurm, as one array job."""
    context: AbstractContextManager[Any] = getattr(executor, "batch", nullcontext)()
    return context


def _results(jobs: dict[Key, Any]) -> Iterator[tuple[Key, Exception | None]]:
    """Yield and remove jobs as they end. Wait for jobs without `done()` in order."""
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

    If a worker is killed, dask restarts its job on another worker, up to four times in all. Then the job fails with
    `KilledWorker`.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Start a job. In contrast to the client, run it even if a job with equal arguments ran before."""
        return self._client.submit(function, *args, pure=False)


@contextmanager
def dask_executor(address: str) -> Iterator[DaskExecutor]:
    """Connect to a scheduler, such as tcp://host:8786; `local` starts a single-threaded worker per core."""
    distributed = _import_extra("distributed", "dask")
    if address == LOCAL:
        dask = import_module("dask")
        # Assign jobs to free workers only: jobs queued at a killed worker would count as failed attempts.
        with (
            dask.config.set({"distributed.scheduler.worker-saturation": 1.0}),
            distributed.LocalCluster(
                n_workers=available_cores(), threads_per_worker=1, dashboard_address=None, silence_logs=50
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            # Replace workers whose restart fails (on a busy machine); jobs would wait forever otherwise.
            cluster.adapt(minimum=available_cores(), maximum=available_cores())
            yield DaskExecutor(client)
        return
    try:
        client = distributed.Client(address, timeout="10s")
    except (OSError, ValueError, TypeError) as error:
        raise FeatlearnError(
            f"no dask scheduler answers at {address!r} ({error}), expected an address such as tcp://host:8786, or "
            f"{LOCAL!r} for workers on this machine"
        ) from error
    with client:
        yield DaskExecutor(client)


class SlurmExecutor:
    """Jobs of submitit, which resubmits a job that Slurm preempts or that runs out of time."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Submit a job."""
        return self._executor.submit(Resubmitted(function), *args)

    def batch(self) -> AbstractContextManager[None]:
        """Submit the jobs of this context as one array job."""
        context: AbstractContextManager[None] = self._executor.batch()
        return context


@dataclass(frozen=True)
class Resubmitted:
    """A function that submitit calls again with the same arguments in a new job, when the first one is interrupted."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.function(*args)

    def checkpoint(self, *args: Any) -> Any:
        """Return the job to submit in place of the interrupted one."""
        return import_module("submitit").helpers.DelayedSubmission(self, *args)


def slurm_executor(settings: str, folder: Path) -> SlurmExecutor:
    """Return an executor that submits jobs to Slurm through submitit, those of one sweep as one array job.

    Logs go to `folder`, which all nodes must see. `settings` are comma-separated key=value pairs: timeout_min, mem_gb,
    gpus_per_node, cpus_per_task, name, or sbatch options known to submitit (partition, account, constraint, qos ...).
    `cluster=local` runs jobs on this machine. A preempted job, or one that runs out of time, is submitted again. A
    killed job fails.
    """
    submitit = _import_extra("submitit", "slurm")
    values = slurm_settings(settings)
    cluster = values.pop("cluster", "slurm")
    shared = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")
    parameters = {key if key in shared else f"slurm_{key}": value for key, value in values.items()}
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**parameters)
    except (RuntimeError, ValueError, NameError, AssertionError) as error:
        message = " ".join(str(error).split())
        raise InputValueError(
            f"--slurm {settings} cannot be used: {message}; expected a machine with sbatch and settings such as "
            "partition=gpu,timeout_min=60"
        ) from error
    return SlurmExecutor(executor)


def slurm_settings(settings: str) -> dict[str, Any]:
    """Parse settings by name, with numbers converted."""
    by_name: dict[str, Any] = {}
    for item in settings.split(","):
        key, sign, value = (part.strip() for part in item.partition("="))
        if not sign or not key.isidentifier() or not value or key in by_name:
            raise InputValueError(
                f"--slurm has {item!r}, expected comma-separated key=value pairs with distinct keys, as in "
                "partition=gpu,timeout_min=60"
            )
        by_name[key] = int(value) if value.isdigit() else value
    return by_name


def _import_extra(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise FeatlearnError(f"{module} cannot be imported ({error}); pip install 'featlearn[{extra}]'") from error
