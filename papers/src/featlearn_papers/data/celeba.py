"""CelebA, faces with forty attributes, from the aligned pictures and the lists."""

from pathlib import Path
from typing import Literal, Unpack

import numpy
from numpy.typing import NDArray

from featlearn.data.dataset_files import Root, damage, locate
from featlearn.data.draws import checked_count
from featlearn.data.labeled import Labeled
from featlearn.data.selection import ImageOptions, Selection, labeled_images
from featlearn.errors import InputValueError, did_you_mean
from featlearn_papers.data.pictures import read_pictures

__all__ = ["celeba"]

_FOLDERS = ("celeba", "CelebA", "CelebA/Anno", "celeba/Anno", "CelebA/Eval", "celeba/Eval", "Anno", "Eval", "")
_PICTURES = tuple(
    f"{place}img_align_celeba" for place in ("celeba/", "CelebA/", "celeba/Img/", "CelebA/Img/", "Img/", "")
)
_PARTS = {"train": 0, "valid": 1, "test": 2}


def celeba(
    root: Root = None,
    split: Literal["train", "valid", "test"] = "train",
    *,
    attribute: str = "Eyeglasses",
    size: int = 64,
    **options: Unpack[ImageOptions],
) -> Labeled:
    """Read CelebA: faces with forty attributes, 162,770 to train, 19,867 to validate and 19,962 to test.

    Beaglehole et al. 2024 (Fig. 16) classify 7500 faces, half of them with glasses:
    ``celeba(samples=7500, balanced=True)``. They do not state the image size.

    Args:
        root: Directory with ``celeba/``: ``img_align_celeba/000001.jpg`` ..., ``list_attr_celeba.txt`` and
            ``list_eval_partition.txt``. FEATLEARN_DATA by default.
        split: ``"train"``, ``"valid"`` or ``"test"``.
        attribute: Label, a column of ``list_attr_celeba.txt``.
        size: Side to which the middle square, 178 x 178 of 178 x 218, is resized by Pillow (bilinear, antialiased).
        options: `ImageOptions`: classes, samples, balanced, generator, flatten. Statistics for ``"channel"`` are not
            known. Only selected pictures are read.

    Returns:
        ``x`` of shape (P, 3, size, size), channels red, green, blue, from 0 to 1, and ``labels``, 1 where the face has
        the attribute and 0 where not, in the order of the lists.
    """
    if split not in _PARTS:
        raise InputValueError(f"split is {split!r}, expected 'train', 'valid' or 'test'")
    selection, side = Selection.from_options(options), checked_count(size, "size")
    attributes, parts = (
        locate(root, _FOLDERS, (name,), "celeba") for name in ("list_attr_celeba.txt", "list_eval_partition.txt")
    )
    names, values = _attribute(attributes, attribute)
    inside = _partition(parts, names) == _PARTS[split]
    members = numpy.flatnonzero(inside)
    rows, new_labels, classes = selection.rows(values[members], 2, f"celeba {split}")
    folder = locate(root, _PICTURES, (names[0],), "celeba").parent
    pixels = read_pictures([folder / names[row] for row in members[rows]], "JPEG", side, crop=True)
    return labeled_images(pixels, new_labels, classes, "celeba", selection, None)


def _attribute(path: Path, attribute: str) -> tuple[list[str], NDArray[numpy.int64]]:
    """Return file names, and 1 or 0 for each.

    The file has a count, the names of the attributes, then one row per picture with 1 or -1.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    columns = lines[1].split() if len(lines) > 1 else []
    if len(lines) < 3 or not lines[0].strip().isdecimal() or len(lines[0]) > 12 or not columns:
        raise damage(path, f"begins with {lines[0][:40]!r}", "a count and the names of the attributes")
    if attribute not in columns:
        raise InputValueError(
            f"attribute={attribute!r}, expected one of {', '.join(columns)}{did_you_mean(attribute, columns)}"
        )
    rows = [line.split() for line in lines[2:] if line.strip()]
    position = 1 + columns.index(attribute)
    complete = all(
        len(row) == 1 + len(columns) and row[position] in ("1", "-1") and _is_bare_name(row[0]) for row in rows
    )
    if not complete or len(rows) != int(lines[0]):
        raise damage(
            path, f"has {len(rows)} rows", f"{int(lines[0])}, each a file name and {len(columns)} times 1 or -1"
        )
    return [row[0] for row in rows], numpy.array([row[position] == "1" for row in rows], dtype=numpy.int64)


def _partition(path: Path, names: list[str]) -> NDArray[numpy.int64]:
    """Return 0, 1 or 2 for each picture."""
    rows = [line.split() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if any(len(row) != 2 or row[1] not in ("0", "1", "2") for row in rows) or [row[0] for row in rows] != names:
        raise damage(path, f"has {len(rows)} rows", f"{len(names)}, the file names of the attributes with 0, 1 or 2")
    return numpy.array([int(row[1]) for row in rows], dtype=numpy.int64)


def _is_bare_name(name: str) -> bool:
    """Tell whether a name has no folder. A list must not name files elsewhere."""
    return name == Path(name).name and name != ".."
