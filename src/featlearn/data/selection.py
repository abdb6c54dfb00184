"""Which samples of a data set are taken, and in what form: the options that the image sets share."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn.data.labelled import Labelled
from featlearn.data.sampling import checked_count
from featlearn.errors import InputTypeError, InputValueError

Normalization = Literal["unit", "channel"]
Classes = Sequence[int | Sequence[int]]


class ImageOptions(TypedDict, total=False):
    """What every image set can be asked for, by keyword."""

    classes: Classes | None
    """the classes to keep, in the order of their new labels 0, 1 ...; a tuple of classes becomes one class:
    ``classes=((0, 2, 4, 6, 8), (1, 3, 5, 7, 9))`` tells even from odd digits. All by default."""
    samples: int | None
    """P, how many of the samples of these classes: the first in the order of the files. All by default."""
    balanced: bool
    """take P / C samples of each class, or, without `samples`, as many as the rarest class has"""
    generator: torch.Generator | None
    """draw the samples, without replacement and in random order, in place of taking the first"""
    flatten: bool
    """x of shape (P, d) in place of (P, channels, height, width)"""
    normalization: Normalization
    """``"unit"``, the default: values from 0 to 1, the bytes of the file divided by 255. ``"channel"``: less the mean
    and divided by the standard deviation of that channel over the whole training set, numbers that are published, so
    that train and test set are treated alike. For others see `standardize`."""


@dataclass(frozen=True)
class Choice:
    """`ImageOptions` with their defaults, checked."""

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
    def of(cls, options: Any) -> "Choice":
        """From the keywords of a reader."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise InputTypeError(f"{name!r} is no option, expected some of {', '.join(known)}{hint}")
        return cls(**options)

    def rows(self, labels: NDArray[Any], classes: int, name: str) -> tuple[NDArray[numpy.int64], Tensor, int]:
        """Which samples, their new labels, and the number of classes."""
        renamed, count = self._renamed(labels, classes)
        kept = numpy.flatnonzero(renamed >= 0)
        if self.generator is not None:
            order = torch.randperm(len(kept), generator=self.generator, device=self.generator.device)
            kept = kept[order.cpu().numpy()]
        kept = self._balanced(kept, renamed[kept], count, name) if self.balanced else kept
        if self.samples is not None and self.samples > len(kept):
            raise InputValueError(f"samples={self.samples}, but {name} has {len(kept)} of these classes; take fewer")
        kept = kept[: self.samples]
        return kept, torch.from_numpy(renamed[kept]), count

    def _renamed(self, labels: NDArray[Any], classes: int) -> tuple[NDArray[numpy.int64], int]:
        """New labels, -1 for what is not wanted."""
        if self.classes is None:
            return labels.astype(numpy.int64), classes
        groups = [(group,) if isinstance(group, int) else tuple(group) for group in self.classes]
        flat = [each for group in groups for each in group]
        plain = all(isinstance(each, int) and not isinstance(each, bool) for each in flat)
        if not flat or () in groups or not plain or len({*flat}) < len(flat) or not all(0 <= c < classes for c in flat):
            raise InputValueError(
                f"classes={self.classes!r}, expected different numbers from 0 to {classes - 1}, or tuples of them"
            )
        table = numpy.full(classes, -1, dtype=numpy.int64)
        for position, group in enumerate(groups):
            table[list(group)] = position
        found: NDArray[numpy.int64] = table[labels]
        return found, len(groups)

    def _balanced(
        self, kept: NDArray[numpy.int64], labels: NDArray[numpy.int64], count: int, name: str
    ) -> NDArray[numpy.int64]:
        """As many of each class, the first ones, in the order in which they come."""
        have = numpy.bincount(labels, minlength=count)
        if self.samples is not None and self.samples % count:
            raise InputValueError(f"samples={self.samples} of {count} classes, expected a multiple for balanced=True")
        each = int(have.min()) if self.samples is None else self.samples // count
        if each > have.min() or each == 0:
            raise InputValueError(
                f"samples={self.samples} and balanced=True, but {name} has only {have.min()} samples of class "
                f"{int(have.argmin())}; take fewer"
            )
        chosen = [numpy.flatnonzero(labels == label)[:each] for label in range(count)]
        return kept[numpy.sort(numpy.concatenate(chosen))]


@dataclass(frozen=True)
class Channels:
    """Mean and standard deviation of each channel over a whole training set, in units of 255."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


def labelled_images(
    pixels: NDArray[numpy.uint8], labels: Tensor, classes: int, name: str, choice: Choice, channels: Channels | None
) -> Labelled:
    """Images (P, channels, height, width) of bytes as numbers."""
    x = torch.from_numpy(numpy.ascontiguousarray(pixels)).to(torch.float32).div_(255)
    if choice.normalization == "channel":
        if channels is None:
            raise InputValueError(
                f"normalization='channel', but no statistics of {name} are known here, expected 'unit'; then "
                "fl.data.standardize(train.x, test.x, by='channel')"
            )
        shape = (1, -1, 1, 1)
        x.sub_(torch.tensor(channels.mean).view(shape)).div_(torch.tensor(channels.deviation).view(shape))
    return Labelled(x.flatten(1) if choice.flatten else x, labels, classes, name)
