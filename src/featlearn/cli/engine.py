"""The options --dask and --slurm: what runs jobs in place of processes of this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from featlearn.cli.answer import UsageError
from featlearn.errors import InputValueError

if TYPE_CHECKING:
    from featlearn.sweeps.executors import Executor


def one_engine(jobs: int | None, dask: str | None, slurm: str | None) -> None:
    """Refuse more than one of the options, and settings that cannot be read, before anything runs."""
    given = [name for name, value in (("--jobs", jobs), ("--dask", dask), ("--slurm", slurm)) if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are given, expected one of them")
    if slurm is not None:
        from featlearn.sweeps.executors import slurm_settings

        try:
            slurm_settings(slurm)
        except InputValueError as error:
            raise UsageError(str(error)) from error


@contextmanager
def chosen_executor(dask: str | None, slurm: str | None, logs: Path) -> "Iterator[Executor | None]":
    """The executor that was asked for, None for processes of this machine; logs of Slurm jobs go to a folder."""
    from featlearn.sweeps.executors import dask_executor, slurm_executor

    if dask is not None:
        with dask_executor(dask) as executor:
            yield executor
    elif slurm is not None:
        yield slurm_executor(slurm, logs.resolve())
    else:
        yield None
