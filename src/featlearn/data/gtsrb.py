"""German traffic signs, from the pictures and their lists."""

import csv
from pathlib import Path
from typing import Literal, Unpack

import numpy

from featlearn.data.files import Root, checked_root, damaged, missing
from featlearn.data.labelled import Labelled
from featlearn.data.pictures import read_pictures
from featlearn.data.sampling import checked_count
from featlearn.data.selection import Choice, ImageOptions, labelled_images
from featlearn.errors import InputValueError

__all__ = ["gtsrb"]

_PLACES = ("GTSRB", "gtsrb/GTSRB", "gtsrb", "")
_TRAIN = ("Final_Training/Images", "Training")
_TEST = ("Final_Test/Images",)
_TEST_LISTS = ("GT-final_test.csv", "../../GT-final_test.csv", "../../../GT-final_test.csv")
_CLASSES = 43


def gtsrb(
    root: Root = None, split: Literal["train", "test"] = "train", *, size: int = 32, **options: Unpack[ImageOptions]
) -> Labelled:
    """GTSRB: photographs of German traffic signs, 39209 to train on and 12630 to test, 43 classes.

    Args:
        root: the directory with ``GTSRB/``, which has ``Final_Training/Images/00000/`` to ``00042/`` (or ``Training/``
            for the first two), each with pictures ``.ppm`` and a list ``GT-00000.csv``; and ``Final_Test/Images/`` with
            pictures and ``GT-final_test.csv`` (from the archive of the labels; also looked for beside ``Final_Test``).
            By default FEATLEARN_DATA.
        split: ``"train"`` or ``"test"``.
        size: side to which the pictures, of 15 to 250 pixels, are resized by Pillow (bilinear, antialiased; whole
            pictures, not only the box of the sign). Beaglehole et al. 2024 (Fig. 2) use 32.
        options: `ImageOptions`: classes, samples, balanced, generator, flatten; statistics for ``"channel"`` are not
            known here. Training pictures are in order of their class: draw with a `generator`, or `balanced`.

    Returns:
        ``x`` (P, 3, size, size), channels red, green, blue, from 0 to 1, and ``labels``, in the order of the lists.
    """
    if split not in ("train", "test"):
        raise InputValueError(f"split is {split!r}, expected 'train' or 'test'")
    choice, side = Choice.of(options), checked_count(size, "size")
    listed = [entry for path in _lists(root, split) for entry in _listed(path, split, root)]
    labels = numpy.array([label for _, label in listed], dtype=numpy.int64)
    rows, kept, classes = choice.rows(labels, _CLASSES, f"gtsrb {split}")
    pixels = read_pictures([listed[row][0] for row in rows], "PPM", side)
    return labelled_images(pixels, kept, classes, "gtsrb", choice, None)


def _folder(root: Root, split: str) -> Path:
    top, below = checked_root(root), _TRAIN if split == "train" else _TEST
    found = next((top / p / b for p in _PLACES for b in below if (top / p / b).is_dir()), None)
    if found is None:
        missing(root, _PLACES, [f"{b}/" for b in below], "gtsrb")
    return found


def _lists(root: Root, split: str) -> list[Path]:
    folder = _folder(root, split)
    if split == "test":
        path = next((folder / name for name in _TEST_LISTS if (folder / name).is_file()), None)
        if path is None:
            missing(folder, ("", *[name.rpartition("/")[0] for name in _TEST_LISTS[1:]]), _TEST_LISTS[:1], "gtsrb")
        return [path]
    lists = [folder / f"{label:05d}" / f"GT-{label:05d}.csv" for label in range(_CLASSES)]
    absent = [path for path in lists if not path.is_file()]
    if absent:
        missing(absent[0].parent.parent, (absent[0].parent.name,), (absent[0].name,), "gtsrb")
    return lists


def _listed(path: Path, split: str, root: Root) -> list[tuple[Path, int]]:
    """Pictures and classes of a list: columns Filename ... ClassId, separated by semicolons."""
    folder = _folder(root, split) if split == "test" else path.parent
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = [(row.get("Filename"), row.get("ClassId")) for row in csv.DictReader(file, delimiter=";")]
    except csv.Error as error:
        raise damaged(path, f"cannot be read ({error})", "Filename;...;ClassId, one row per picture") from error
    found: list[tuple[Path, int]] = []
    for name, label in rows:
        # a bare name: a list must not lead to files elsewhere
        plain = name is not None and name == Path(name).name and name not in ("", "..")
        known = label is not None and label in map(str, range(_CLASSES))
        if name is None or label is None or not plain or not known:
            raise damaged(path, f"has the row {len(found) + 2}: {name!r}, {label!r}", "Filename;...;ClassId")
        found.append((folder / name, int(label)))
    if not found:
        raise damaged(path, "names no picture", "Filename;...;ClassId, one row per picture")
    return found
