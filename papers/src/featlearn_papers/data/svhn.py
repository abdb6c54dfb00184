"""SVHN, house numbers in color, from the .mat files of single digits."""

import math
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy
from numpy.typing import NDArray

from featlearn.data.dataset_files import Root, damage, locate
from featlearn.data.labeled import Labeled
from featlearn.data.selection import Channels, ImageOptions, Selection, labeled_images
from featlearn.errors import InputValueError

__all__ = ["svhn"]

_FOLDERS = ("svhn", "SVHN", "")
_CHANNELS = Channels((0.43768211, 0.44376971, 0.47280443), (0.19803012, 0.20101562, 0.19703614))
_MAX_IMAGES = 1_000_000  # the extra set has 531131
_MAX_COMPRESSION = 1032  # largest ratio of deflate


def svhn(
    root: Root = None, split: Literal["train", "test", "extra"] = "train", **options: Unpack[ImageOptions]
) -> Labeled:
    """Read SVHN: digits of house numbers, 32 x 32 in color, 10 classes.

    The files hold 73,257 samples to train, 26,032 to test and 531,131 more.

    The digits of one house are adjacent in the files, and classes are not equally frequent. Draw samples with a
    `generator` or with `balanced`.

    Args:
        root: Directory with ``svhn/`` (``train_32x32.mat``, ``test_32x32.mat``, ``extra_32x32.mat``). FEATLEARN_DATA
            by default.
        split: ``"train"``, ``"test"`` or ``"extra"``.
        options: `ImageOptions`: classes, samples, balanced, generator, flatten, normalization.

    Returns:
        ``x`` of shape (P, 3, 32, 32), channels red, green, blue, or (P, 3072) with ``flatten=True``, from 0 to 1, and
        ``labels``, in the order of the file. The digit 0 has the label 0 (10 in the file).
        ``normalization="channel"`` uses means 0.4377, 0.4438, 0.4728 and deviations 0.1980, 0.2010, 0.1970.
    """
    if split not in ("train", "test", "extra"):
        raise InputValueError(f"split is {split!r}, expected 'train', 'test' or 'extra'")
    selection = Selection.from_options(options)
    path = locate(root, _FOLDERS, (f"{split}_32x32.mat",), "svhn")
    images, labels = _variables(path)
    if not 1 <= labels.min() <= labels.max() <= 10:
        raise damage(path, f"has labels from {labels.min()} to {labels.max()}", "1 to 10")
    rows, new_labels, classes = selection.rows(labels.astype(numpy.int64) % 10, 10, f"svhn {split}")
    pixels = images[..., rows].transpose(3, 2, 0, 1)  # (height, width, channel, sample) in the file
    return labeled_images(pixels, new_labels, classes, "svhn", selection, _CHANNELS)


def _variables(path: Path) -> tuple[NDArray[numpy.uint8], NDArray[Any]]:
    """Read X (32, 32, 3, N) and y (N,)."""
    from scipy.io import loadmat, whosmat

    expected = "bytes X (32, 32, 3, N) and y (N, 1)"
    try:
        sizes = {name: (shape, kind) for name, shape, kind in whosmat(path)}
        (shape, kind), (labels_shape, _) = sizes["X"], sizes["y"]
        # check sizes before allocating memory for them
        count = shape[3] if len(shape) == 4 else 0
        as_expected = kind == "uint8" and shape[:3] == (32, 32, 3) and tuple(labels_shape) == (count, 1)
        if not as_expected or not 0 < count <= _MAX_IMAGES or math.prod(shape) > _MAX_COMPRESSION * path.stat().st_size:
            raise damage(path, f"states X {tuple(shape)} of {kind} and y {tuple(labels_shape)}", expected)
        content = loadmat(path, variable_names=["X", "y"])
    except InputValueError:
        raise
    except Exception as error:  # a damaged file raises any error
        raise damage(path, f"cannot be read ({type(error).__name__}: {error})", expected) from error
    images, labels = content["X"], content["y"]
    if images.dtype != numpy.uint8 or images.shape != tuple(shape) or labels.shape != (count, 1):
        raise damage(path, f"holds X {images.shape} of {images.dtype} and y {labels.shape}", expected)
    if labels.dtype.kind not in "iuf" or (labels % 1).any():
        raise damage(path, f"has y of {labels.dtype}", "whole numbers")
    return images, labels[:, 0]
