"""Built-in networks and data."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from featlearn import data
from featlearn.cli.answer import UsageError
from featlearn.cli.settings import TrainingSettings
from featlearn.cli.training_task import TrainingTask
from featlearn.data.dataset_files import ROOT
from featlearn.errors import FeatlearnError, InputValueError, did_you_mean
from featlearn.losses import function
from featlearn.models import CNN, MLP
from featlearn.steer import whiten

IMAGES: dict[str, Callable[..., data.Labeled]] = {"mnist": data.mnist, "cifar10": data.cifar10}
Pair = tuple[Tensor, Tensor]


def built_in_task(settings: TrainingSettings) -> TrainingTask:
    """Create network, data, and loss for the settings. Uses torch's global seed."""
    (x, y), test = _samples(settings)
    labels = not y.is_floating_point()
    classes = int(max(y.max(), -1 if test is None else test[1].max())) + 1 if labels else 0
    if settings.loss == "cross-entropy" and not labels:
        raise InputValueError(f"--loss cross-entropy with y of {y.dtype}, expected integer classes")
    if settings.whiten:
        whitening = whiten(x)
        x, test = whitening.x, None if test is None else (whitening.transform(test[0]), test[1])
    outputs = classes if labels else None if y.dim() == 1 else y.shape[1]
    if labels and settings.loss != "cross-entropy":
        shift = 0.0 if settings.loss == "bce" else 1 / classes  # squared errors train on rows that sum to zero
        y, test = (
            _one_hot(y, classes) - shift,
            None if test is None else (test[0], _one_hot(test[1], classes) - shift),
        )
    return TrainingTask(
        model=_network(settings, x, outputs), x=x, y=y, test=test, loss=function(settings.loss), loss_name=settings.loss
    )


def _network(settings: TrainingSettings, x: Tensor, outputs: int | None) -> nn.Module:
    if settings.model == "mlp":
        return MLP(x[0].numel(), outputs, width=settings.width, hidden_layers=settings.hidden_layers)
    return CNN(x.shape[1], outputs, width=settings.width, hidden_layers=settings.hidden_layers, kernel_size=3)


def _samples(settings: TrainingSettings) -> tuple[Pair, Pair | None]:
    """Load training and test samples, independent of the seed: images for a CNN, rows for an MLP."""
    name, _, batches = settings.data.partition(":")
    train: Pair
    test: Pair | None
    if settings.data == "digits":
        train, test = ((part.x, part.labels) for part in (data.digits("train"), data.digits("test")))
    elif name in IMAGES:
        train, test = (_read(settings, name, batches, split) for split in ("train", "test"))
    elif settings.data.endswith(".npz"):
        train, test = _from_file(Path(settings.data))
    else:
        names = ["digits", *IMAGES]
        raise UsageError(f"--data {settings.data}, expected {', '.join(names)} or FILE.npz{did_you_mean(name, names)}")
    order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(0))
    indices, rest = order[: settings.samples], order[settings.samples :]
    if len(indices) < settings.samples:
        raise InputValueError(f"--samples {settings.samples}, but {settings.data} has {len(indices)}; use fewer")
    if test is None:  # samples not used for training
        test = train[0][rest], train[1][rest]
    unseen = test[0][: settings.test], test[1][: settings.test]
    reshape = _images if settings.model == "cnn" else partial(torch.flatten, start_dim=1)
    too_few = len(unseen[0]) < 2
    return (reshape(train[0][indices]), train[1][indices]), None if too_few else (reshape(unseen[0]), unseen[1])


def _read(settings: TrainingSettings, name: str, batches: str, split: str) -> Pair:
    """Draw the required number of samples at random; cifar10:1,2 trains on batches 1 and 2 only."""
    count = settings.samples if split == "train" else max(settings.test, 1)
    options: dict[str, Any] = {"samples": count, "generator": torch.Generator().manual_seed(0)}
    if batches and split == "train":
        if name != "cifar10" or not all(part.isdecimal() for part in batches.split(",")):
            raise UsageError(f"--data {settings.data}, expected batches such as cifar10:1,2,3")
        options["batches"] = [int(part) for part in batches.split(",")]
    if settings.data_root is None and not os.environ.get(ROOT):
        raise InputValueError(f"--data {name} needs its files; pass their folder by --data-root or {ROOT}")
    if settings.data_root is not None and not settings.data_root.expanduser().is_dir():
        raise InputValueError(
            f"--data-root {settings.data_root} is not a folder, expected the folder of the data files"
        )
    try:
        dataset = IMAGES[name](settings.data_root, split, **options)
    except InputValueError as error:  # mentions arguments of fl.data
        raise InputValueError(str(error).replace("root=...", "--data-root")) from error
    return dataset.x, dataset.labels


def _from_file(path: Path) -> tuple[Pair, Pair | None]:
    """Load arrays x, y and optionally x_test, y_test, without unpickling."""
    try:
        with numpy.load(path, allow_pickle=False) as arrays:
            arrays_by_name = {name: arrays[name] for name in ("x", "y", "x_test", "y_test") if name in arrays}
            missing, names = {"x", "y"} - arrays_by_name.keys(), ", ".join(arrays)
    except (ValueError, EOFError) as error:
        raise FeatlearnError(f"{path} cannot be read: {error}") from error
    if missing:
        raise InputValueError(f"{path} has the arrays {names or '(none)'}, expected x and y")
    tensors = {name: _tensor(values, name, path) for name, values in arrays_by_name.items()}
    for x, y in (("x", "y"), ("x_test", "y_test")):
        if x in tensors and y in tensors and len(tensors[x]) != len(tensors[y]):
            raise InputValueError(f"{path} has {len(tensors[x])} samples in {x} and {len(tensors[y])} in {y}")
    test = (tensors["x_test"], tensors["y_test"]) if {"x_test", "y_test"} <= tensors.keys() else None
    return (tensors["x"], tensors["y"]), test


def _tensor(values: numpy.ndarray, name: str, path: Path) -> Tensor:
    """Convert to float32, or to int64 for classes: integers in y."""
    if values.dtype.kind not in "fiub" or values.ndim == 0:
        raise InputValueError(
            f"{name} of {path} is {values.dtype} of shape {values.shape}, expected an array of numbers"
        )
    classes = name.startswith("y") and values.dtype.kind in "iub" and values.ndim == 1
    tensor = torch.from_numpy(numpy.ascontiguousarray(values.astype(numpy.int64 if classes else numpy.float32)))
    if classes and len(tensor) and int(tensor.min()) < 0:
        raise InputValueError(f"{name} of {path} has classes from {int(tensor.min())}, expected 0, 1, 2 ...")
    if not bool(torch.isfinite(tensor).all()):
        raise InputValueError(f"{name} of {path} has entries that are nan or infinite")
    return tensor


def _images(x: Tensor) -> Tensor:
    """Reshape to (P, channels, height, width); rows become square gray images."""
    if x.dim() == 4:
        return x
    side = round(x[0].numel() ** 0.5)
    if x[0].numel() != side**2:
        raise InputValueError(
            f"--model cnn on inputs of shape {tuple(x.shape)}, expected images (P, channels, height, width) or squares"
        )
    return x.reshape(len(x), 1, side, side)


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    return nn.functional.one_hot(labels, classes).float()
