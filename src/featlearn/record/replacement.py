"""Replace a run by a new run at the same path; remove the old run only after the new run has started."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from featlearn.errors import RunError
from featlearn.record.atomic import PART
from featlearn.record.layout import ARRAYS, EVENTS, RUN, SCALARS, named_array
from featlearn.record.reader import Run

_FILES = {RUN, SCALARS, EVENTS, "report.html"}  # report.html is written by `featlearn diagnose`
_SINK = "tensorboard"


def refuse_unless_run(path: Path) -> None:
    """Raise if a path holds anything but a run or an empty directory."""
    try:
        if not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir())):
            return
        if not path.is_dir():
            raise RunError(
                f"{path} is not a directory, expected a run to overwrite, or a new path; choose another out="
            )
        if [entry.name for entry in path.iterdir()] == [RUN + PART]:  # a run that was killed at its start
            return
        Run(path)
        others = sorted(_other_files(path))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    except RunError as error:
        raise RunError(f"overwrite=True would remove {path}, expected a run there: {error}") from error
    if others:
        raise RunError(
            f"{path} holds a run and {len(others)} other files ({others[0]!r}), expected a run alone: "
            "overwrite=True would remove them too; move them, or choose another out="
        )


def _other_files(path: Path) -> Iterator[str]:
    """Yield files in a directory that do not belong to its run, and links."""
    for folder, folders, files in os.walk(path):
        inside = Path(folder).relative_to(path)
        for name in [*folders, *files]:
            place = (inside / name).as_posix()
            if (Path(folder) / name).is_symlink() or not _belongs(place, is_folder=name in folders):
                yield place


def _belongs(place: str, *, is_folder: bool) -> bool:
    top = place.partition("/")[0]
    if is_folder:
        return top in (ARRAYS, _SINK)
    final_name = place.removesuffix(PART)
    tensorboard = top == _SINK and place.rpartition("/")[2].startswith("events.out.tfevents")
    return final_name in _FILES or named_array(final_name) is not None or tensorboard


@contextmanager
def replaced(path: Path) -> Iterator[None]:
    """Set the old run aside while the block writes a new one to `path`; remove it after success, restore it after an
    error.
    """
    refuse_unless_run(path)
    place = path.resolve()
    if not place.exists():
        yield
        return
    renamed = place.with_name(f".{place.name}.replaced-{os.getpid()}")
    try:
        os.rename(place, renamed)
    except OSError as error:
        raise RunError(f"the run in {path} cannot be replaced: {error}; choose another out=") from error
    try:
        place.mkdir()  # keeps links to the path valid
        yield
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)  # remove the incomplete new run
        os.rename(renamed, place)
        raise
    shutil.rmtree(renamed, ignore_errors=True)
