"""The options --dask and --slurm: run jobs on a cluster instead of local processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from featlearn.cli.answer import UsageError
from featlearn.errors import InputValueError

if TYPE_CHECKING:
    from featlearn.sweeps.executors import Executor


def check_engine(jobs: int | None, dask: str | None, slurm: str | None) -> None:
    """Raise for conflicting options, and for invalid settings, before anything runs."""
    options = [name for name, value in (("--jobs", jobs), ("--dask", dask), ("--slurm", slurm)) if value is not None]
    if len(options) > 1:
        raise UsageError(f"{' and '.join(options)} are passed, expected only one of them")
    if slurm is not None:
        from featlearn.sweeps.executors import slurm_settings

        try:
            slurm_settings(slurm)
        except InputValueError as error:
            raise UsageError(str(error)) from error


@contextmanager
def open_executor(dask: str | None, slurm: str | None, logs: Path) -> "Iterator[Executor | None]":
    """Yield the requested executor, or None for local processes; Slurm logs go to a folder."""
    from featlearn.sweeps.executors import dask_executor, slurm_executor

    if dask is not None:
        with dask_executor(dask) as executor:
            yield executor
    elif slurm is not None:
        yield slurm_executor(slurm, logs.resolve())
    else:
        yield None
