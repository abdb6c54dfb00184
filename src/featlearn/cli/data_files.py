"""The files of each data set, for `featlearn doctor`.

The loaders in `featlearn.data` search the same places. This module does not import torch, which may be missing.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path


def _places(folders: Iterable[str], *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" if folder else name for folder in folders for name in names)


def _idx_files(stem: str, axes: int) -> tuple[str, ...]:
    names = [f"{stem}{mark}idx{axes}-ubyte{suffix}" for mark in "-." for suffix in ("", ".gz")]
    return _places(("mnist", "MNIST", "MNIST/raw", ""), *names)


def _cifar_files(stem: str) -> tuple[str, ...]:
    versions = ("cifar-10-batches-bin", "cifar-10-batches-py")
    return _places((*versions, *(f"cifar10/{folder}" for folder in versions), "cifar10", ""), f"{stem}.bin", stem)


FILES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mnist": {
        f"{part}-{kind}": _idx_files(f"{part}-{kind}", axes)
        for part in ("train", "t10k")
        for kind, axes in (("images", 3), ("labels", 1))
    },
    "cifar10": {stem: _cifar_files(stem) for stem in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")},
}
"""Data set -> file -> possible places below the root."""


def absent_files(root: Path, name: str) -> list[str]:
    """Return the files of a data set that do not exist below the root."""
    return [file for file, places in FILES[name].items() if not any((root / place).is_file() for place in places)]
