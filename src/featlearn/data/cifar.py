"""CIFAR-10, from the binary or the Python version of its files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import numpy
from numpy.typing import NDArray

from featlearn.data.dataset_files import Root, damage, find_file, raise_missing
from featlearn.data.labeled import Labeled
from featlearn.data.pickled import read_pickle
from featlearn.data.selection import Channels, ImageOptions, Selection, labeled_images
from featlearn.errors import InputValueError

__all__ = ["cifar10"]

_PIXELS = 3 * 32 * 32
_FOLDERS = (
    "cifar-10-batches-bin",
    "cifar-10-batches-py",
    "cifar10/cifar-10-batches-bin",
    "cifar10/cifar-10-batches-py",
    "cifar10",
    "",
)
_CHANNELS = Channels((0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784))


class Batch(NamedTuple):
    """Images and labels of one file."""

    images: NDArray[numpy.uint8]
    """(N, 3072)"""
    labels: NDArray[numpy.int64]
    """(N,)"""


def cifar10(
    root: Root = None,
    split: Literal["train", "test"] = "train",
    batches: Sequence[int] | None = None,
    **options: Unpack[ImageOptions],
) -> Labeled:
    """Read CIFAR-10: color photographs of 32 x 32 in 10 classes, five training batches of 10,000 and 10,000 to test.

    0 airplane, 1 automobile, 2 bird, 3 cat, 4 deer, 5 dog, 6 frog, 7 horse, 8 ship, 9 truck.

    Args:
        root: Directory with ``cifar-10-batches-bin/`` (files ``data_batch_1.bin`` ... and ``test_batch.bin``) or
            ``cifar-10-batches-py/`` (the same names without ``.bin``; pickles are read without running code).
            FEATLEARN_DATA by default.
        split: ``"train"`` or ``"test"``.
        batches: Training batches from 1 to 5, in this order. All five by default.
        options: `ImageOptions`: classes, samples, balanced, generator, flatten, normalization.

    Returns:
        ``x`` of shape (P, 3, 32, 32), channels red, green, blue, or (P, 3072) with ``flatten=True``, from 0 to 1, and
        ``labels``, in the order of the files. ``normalization="channel"`` uses means 0.4914, 0.4822, 0.4465 and
        deviations 0.2470, 0.2435, 0.2616.
    """
    if split not in ("train", "test"):
        raise InputValueError(f"split is {split!r}, expected 'train' or 'test'")
    selection = Selection.from_options(options)
    stems = [f"data_batch_{batch}" for batch in _checked_batches(batches)] if split == "train" else ["test_batch"]
    if split == "test" and batches is not None:
        raise InputValueError(f"batches={batches!r} of the test set, expected None: only training data has batches")
    paths = {stem: path for stem in stems if (path := find_file(root, _FOLDERS, (f"{stem}.bin", stem)))}
    absent = [f"{stem}.bin" for stem in stems if stem not in paths]
    if absent:
        present = ", ".join(stem[-1] for stem in paths)
        hint = f" (of its batches {present} are here: batches=[{present}] reads them)" if present else ""
        raise_missing(root, _FOLDERS, absent, f"cifar10{hint}")
    files = [read_batch(path, classes=10, key="labels", count=10_000) for path in paths.values()]
    return select_images(files, 10, f"cifar10 {split}", selection, _CHANNELS)


def _checked_batches(batches: Sequence[int] | None) -> list[int]:
    numbers = [1, 2, 3, 4, 5] if batches is None else list(batches) if isinstance(batches, Sequence | range) else []
    in_range = all(type(batch) is int and 1 <= batch <= 5 for batch in numbers)
    if not numbers or not in_range or len({*numbers}) < len(numbers):
        raise InputValueError(f"batches={batches!r}, expected different numbers from 1 to 5: batches=(1, 2, 3)")
    return numbers


def read_batch(path: Path, *, classes: int, key: str, count: int, label_bytes: int = 1, label_column: int = 0) -> Batch:
    """Read one file.

    Args:
        path: File of the binary version (``.bin``) or of the Python version.
        classes: Number of classes.
        key: Name of the labels in the Python version.
        count: Number of images in the binary version, which has no header.
        label_bytes: Bytes before each image in the binary version.
        label_column: Position of the label among them.
    """
    if path.suffix == ".bin":
        size, row = path.stat().st_size, label_bytes + _PIXELS
        if size != count * row:
            raise damage(path, f"has {size} bytes", f"{count} images of {label_bytes} + {_PIXELS}")
        rows = numpy.fromfile(path, numpy.uint8).reshape(count, row)
        batch = Batch(rows[:, label_bytes:], rows[:, label_column].astype(numpy.int64))
    else:
        images, content = read_pickle(path, _PIXELS)
        batch = Batch(images, _label_list(content.get(key.encode()), path, key, len(images)))
    if len(batch.labels) and not 0 <= batch.labels.min() <= batch.labels.max() < classes:
        raise damage(path, f"has labels up to {batch.labels.max()}", f"0 to {classes - 1}")
    return batch


def _label_list(value: Any, path: Path, key: str, count: int) -> NDArray[numpy.int64]:
    is_list = isinstance(value, list) and all(type(label) is int and 0 <= label < 256 for label in value)
    if not is_list or len(value) != count:
        raise damage(path, f"has no list of {count} classes under the key {key}", "one class per image")
    return numpy.array(value, dtype=numpy.int64)


def select_images(batches: list[Batch], classes: int, name: str, selection: Selection, channels: Channels) -> Labeled:
    """Join batches and select samples. The first word of `name` is the name of the data set."""
    labels = numpy.concatenate([batch.labels for batch in batches])
    rows, new_labels, count = selection.rows(labels, classes, name)
    starts = numpy.cumsum([0, *(len(batch.labels) for batch in batches)])
    # copy batch by batch to limit memory
    pixels = numpy.empty((len(rows), _PIXELS), dtype=numpy.uint8)
    for start, batch in zip(starts, batches, strict=False):
        inside = (rows >= start) & (rows < start + len(batch.labels))
        pixels[inside] = batch.images[rows[inside] - start]
    return labeled_images(pixels.reshape(-1, 3, 32, 32), new_labels, count, name.split()[0], selection, channels)
