"""`featlearn doctor`: what is installed, what is missing, and how to get it."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from featlearn.cli.answer import DONE, FAILED, Answer, table

NEEDED = ("torch", "numpy", "scipy", "scikit-learn", "matplotlib", "rich", "cyclopts")
EXTRAS = {
    "lightning": "the Lightning callback",
    "transformers": "the Trainer callback and the GPT-2 examples",
    "wandb": "the Weights & Biases sink",
    "tensorboard": "the TensorBoard sink",
    "xarray": "Run.to_xarray",
}
DATA = {
    "mnist": ("mnist/train-images-idx3-ubyte*", "MNIST/raw/train-images-idx3-ubyte*"),
    "cifar10": ("cifar-10-batches-bin/data_batch_1.bin", "cifar-10-batches-py/data_batch_1"),
    "cifar100": ("cifar-100-binary/train.bin", "cifar-100-python/train"),
    "svhn": ("svhn/train_32x32.mat",),
    "stl10": ("stl10_binary/train_X.bin",),
    "gtsrb": ("[gG][tT][sS][rR][bB]",),
    "celeba": ("celeba",),
    "shakespeare": ("shakespeare/input.txt",),
}
"""Data set -> patterns of its files below the root."""


def doctor(*, data_root: Path | None = None, json: bool = False, debug: bool = False) -> Answer:
    """Say what is installed, what is missing and how to get it, and which data files are found.

    Exit status 1 if something is missing that featlearn cannot do without.

    For example:

        featlearn doctor
        featlearn doctor --data-root ~/data --json

    Args:
        data_root: Folder of the data files; by default what FEATLEARN_DATA says.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    needed, extras = ({name: _version(name) for name in names} for names in (NEEDED, EXTRAS))
    given = os.environ.get("FEATLEARN_DATA") if data_root is None else str(data_root)
    root = Path(given).expanduser() if given else None
    data = {name: _found(root, patterns) for name, patterns in DATA.items()}
    missing = [name for name, version in needed.items() if version is None]
    devices = [] if "torch" in missing else _devices()
    versions = {"featlearn": _version("featlearn"), "python": platform.python_version()}
    answer = {"versions": {**versions, **needed}, "extras": extras, "devices": devices, "data_root": root,
              "data": data, "missing": missing}  # fmt: skip
    return Answer(data=answer, text=_text(answer), code=FAILED if missing else DONE)


def _text(answer: dict[str, Any]) -> str:
    rows = [[name, version or f"missing: pip install {name}"] for name, version in answer["versions"].items()]
    rows += [[name, version or f"not there: pip install 'featlearn[{name}]', for {EXTRAS[name]}"]
             for name, version in answer["extras"].items()]  # fmt: skip
    rows += [["device", one] for one in answer["devices"]]
    root = answer["data_root"]
    rows.append(["data root", str(root) if root else "not set: FEATLEARN_DATA=FOLDER or --data-root FOLDER"])
    rows += [[f"  {name}", "found" if there else "not there"] for name, there in answer["data"].items() if root]
    return table(["", ""], [[left, right.ljust(max(len(row[1]) for row in rows))] for left, right in rows]).lstrip("\n")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _found(root: Path | None, patterns: tuple[str, ...]) -> bool:
    return root is not None and root.is_dir() and any(next(root.glob(pattern), None) for pattern in patterns)


def _devices() -> list[str]:
    import torch

    found = [f"cpu, {torch.get_num_threads()} threads"]
    found += [f"cuda:{i}, {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return [*found, "mps"] if torch.backends.mps.is_available() else found
