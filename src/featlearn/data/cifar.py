"""Small colour photographs in 10 and in 100 classes, from the binary or the python version."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import numpy
from numpy.typing import NDArray

from featlearn.data.files import Root, damaged, located, missing, present
from featlearn.data.labelled import Labelled
from featlearn.data.pickled import bytes_array, unpickled
from featlearn.data.selection import Channels, Choice, ImageOptions, labelled_images
from featlearn.errors import InputValueError

__all__ = ["cifar10", "cifar100"]

_PIXELS = 3 * 32 * 32
_TEN = (
    "cifar-10-batches-bin",
    "cifar-10-batches-py",
    "cifar10/cifar-10-batches-bin",
    "cifar10/cifar-10-batches-py",
    "cifar10",
    "",
)
_HUNDRED = (
    "cifar-100-binary",
    "cifar-100-python",
    "cifar100/cifar-100-binary",
    "cifar100/cifar-100-python",
    "cifar100",
    "",
)
_CHANNELS_TEN = Channels((0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784))
_CHANNELS_HUNDRED = Channels((0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047))


class _Batch(NamedTuple):
    images: NDArray[numpy.uint8]
    """(N, 3072)"""
    labels: NDArray[numpy.int64]
    """(N,)"""


def cifar10(
    root: Root = None,
    split: Literal["train", "test"] = "train",
    batches: Sequence[int] | None = None,
    **options: Unpack[ImageOptions],
) -> Labelled:
    """CIFAR-10: colour photographs of 32 x 32, five batches of 10000 to train on and 10000 to test, 10 classes.

    0 airplane, 1 automobile, 2 bird, 3 cat, 4 deer, 5 dog, 6 frog, 7 horse, 8 ship, 9 truck.

    Args:
        root: the directory with ``cifar-10-batches-bin/`` (files ``data_batch_1.bin`` ... and ``test_batch.bin``) or
            ``cifar-10-batches-py/`` (the same without ``.bin``, pickles: read without running them); by default
            FEATLEARN_DATA.
        split: ``"train"`` or ``"test"``.
        batches: which of the training batches 1 to 5, in this order; None is all five, and an error names those that
            are missing.
        options: `ImageOptions`: classes, samples, balanced, generator, flatten, normalization.

    Returns:
        ``x`` (P, 3, 32, 32), channels red, green, blue, or (P, 3072) with ``flatten=True``, from 0 to 1, and
        ``labels``, in the order of the files. ``normalization="channel"``: means 0.4914, 0.4822, 0.4465 and deviations
        0.2470, 0.2435, 0.2616.
    """
    if split not in ("train", "test"):
        raise InputValueError(f"split is {split!r}, expected 'train' or 'test'")
    choice = Choice.of(options)
    stems = [f"data_batch_{batch}" for batch in _checked_batches(batches)] if split == "train" else ["test_batch"]
    if split == "test" and batches is not None:
        raise InputValueError(f"batches={batches!r} of the test set, expected None: only training data have batches")
    paths = [present(root, _TEN, (f"{stem}.bin", stem)) for stem in stems]
    absent = [stem for stem, path in zip(stems, paths, strict=True) if path is None]
    if absent:
        here = [stem[-1] for stem in stems if stem not in absent]
        rest = f"cifar10 (of its batches {', '.join(here)} are here: batches=[{', '.join(here)}] reads them)"
        missing(root, _TEN, [f"{stem}.bin" for stem in absent], rest if here else "cifar10")
    read = [_batch(path, 1, 10, b"labels", 10_000) for path in paths if path is not None]
    return _chosen(read, 10, f"cifar10 {split}", choice, _CHANNELS_TEN)


def cifar100(
    root: Root = None,
    split: Literal["train", "test"] = "train",
    *,
    labels: Literal["fine", "coarse"] = "fine",
    **options: Unpack[ImageOptions],
) -> Labelled:
    """CIFAR-100: colour photographs of 32 x 32, 50000 to train on and 10000 to test, 100 classes in 20 groups.

    Args:
        root: the directory with ``cifar-100-binary/`` (``train.bin``, ``test.bin``) or ``cifar-100-python/`` (the same
            without ``.bin``, pickles: read without running them); by default FEATLEARN_DATA.
        split: ``"train"`` or ``"test"``.
        labels: ``"fine"``, 100 classes, or ``"coarse"``, 20.
        options: `ImageOptions`: classes, samples, balanced, generator, flatten, normalization.

    Returns:
        As `cifar10`. ``normalization="channel"``: means 0.5071, 0.4865, 0.4409 and deviations 0.2673, 0.2564, 0.2762.
    """
    counts = {"train": 50_000, "test": 10_000}
    if split not in counts:
        raise InputValueError(f"split is {split!r}, expected 'train' or 'test'")
    if labels not in ("fine", "coarse"):
        raise InputValueError(f"labels is {labels!r}, expected 'fine' or 'coarse'")
    choice = Choice.of(options)
    path = located(root, _HUNDRED, (f"{split}.bin", split), "cifar100")
    classes = 100 if labels == "fine" else 20
    read = _batch(path, 2, classes, f"{labels}_labels".encode(), counts[split], column=int(labels == "fine"))
    return _chosen([read], classes, f"cifar100 {split}", choice, _CHANNELS_HUNDRED)


def _checked_batches(batches: Sequence[int] | None) -> list[int]:
    wanted = [1, 2, 3, 4, 5] if batches is None else list(batches) if isinstance(batches, Sequence | range) else []
    known = all(type(batch) is int and 1 <= batch <= 5 for batch in wanted)
    if not wanted or not known or len({*wanted}) < len(wanted):
        raise InputValueError(f"batches={batches!r}, expected different numbers from 1 to 5: batches=(1, 2, 3)")
    return wanted


def _batch(path: Path, marks: int, classes: int, key: bytes, count: int, column: int = 0) -> _Batch:
    """One file; in the binary version `marks` bytes of labels stand before each image, `column` is the wanted one."""
    if path.suffix == ".bin":
        size = path.stat().st_size
        if size != count * (marks + _PIXELS):
            # there is no header: a file that was cut between two images can only be told by its size
            raise damaged(path, f"has {size} bytes", f"{count} images of {marks} + {_PIXELS}")
        rows = numpy.fromfile(path, numpy.uint8).reshape(count, marks + _PIXELS)
        batch = _Batch(rows[:, marks:], rows[:, column].astype(numpy.int64))
    else:
        content = unpickled(path)
        images = bytes_array(content.get(b"data"), path, _PIXELS)
        batch = _Batch(images, _label_list(content.get(key), path, key, len(images)))
    if len(batch.labels) and not 0 <= batch.labels.min() <= batch.labels.max() < classes:
        raise damaged(path, f"has labels up to {batch.labels.max()}", f"0 to {classes - 1}")
    return batch


def _label_list(value: Any, path: Path, key: bytes, count: int) -> NDArray[numpy.int64]:
    whole = isinstance(value, list) and all(type(each) is int and 0 <= each < 256 for each in value)
    if not whole or len(value) != count:
        raise damaged(path, f"has no list of {count} classes under the key {key.decode()}", "one class per image")
    return numpy.array(value, dtype=numpy.int64)


def _chosen(read: list[_Batch], classes: int, name: str, choice: Choice, channels: Channels) -> Labelled:
    labels = numpy.concatenate([batch.labels for batch in read])
    rows, kept, count = choice.rows(labels, classes, name)
    starts = numpy.cumsum([0, *(len(batch.labels) for batch in read)])
    # batch by batch, so that the bytes of all of them are never held twice
    pixels = numpy.empty((len(rows), _PIXELS), dtype=numpy.uint8)
    for start, batch in zip(starts, read, strict=False):
        here = (rows >= start) & (rows < start + len(batch.labels))
        pixels[here] = batch.images[rows[here] - start]
    return labelled_images(pixels.reshape(-1, 3, 32, 32), kept, count, name.split()[0], choice, channels)
