"""GTSRB, German traffic signs, from the pictures and their lists."""

import csv
from pathlib import Path
from typing import Literal, Unpack

import numpy

from featlearn.data.dataset_files import Root, checked_root, damage, raise_missing
from featlearn.data.draws import checked_count
from featlearn.data.labeled import Labeled
from featlearn.data.selection import ImageOptions, Selection, labeled_images
from featlearn.errors import InputValueError
from featlearn_papers.data.pictures import read_pictures

__all__ = ["gtsrb"]

_PLACES = ("GTSRB", "gtsrb/GTSRB", "gtsrb", "")
_TRAIN = ("Final_Training/Images", "Training")
_TEST = ("Final_Test/Images",)
_TEST_LISTS = ("GT-final_test.csv", "../../GT-final_test.csv", "../../../GT-final_test.csv")
_CLASSES = 43


def gtsrb(
    root: Root = None, split: Literal["train", "test"] = "train", *, size: int = 32, **options: Unpack[ImageOptions]
) -> Labeled:
    """Read GTSRB: photographs of German traffic signs in 43 classes, 39,209 to train and 12,630 to test.

    Args:
        root: Directory with ``GTSRB/``, which has ``Final_Training/Images/00000/`` to ``00042/`` (or ``Training/``
            for the first two), each with pictures ``.ppm`` and a list ``GT-00000.csv``; and ``Final_Test/Images/`` with
            pictures and ``GT-final_test.csv`` (from the archive of the labels; also looked for beside ``Final_Test``).
            By default FEATLEARN_DATA.
        split: ``"train"`` or ``"test"``.
        size: Side to which the pictures, of 15 to 250 pixels, are resized by Pillow (bilinear, antialiased; whole
            pictures, not only the box of the sign). Beaglehole et al. 2024 (Fig. 2) use 32.
        options: `ImageOptions`: classes, samples, balanced, generator, flatten. Statistics for ``"channel"`` are not
            known. Training pictures are sorted by class: draw with a `generator`, or `balanced`.

    Returns:
        ``x`` of shape (P, 3, size, size), channels red, green, blue, from 0 to 1, and ``labels``, in the order of the
        lists.
    """
    if split not in ("train", "test"):
        raise InputValueError(f"split is {split!r}, expected 'train' or 'test'")
    selection, side = Selection.from_options(options), checked_count(size, "size")
    pictures = [entry for path in _lists(root, split) for entry in _pictures(path, split, root)]
    labels = numpy.array([label for _, label in pictures], dtype=numpy.int64)
    rows, new_labels, classes = selection.rows(labels, _CLASSES, f"gtsrb {split}")
    pixels = read_pictures([pictures[row][0] for row in rows], "PPM", side)
    return labeled_images(pixels, new_labels, classes, "gtsrb", selection, None)


def _folder(root: Root, split: str) -> Path:
    top, below = checked_root(root), _TRAIN if split == "train" else _TEST
    folder = next((top / p / b for p in _PLACES for b in below if (top / p / b).is_dir()), None)
    if folder is None:
        raise_missing(root, _PLACES, [f"{b}/" for b in below], "gtsrb")
    return folder


def _lists(root: Root, split: str) -> list[Path]:
    folder = _folder(root, split)
    if split == "test":
        path = next((folder / name for name in _TEST_LISTS if (folder / name).is_file()), None)
        if path is None:
            raise_missing(
                folder, ("", *[name.rpartition("/")[0] for name in _TEST_LISTS[1:]]), _TEST_LISTS[:1], "gtsrb"
            )
        return [path]
    lists = [folder / f"{label:05d}" / f"GT-{label:05d}.csv" for label in range(_CLASSES)]
    absent = [path for path in lists if not path.is_file()]
    if absent:
        raise_missing(absent[0].parent.parent, (absent[0].parent.name,), (absent[0].name,), "gtsrb")
    return lists


def _pictures(path: Path, split: str, root: Root) -> list[tuple[Path, int]]:
    """Return paths and classes from a list with columns Filename ... ClassId, separated by semicolons."""
    folder = _folder(root, split) if split == "test" else path.parent
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = [(row.get("Filename"), row.get("ClassId")) for row in csv.DictReader(file, delimiter=";")]
    except csv.Error as error:
        raise damage(path, f"cannot be read ({error})", "Filename;...;ClassId, one row per picture") from error
    pictures: list[tuple[Path, int]] = []
    for name, label in rows:
        # a bare name, so that a list cannot name files elsewhere
        is_bare = name is not None and name == Path(name).name and name not in ("", "..")
        is_class = label is not None and label in map(str, range(_CLASSES))
        if name is None or label is None or not is_bare or not is_class:
            raise damage(path, f"has the row {len(pictures) + 2}: {name!r}, {label!r}", "Filename;...;ClassId")
        pictures.append((folder / name, int(label)))
    if not pictures:
        raise damage(path, "names no picture", "Filename;...;ClassId, one row per picture")
    return pictures
