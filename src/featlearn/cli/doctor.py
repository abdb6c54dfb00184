"""`featlearn doctor`: check what is installed and missing."""

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from featlearn.cli.answer import DONE, FAILED, Answer, table


def _paths(folders: Iterable[str], *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" if folder else name for folder in folders for name in names)


def _idx_files(stem: str, axes: int) -> tuple[str, ...]:
    names = [f"{stem}{mark}idx{axes}-ubyte{suffix}" for mark in "-." for suffix in ("", ".gz")]
    return _paths(("mnist", "MNIST", "MNIST/raw", ""), *names)


def _cifar_files(stem: str) -> tuple[str, ...]:
    versions = ("cifar-10-batches-bin", "cifar-10-batches-py")
    return _paths((*versions, *(f"cifar10/{folder}" for folder in versions), "cifar10", ""), f"{stem}.bin", stem)


FILES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mnist": {
        f"{part}-{kind}": _idx_files(f"{part}-{kind}", axes)
        for part in ("train", "t10k")
        for kind, axes in (("images", 3), ("labels", 1))
    },
    "cifar10": {stem: _cifar_files(stem) for stem in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")},
}
"""Data set -> file -> possible paths below the root."""


def absent_files(root: Path, name: str) -> list[str]:
    """Return the files of a data set that do not exist below the root."""
    return [file for file, paths in FILES[name].items() if not any((root / path).is_file() for path in paths)]


NEEDED = ("torch", "numpy", "scipy", "scikit-learn", "matplotlib", "pillow", "rich", "cyclopts")
EXTRAS = {
    "lightning": ("lightning", "the Lightning callback"),
    "transformers": ("transformers", "the Trainer callback and the GPT-2 examples"),
    "accelerate": ("transformers", "the Trainer of transformers, which does not run without it"),
    "wandb": ("wandb", "the Weights & Biases sink"),
    "tensorboard": ("tensorboard", "the TensorBoard sink"),
    "trackio": ("trackio", "the Trackio sink"),
    "xarray": ("xarray", "Run.to_xarray"),
    "dask": ("dask", "many runs on a dask scheduler"),
    "distributed": ("dask", "many runs on a dask scheduler"),
    "submitit": ("slurm", "many runs on Slurm"),
    "starlette": ("live", "the live page of a run"),
    "uvicorn": ("live", "the live page of a run"),
}
"""Package -> the extra that installs it, and its purpose."""
LISTED = 3
"""Largest number of missing files that are named."""


def doctor(*, data_root: Path | None = None, json: bool = False, debug: bool = False) -> Answer:
    """Check what is installed, what is missing, and which data files exist.

    The exit status is 1 if a required package is missing.

    For example:

        featlearn doctor
        featlearn doctor --data-root ~/data --json

    Args:
        data_root: Folder of the data files; by default FEATLEARN_DATA.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    needed, extras = ({name: _version(name) for name in names} for names in (NEEDED, EXTRAS))
    directory = os.environ.get("FEATLEARN_DATA") if data_root is None else str(data_root)
    root = Path(directory).expanduser() if directory else None
    absent = {name: list(files) if root is None else absent_files(root, name) for name, files in FILES.items()}
    missing = [name for name, version in needed.items() if version is None]
    devices: list[str] = []
    if "torch" not in missing:
        needed["torch"], devices = _torch()
    versions = {"featlearn": _version("featlearn"), "python": platform.python_version()}
    answer = {
        "versions": {**versions, **needed},
        "extras": extras,
        "devices": devices,
        "data_root": root,
        "data": {name: not files for name, files in absent.items()},
        "data_missing": absent,
        "missing": missing,
    }
    return Answer(data=answer, text=_text(answer), code=FAILED if missing else DONE)


def _text(answer: dict[str, Any]) -> str:
    rows = [[name, version or f"missing: pip install {name}"] for name, version in answer["versions"].items()]
    rows += [
        [name, version or "not installed: pip install 'featlearn[{}]', for {}".format(*EXTRAS[name])]
        for name, version in answer["extras"].items()
    ]
    rows += [["device", device] for device in answer["devices"]]
    root = answer["data_root"]
    rows.append(["data root", str(root) if root else "not set: FEATLEARN_DATA=FOLDER or --data-root FOLDER"])
    rows += [[f"  {name}", _state(name, absent)] for name, absent in answer["data_missing"].items() if root]
    return table(["", ""], [[left, right.ljust(max(len(row[1]) for row in rows))] for left, right in rows]).lstrip("\n")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _state(name: str, absent: list[str]) -> str:
    """Describe whether a data set exists, and which files are missing."""
    if not absent or len(absent) == len(FILES[name]):
        return "not found" if absent else "found"
    more = f" and {len(absent) - LISTED} more" if len(absent) > LISTED else ""
    return f"incomplete: no {', '.join(absent[:LISTED])}{more}"


def _torch() -> tuple[str, list[str]]:
    """Return torch's version with the build (2.13.0+cu130), which PyPI metadata omits, and its devices."""
    import torch

    devices = [f"cpu, {torch.get_num_threads()} threads"]
    devices += [f"cuda:{i}, {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return torch.__version__, [*devices, "mps"] if torch.backends.mps.is_available() else devices
