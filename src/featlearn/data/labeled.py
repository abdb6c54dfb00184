"""Samples with one class label each."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import InputValueError

__all__ = ["Labeled"]


@dataclass(frozen=True, eq=False)
class Labeled:
    """Samples and their class labels. ``x, labels = data`` unpacks the two.

    Attributes:
        x: Inputs, shape (P, ...), float32.
        labels: Classes from 0 to ``classes - 1``, shape (P,), int64.
        classes: Number of classes C, including classes without samples.
        name: Name of the data set.
        centers: Means of the classes of a synthetic mixture, shape (C, ...), float64. None for other data.
    """

    x: Tensor
    labels: Tensor
    classes: int
    name: str = ""
    centers: Tensor | None = None

    def __post_init__(self) -> None:
        if self.labels.shape != self.x.shape[:1]:
            raise InputValueError(
                f"labels have shape {tuple(self.labels.shape)}, expected (P,) = ({len(self.x)},); "
                "pass one class per sample"
            )

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.x, self.labels))

    def one_hot(self, *, centered: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return targets of shape (P, C): 1 at the label and 0 elsewhere.

        With ``centered=True``, 1/C is subtracted, so that each row sums to zero. The target of a sample depends on
        that sample alone.
        """
        targets = torch.nn.functional.one_hot(self.labels, self.classes).to(dtype)
        return targets - 1 / self.classes if centered else targets

    def signs(self, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return targets of shape (P,) for two classes: -1 for class 0 and +1 for class 1."""
        if self.classes != 2:
            raise InputValueError(
                f"there are {self.classes} classes, expected two for targets -1 and +1; select two with "
                "classes=(0, 1), or use one_hot()"
            )
        return (2 * self.labels - 1).to(dtype)
