"""Where the files of a data set are, and what is said when they are not there or damaged."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from featlearn.errors import InputTypeError, InputValueError

ROOT = "FEATLEARN_DATA"

Root = str | os.PathLike[str] | None
"""The directory of all data sets; None takes the environment variable FEATLEARN_DATA."""


def checked_root(root: Root) -> Path:
    """The directory that holds the data sets."""
    given = os.environ.get(ROOT) if root is None else root
    if not given:
        raise InputValueError(
            f"root is None and the environment variable {ROOT} is not set, expected the directory that holds the data "
            "sets: pass root=... or set the variable"
        )
    if not isinstance(given, str | os.PathLike):
        raise InputTypeError(f"root is {type(root).__name__}, expected the path of a directory")
    path = Path(given).expanduser()
    if not path.is_dir():
        raise InputValueError(
            f"root is {str(path)!r}, which is no directory; expected the one that holds the data sets"
        )
    return path


def candidates(root: Root, folders: Sequence[str], names: Sequence[str]) -> list[Path]:
    """Where the file may be, likeliest place first."""
    top = checked_root(root)
    return [top / folder / name for folder in folders for name in names]


def present(root: Root, folders: Sequence[str], names: Sequence[str]) -> Path | None:
    """The first of these files that there is."""
    return next((path for path in candidates(root, folders, names) if path.is_file()), None)


def located(root: Root, folders: Sequence[str], names: Sequence[str], what: str) -> Path:
    """The first of these files that there is; an error says where to put it."""
    path = present(root, folders, names)
    if path is None:
        missing(root, folders, names, what)
    return path


def missing(root: Root, folders: Sequence[str], names: Sequence[str], what: str) -> NoReturn:
    """Say which file is not there, and where it would have been found."""
    top = checked_root(root)
    elsewhere = ", ".join(folder or "the root itself" for folder in folders[1:])
    raise InputValueError(
        f"{what}: there is no {' or '.join(names)} in {str(top / folders[0])!r}"
        + (f" (nor in, under the root: {elsewhere})" if elsewhere else "")
        + f"; put it there, or give another root by root=... or {ROOT}"
    )


def damaged(path: Path, got: str, expected: str) -> InputValueError:
    """The error for a file that is not what its name says."""
    return InputValueError(f"{str(path)!r} {got}, expected {expected}; it is damaged or another file: copy it again")
