"""Select samples of an image set and choose their form."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn.data.draws import checked_count
from featlearn.data.labeled import Labeled
from featlearn.errors import InputTypeError, InputValueError, did_you_mean

Normalization = Literal["unit", "channel"]
Classes = Sequence[int | Sequence[int]]


class ImageOptions(TypedDict, total=False):
    """Keyword options that all image sets share."""

    classes: Classes | None
    """Classes to keep, in the order of their new labels 0, 1, and so on. A tuple of classes becomes one class:
    ``classes=((0, 2, 4, 6, 8), (1, 3, 5, 7, 9))`` separates even and odd digits. All classes by default."""
    samples: int | None
    """Number of samples P: the first of these classes, in the order of the files. All by default."""
    balanced: bool
    """Take P / C samples of each class or, without `samples`, as many as the rarest class has."""
    generator: torch.Generator | None
    """Draw samples without replacement, in random order, instead of taking the first."""
    flatten: bool
    """Return x of shape (P, d) instead of (P, channels, height, width)."""
    normalization: Normalization
    """``"unit"`` (default): bytes divided by 255, from 0 to 1. ``"channel"``: minus the mean and divided by the
    standard deviation of each channel over the whole training set. Both numbers are published, so that training and
    test sets are treated alike. For other statistics see `standardize`."""


@dataclass(frozen=True)
class Selection:
    """Checked `ImageOptions` with their defaults."""

    classes: Classes | None = None
    samples: int | None = None
    balanced: bool = False
    generator: torch.Generator | None = None
    flatten: bool = False
    normalization: Normalization = "unit"

    def __post_init__(self) -> None:
        if self.samples is not None:
            checked_count(self.samples, "samples")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise InputTypeError(f"generator is {type(self.generator).__name__}, expected a torch.Generator or None")
        if self.normalization not in ("unit", "channel"):
            raise InputValueError(f"normalization={self.normalization!r}, expected 'unit' or 'channel'")

    @classmethod
    def from_options(cls, options: Any) -> "Selection":
        """Return the selection for keyword options, and reject unknown names."""
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                hint = did_you_mean(name, names)
                raise InputTypeError(f"unknown option {name!r}, expected some of {', '.join(names)}{hint}")
        return cls(**options)

    def rows(self, labels: NDArray[Any], classes: int, name: str) -> tuple[NDArray[numpy.int64], Tensor, int]:
        """Return the indices of the selected samples, their new labels, and the number of classes."""
        new_labels, count = self._new_labels(labels, classes)
        rows = numpy.flatnonzero(new_labels >= 0)
        if self.generator is not None:
            order = torch.randperm(len(rows), generator=self.generator, device=self.generator.device)
            rows = rows[order.cpu().numpy()]
        if self.balanced:
            rows = self._balanced_rows(rows, new_labels[rows], count, name)
        if self.samples is not None and self.samples > len(rows):
            raise InputValueError(f"samples={self.samples}, but {name} has {len(rows)} of these classes; take fewer")
        rows = rows[: self.samples]
        return rows, torch.from_numpy(new_labels[rows]), count

    def _new_labels(self, labels: NDArray[Any], classes: int) -> tuple[NDArray[numpy.int64], int]:
        """Return new labels, -1 for classes that are left out, and the number of classes."""
        if self.classes is None:
            return labels.astype(numpy.int64), classes
        groups = [(group,) if isinstance(group, int) else tuple(group) for group in self.classes]
        flat = [label for group in groups for label in group]
        integers = all(isinstance(label, int) and not isinstance(label, bool) for label in flat)
        if (
            not flat
            or () in groups
            or not integers
            or len({*flat}) < len(flat)
            or not all(0 <= c < classes for c in flat)
        ):
            raise InputValueError(
                f"classes={self.classes!r}, expected different numbers from 0 to {classes - 1}, or tuples of them"
            )
        table = numpy.full(classes, -1, dtype=numpy.int64)
        for position, group in enumerate(groups):
            table[list(group)] = position
        return numpy.asarray(table[labels]), len(groups)

    def _balanced_rows(
        self, rows: NDArray[numpy.int64], labels: NDArray[numpy.int64], classes: int, name: str
    ) -> NDArray[numpy.int64]:
        """Return the first rows of each class, equally many, in their order."""
        available = numpy.bincount(labels, minlength=classes)
        if self.samples is not None and self.samples % classes:
            raise InputValueError(f"samples={self.samples} of {classes} classes, expected a multiple for balanced=True")
        per_class = int(available.min()) if self.samples is None else self.samples // classes
        if per_class > available.min() or per_class == 0:
            raise InputValueError(
                f"samples={self.samples} and balanced=True, but {name} has only {available.min()} samples of class "
                f"{int(available.argmin())}; take fewer"
            )
        positions = [numpy.flatnonzero(labels == label)[:per_class] for label in range(classes)]
        return rows[numpy.sort(numpy.concatenate(positions))]


@dataclass(frozen=True)
class Channels:
    """Mean and standard deviation of each channel over a whole training set, in units of 255."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


def labeled_images(
    pixels: NDArray[numpy.uint8],
    labels: Tensor,
    classes: int,
    name: str,
    selection: Selection,
    channels: Channels | None,
) -> Labeled:
    """Convert images of bytes, (P, channels, height, width), to numbers in the selected form."""
    x = torch.from_numpy(numpy.ascontiguousarray(pixels)).to(torch.float32).div_(255)
    if selection.normalization == "channel":
        if channels is None:
            raise InputValueError(
                f"normalization='channel', but no statistics of {name} are known here, expected 'unit'; then "
                "fl.data.standardize(train.x, test.x, by='channel')"
            )
        shape = (1, -1, 1, 1)
        x.sub_(torch.tensor(channels.mean).view(shape)).div_(torch.tensor(channels.deviation).view(shape))
    return Labeled(x.flatten(1) if selection.flatten else x, labels, classes, name)
