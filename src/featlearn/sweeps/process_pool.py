"""A pool of single-threaded processes, in which a killed worker affects only its current job."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import current_process, get_context, parent_process
from types import TracebackType
from typing import Any

from featlearn.errors import InputValueError, WorkerKilledError, WorkerStartError

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
ATTEMPTS = 2
"""Attempts at a job whose worker is killed."""
UNGUARDED = "in a script, put the call under `if __name__ == '__main__':`, because every worker imports the script"

_ENVIRONMENT = threading.Lock()


@dataclass(frozen=True, eq=False)
class _Worker:
    executor: ProcessPoolExecutor
    pid: int


class ProcessPool:
    """Run functions in spawned, single-threaded processes; `submit` is that of `concurrent.futures`.

    A killed worker (for example, out of memory) is replaced and its job restarted once. If it is killed again, the job
    fails with `WorkerKilledError`. Other jobs continue. Workers end with the parent process, even if it is killed.

    As a context manager, the pool waits for its jobs at exit. After an error it waits for running jobs and drops the
    others. After Ctrl-C it stops all at once.

    Args:
        workers: Number of concurrent jobs; by default the number of cores.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise InputValueError(f"workers={workers}, expected at least 1")
        if getattr(current_process(), "_inheriting", False):
            raise WorkerStartError(f"a worker process tried to start workers: {UNGUARDED}")
        self.workers = workers or available_cores()
        """Number of concurrent jobs."""
        # A thread and an executor per worker: an executor with a killed process ends all its processes.
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="process-pool")
        self._local = threading.local()
        self._workers: set[_Worker] = set()
        self._stopped = False

    def submit(self, function: Callable[..., Any], /, *args: Any) -> "Future[Any]":
        """Call an importable function in a worker."""
        return self._threads.submit(self._call, function, args)

    def close(self) -> None:
        """Wait for all jobs, and end the workers."""
        self._end(cancel=False)

    def stop(self) -> None:
        """End all workers now, whatever they do."""
        self._stopped = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGTERM)
        self._end(cancel=True)

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Exception):
            self.stop()
        else:
            self._end(cancel=error is not None)

    def _end(self, *, cancel: bool) -> None:
        self._threads.shutdown(wait=True, cancel_futures=cancel)
        for worker in list(self._workers):
            self._drop(worker)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        for _ in range(ATTEMPTS):
            if self._stopped:
                break
            worker = self._worker()
            try:
                return worker.executor.submit(function, *args).result()
            except BrokenProcessPool:
                self._drop(worker)
        raise WorkerKilledError(
            f"its worker process was killed {ATTEMPTS} times, perhaps out of memory; use fewer workers"
        )

    def _worker(self) -> _Worker:
        """Return the worker of this thread; start it if needed."""
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None or worker not in self._workers:
            worker = self._local.worker = self._start_worker()
            self._workers.add(worker)
            if self._stopped:  # stopped meanwhile: end the new worker
                self._drop(worker)
        return worker

    def _start_worker(self) -> _Worker:
        executor = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_initialize_worker)
        try:
            with _ENVIRONMENT, _one_thread():  # read when the process starts, before a library loads
                first = executor.submit(os.getpid)
            return _Worker(executor, first.result())
        except BrokenProcessPool as error:
            executor.shutdown(wait=False)
            raise WorkerStartError(f"a worker process did not start, see its message above; {UNGUARDED}") from error

    def _drop(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        worker.executor.shutdown(wait=True)


class Serial:
    """Run functions in this process, one after the other, when their result is requested."""

    workers = 1

    def submit(self, function: Callable[..., Any], /, *args: Any) -> "SerialJob":
        """Return a job that runs when its result is requested."""
        return SerialJob(function, args)


@dataclass(frozen=True, eq=False)
class SerialJob:
    """A function and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def result(self) -> Any:
        """Call the function."""
        return self.function(*self.args)


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _initialize_worker() -> None:
    """Initialize a worker: ignore Ctrl-C, and end with the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:  # a killed parent cannot stop its workers
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


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
