"""Replacing a run by a new one in the same place: only a run is removed, and only once the new one has begun."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from featlearn.errors import RunError
from featlearn.record.atomic import PART
from featlearn.record.layout import ARRAYS, EVENTS, RUN, SCALARS, named_array
from featlearn.record.reader import Run

_FILES = {RUN, SCALARS, EVENTS, "report.html"}  # the last by `featlearn diagnose`
_SINK = "tensorboard"


def refuse_unless_run(path: Path) -> None:
    """Refuse a place that holds anything else than a run; nothing, or an empty directory, is fine."""
    try:
        if not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir())):
            return
        if not path.is_dir():
            raise RunError(f"{path} is not a directory, expected a run to overwrite, or nothing; choose another out=")
        if [entry.name for entry in path.iterdir()] == [RUN + PART]:  # a run that was killed as it began
            return
        Run(path)
        strange = sorted(_strange(path))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    except RunError as error:
        raise RunError(f"overwrite=True would remove {path}, expected a run there: {error}") from error
    if strange:
        raise RunError(
            f"{path} holds a run and {len(strange)} other files ({strange[0]!r}), expected a run alone: overwrite=True "
            "would remove them too; move them, or choose another out="
        )


def _strange(path: Path) -> Iterator[str]:
    """What in a directory is not of its run: other files, and links, which may lead anywhere."""
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
    whole = place.removesuffix(PART)
    tensorboard = top == _SINK and place.rpartition("/")[2].startswith("events.out.tfevents")
    return whole in _FILES or named_array(whole) is not None or tensorboard


@contextmanager
def replaced(path: Path, overwrite: bool = True) -> Iterator[None]:
    """Begin a new run at `path` inside: the old one is put aside, and removed at the end or put back if that fails."""
    if overwrite:
        refuse_unless_run(path)
    place = path.resolve()
    if not overwrite or not place.exists():
        yield
        return
    aside = place.with_name(f".{place.name}.replaced-{os.getpid()}")
    try:
        os.rename(place, aside)
    except OSError as error:
        raise RunError(f"the run in {path} cannot be replaced: {error}; choose another out=") from error
    try:
        place.mkdir()  # a link to it would lead nowhere
        yield
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)  # what the new run has begun
        os.rename(aside, place)
        raise
    shutil.rmtree(aside, ignore_errors=True)
