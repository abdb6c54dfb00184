"""A pool of processes with one thread each, in which a worker that is killed costs its own job and no other."""

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
"""How often a job is begun whose worker is killed."""
UNGUARDED = "in a script, the call belongs under `if __name__ == '__main__':`, because every worker imports the script"

_ENVIRONMENT = threading.Lock()


@dataclass(frozen=True, eq=False)
class _Worker:
    executor: ProcessPoolExecutor
    pid: int


class ProcessPool:
    """Calls functions in spawned processes of one thread each; `submit` is that of `concurrent.futures`.

    A worker that is killed, for want of memory say, is replaced and its job begun once more; killed again, the job
    fails with a `WorkerKilledError`. Other jobs go on. Workers end with the process that started them, also where that
    is killed.

    As a context manager it waits for its jobs at the end. After an error it waits for those under way and drops the
    others; after Ctrl-C it ends all at once.

    Args:
        workers: how many jobs run at a time; by default one for each core.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise InputValueError(f"workers={workers}, expected at least 1")
        if getattr(current_process(), "_inheriting", False):
            raise WorkerStartError(f"a worker process tried to start workers of its own: {UNGUARDED}")
        self.workers = workers or available_cores()
        """How many jobs run at a time."""
        # A thread for each worker: when a process of an executor is killed, the executor ends its other processes too.
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="process-pool")
        self._own = threading.local()
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
            f"its worker process was killed {ATTEMPTS} times, perhaps for want of memory; with fewer workers each has "
            "more"
        )

    def _worker(self) -> _Worker:
        """The worker of this thread, started where there is none."""
        found: _Worker | None = getattr(self._own, "worker", None)
        if found is None or found not in self._workers:
            found = self._own.worker = self._start_worker()
            self._workers.add(found)
            if self._stopped:  # meanwhile: nobody else would end it
                self._drop(found)
        return found

    def _start_worker(self) -> _Worker:
        executor = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin)
        try:
            with _ENVIRONMENT, _one_thread():  # read when the process starts, before a library loads
                first = executor.submit(os.getpid)
            return _Worker(executor, first.result())
        except BrokenProcessPool as error:
            executor.shutdown(wait=False)
            raise WorkerStartError(
                f"a worker process did not start, its own message stands above; {UNGUARDED}"
            ) from error

    def _drop(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        worker.executor.shutdown(wait=True)


class Serial:
    """Calls functions in this process, one after the other, when their result is asked for."""

    workers = 1

    def submit(self, function: Callable[..., Any], /, *args: Any) -> "SerialJob":
        """A job that runs when its result is asked for."""
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
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin() -> None:
    """In a worker: Ctrl-C is for the process that started it, and with that process it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:  # killed, it cannot say so, and a worker waits for ever
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
