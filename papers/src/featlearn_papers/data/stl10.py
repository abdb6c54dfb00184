"""STL-10, from its binary files."""

from typing import Literal, Unpack

import numpy

from featlearn.data.dataset_files import Root, damage, locate
from featlearn.data.draws import checked_count
from featlearn.data.labeled import Labeled
from featlearn.data.selection import ImageOptions, Selection, labeled_images
from featlearn.errors import InputValueError
from featlearn_papers.data.pictures import resize

__all__ = ["stl10"]

_FOLDERS = ("stl10_binary", "stl10/stl10_binary", "stl10", "STL10/stl10_binary", "STL10", "")
_SIDE = 96
_PIXELS = 3 * _SIDE**2


def stl10(
    root: Root = None,
    split: Literal["train", "test"] = "train",
    *,
    size: int | None = None,
    **options: Unpack[ImageOptions],
) -> Labeled:
    """Read STL-10: color photographs of 96 x 96 in 10 classes, 5000 to train and 8000 to test.

    0 airplane, 1 bird, 2 car, 3 cat, 4 deer, 5 dog, 6 horse, 7 monkey, 8 ship, 9 truck.

    Args:
        root: Directory with ``stl10_binary/`` (``train_X.bin``, ``train_y.bin`` and the same with ``test``).
            FEATLEARN_DATA by default.
        split: ``"train"`` or ``"test"``.
        size: Side of the images, resized by Pillow (bilinear, antialiased); 96 by default. Beaglehole et al. 2024
            (Fig. 2) use 32.
        options: `ImageOptions`: classes, samples, balanced, generator, flatten. Statistics for ``"channel"`` are not
            known.

    Returns:
        ``x`` of shape (P, 3, size, size), channels red, green, blue, from 0 to 1, and ``labels`` from 0 (1 to 10 in the
        files), in the order of the files.
    """
    if split not in ("train", "test"):
        raise InputValueError(f"split is {split!r}, expected 'train' or 'test'")
    selection, side = Selection.from_options(options), _SIDE if size is None else checked_count(size, "size")
    images_path, labels_path = (locate(root, _FOLDERS, (f"{split}_{part}.bin",), "stl10") for part in "Xy")
    labels = numpy.fromfile(labels_path, numpy.uint8)
    stored = images_path.stat().st_size
    if not len(labels) or stored != len(labels) * _PIXELS:
        raise damage(images_path, f"has {stored} bytes", f"{len(labels)} images, one per label, of {_PIXELS}")
    if not 1 <= labels.min() <= labels.max() <= 10:
        raise damage(labels_path, f"has labels from {labels.min()} to {labels.max()}", "1 to 10")
    rows, new_labels, classes = selection.rows(labels.astype(numpy.int64) - 1, 10, f"stl10 {split}")
    # the file stores each channel column by column
    stored_images = numpy.memmap(images_path, numpy.uint8, "r", shape=(len(labels), 3, _SIDE, _SIDE))
    pixels = numpy.asarray(stored_images[rows]).transpose(0, 1, 3, 2)
    return labeled_images(resize(pixels, side), new_labels, classes, "stl10", selection, None)
