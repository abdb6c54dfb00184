"""MNIST, from its four idx files."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO, Literal, Unpack, cast

import numpy
from numpy.typing import NDArray

from featlearn.data.dataset_files import Root, damage, locate
from featlearn.data.labeled import Labeled
from featlearn.data.selection import Channels, ImageOptions, Selection, labeled_images
from featlearn.errors import InputValueError

__all__ = ["mnist"]

_FOLDERS = ("mnist", "MNIST", "MNIST/raw", "")
_STEMS = {"train": "train", "test": "t10k"}
_CHANNELS = Channels((0.13066048,), (0.30810780,))
_MAX_IMAGES = 2_000_000  # the largest set in this format has fewer
_MAX_COMPRESSION = 1032  # largest ratio of deflate


def mnist(root: Root = None, split: Literal["train", "test"] = "train", **options: Unpack[ImageOptions]) -> Labeled:
    """Read MNIST: handwritten digits of 28 x 28 gray values in 10 classes, 60,000 to train and 10,000 to test.

    Args:
        root: Directory with ``mnist/`` (or ``MNIST/raw/``, or the files themselves). FEATLEARN_DATA by default. The
            files are ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and the same with ``t10k``, with or
            without ``.gz``.
        split: ``"train"`` or ``"test"``.
        options: `ImageOptions`: classes, samples, balanced, generator, flatten, normalization.

    Returns:
        ``x`` of shape (P, 1, 28, 28), or (P, 784) with ``flatten=True``, from 0 (paper) to 1 (ink), and ``labels``, in
        the order of the files. ``normalization="channel"`` uses mean 0.13066 and deviation 0.30811.
    """
    if split not in _STEMS:
        raise InputValueError(f"split is {split!r}, expected 'train' or 'test'")
    selection, stem = Selection.from_options(options), _STEMS[split]
    images = _idx(_path(root, f"{stem}-images", 3), (28, 28))
    path = _path(root, f"{stem}-labels", 1)
    labels = _idx(path, ())
    if len(labels) != len(images) or labels.max(initial=0) > 9:
        raise damage(path, f"has {len(labels)} labels up to {labels.max(initial=0)}", f"{len(images)} from 0 to 9")
    rows, new_labels, classes = selection.rows(labels, 10, f"mnist {split}")
    return labeled_images(images[rows, None], new_labels, classes, "mnist", selection, _CHANNELS)


def _path(root: Root, stem: str, axes: int) -> Path:
    names = [f"{stem}{mark}idx{axes}-ubyte{suffix}" for mark in "-." for suffix in ("", ".gz")]
    return locate(root, _FOLDERS, names, "mnist")


def _idx(path: Path, sizes: tuple[int, ...]) -> NDArray[numpy.uint8]:
    """Read bytes (N, *sizes) of an idx file.

    The header is 0, 0, 8 (for bytes), the number of axes, and big-endian sizes. The entries follow.
    """
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream: IO[bytes] = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if compressed else file
        try:
            return _entries(stream, path, sizes, compressed)
        except (OSError, EOFError, zlib.error) as error:
            raise damage(path, f"cannot be unpacked ({error})", "a whole gzip file") from error


def _entries(stream: IO[bytes], path: Path, sizes: tuple[int, ...], compressed: bool) -> NDArray[numpy.uint8]:
    axes = len(sizes) + 1
    header = stream.read(4 + 4 * axes)
    if len(header) < 4 + 4 * axes or header[:4] != bytes([0, 0, 8, axes]):
        raise damage(path, f"begins with {header[:4].hex(' ')}", f"an idx file of bytes with {axes} axes")
    shape = struct.unpack(f">{axes}I", header[4:])
    # check sizes before allocating memory for them
    entries, stored = math.prod(shape), path.stat().st_size
    possible = entries <= _MAX_COMPRESSION * stored if compressed else entries == stored - len(header)
    if shape[1:] != sizes or not 0 < shape[0] <= _MAX_IMAGES or not possible:
        raise damage(path, f"states the sizes {shape} in {stored} bytes", f"({', '.join(map(str, ('N', *sizes)))})")
    body = stream.read(entries + 1)
    if len(body) != entries:
        raise damage(path, f"has {'more' if len(body) > entries else len(body)} entries", f"{entries} as it states")
    return numpy.frombuffer(body, numpy.uint8).reshape(shape)
