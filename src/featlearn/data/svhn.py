"""House numbers in colour, from the .mat files of single digits."""

import math
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy
from numpy.typing import NDArray

from featlearn.data.files import Root, damaged, located
from featlearn.data.labelled import Labelled
from featlearn.data.selection import Channels, Choice, ImageOptions, labelled_images
from featlearn.errors import InputValueError

__all__ = ["svhn"]

_FOLDERS = ("svhn", "SVHN", "")
_CHANNELS = Channels((0.43768211, 0.44376971, 0.47280443), (0.19803012, 0.20101562, 0.19703614))
_MOST = 1_000_000  # images; the extra set has 531131
_DEFLATE = 1032  # no byte of a packed variable stands for more


def svhn(
    root: Root = None, split: Literal["train", "test", "extra"] = "train", **options: Unpack[ImageOptions]
) -> Labelled:
    """SVHN: digits of house numbers, 32 x 32 in colour, 73257 to train on, 26032 to test and 531131 more, 10 classes.

    Digits of one house follow each other in the files, and classes are not equally frequent: draw with a `generator`,
    or `balanced`, rather than take the first.

    Args:
        root: the directory with ``svhn/`` (``train_32x32.mat``, ``test_32x32.mat``, ``extra_32x32.mat``); by default
            FEATLEARN_DATA.
        split: ``"train"``, ``"test"`` or ``"extra"``.
        options: `ImageOptions`: classes, samples, balanced, generator, flatten, normalization.

    Returns:
        ``x`` (P, 3, 32, 32), channels red, green, blue, or (P, 3072) with ``flatten=True``, from 0 to 1, and
        ``labels``, in the order of the file. The digit 0 has the label 0 (10 in the file).
        ``normalization="channel"``: means 0.4377, 0.4438, 0.4728 and deviations 0.1980, 0.2010, 0.1970.
    """
    if split not in ("train", "test", "extra"):
        raise InputValueError(f"split is {split!r}, expected 'train', 'test' or 'extra'")
    choice = Choice.of(options)
    path = located(root, _FOLDERS, (f"{split}_32x32.mat",), "svhn")
    images, labels = _variables(path)
    if not 1 <= labels.min() <= labels.max() <= 10:
        raise damaged(path, f"has labels from {labels.min()} to {labels.max()}", "1 to 10")
    rows, kept, classes = choice.rows(labels.astype(numpy.int64) % 10, 10, f"svhn {split}")
    pixels = images[..., rows].transpose(3, 2, 0, 1)  # (height, width, channel, sample) in the file
    return labelled_images(pixels, kept, classes, "svhn", choice, _CHANNELS)


def _variables(path: Path) -> tuple[NDArray[numpy.uint8], NDArray[Any]]:
    """X (32, 32, 3, N) and y (N,)."""
    from scipy.io import loadmat, whosmat

    expected = "bytes X (32, 32, 3, N) and y (N, 1)"
    try:
        sizes = {name: (shape, kind) for name, shape, kind in whosmat(path)}
        (shape, kind), (labels_shape, _) = sizes["X"], sizes["y"]
        # what the headers state, before anything of that size is allocated
        count = shape[3] if len(shape) == 4 else 0
        stated = kind == "uint8" and shape[:3] == (32, 32, 3) and tuple(labels_shape) == (count, 1)
        if not stated or not 0 < count <= _MOST or math.prod(shape) > _DEFLATE * path.stat().st_size:
            raise damaged(path, f"states X {tuple(shape)} of {kind} and y {tuple(labels_shape)}", expected)
        content = loadmat(path, variable_names=["X", "y"])
    except InputValueError:
        raise
    except Exception as error:  # a damaged file fails in any way there is
        raise damaged(path, f"cannot be read ({type(error).__name__}: {error})", expected) from error
    images, labels = content["X"], content["y"]
    if images.dtype != numpy.uint8 or images.shape != tuple(shape) or labels.shape != (count, 1):
        raise damaged(path, f"holds X {images.shape} of {images.dtype} and y {labels.shape}", expected)
    if labels.dtype.kind not in "iuf" or (labels % 1).any():
        raise damaged(path, f"has y of {labels.dtype}", "whole numbers")
    return images, labels[:, 0]
