"""Find the files of a data set, and raise errors for missing and damaged ones."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from featlearn.errors import InputTypeError, InputValueError

ROOT = "FEATLEARN_DATA"

Root = str | os.PathLike[str] | None
"""Directory of all data sets. None means the environment variable FEATLEARN_DATA."""


def checked_root(root: Root) -> Path:
    """Return the directory that holds the data sets."""
    directory = os.environ.get(ROOT) if root is None else root
    if not directory:
        raise InputValueError(
            f"root is None and the environment variable {ROOT} is not set, expected the directory that holds the data "
            "sets: pass root=... or set the variable"
        )
    if not isinstance(directory, str | os.PathLike):
        raise InputTypeError(f"root is {type(root).__name__}, expected the path of a directory")
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise InputValueError(f"root is {str(path)!r}, expected an existing directory that holds the data sets")
    return path


def find_file(root: Root, folders: Sequence[str], names: Sequence[str]) -> Path | None:
    """Return the first existing file, by order of folders and then of names."""
    top = checked_root(root)
    paths = (top / folder / name for folder in folders for name in names)
    return next((path for path in paths if path.is_file()), None)


def locate(root: Root, folders: Sequence[str], names: Sequence[str], dataset: str) -> Path:
    """Return the first existing file, or raise an error that says where to put it."""
    path = find_file(root, folders, names)
    if path is None:
        raise_missing(root, folders, names, dataset)
    return path


def raise_missing(root: Root, folders: Sequence[str], names: Sequence[str], dataset: str) -> NoReturn:
    """Raise an error that names the missing file and the folders that were searched."""
    top = checked_root(root)
    elsewhere = ", ".join(folder or "the root itself" for folder in folders[1:])
    raise InputValueError(
        f"{dataset}: {' or '.join(names)} not found in {str(top / folders[0])!r}"
        + (f" (nor in, under the root: {elsewhere})" if elsewhere else "")
        + f"; put it there, or pass another root by root=... or {ROOT}"
    )


def damage(path: Path, content: str, expected: str) -> InputValueError:
    """Return the error for a file whose content is not the expected one."""
    return InputValueError(
        f"{str(path)!r} {content}, expected {expected}; the file is damaged or of another kind; copy it again"
    )
