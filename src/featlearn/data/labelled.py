"""Samples with one class label each."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import InputValueError

__all__ = ["Labelled"]


@dataclass(frozen=True, eq=False)
class Labelled:
    """Samples and their class labels; ``x, labels = data`` unpacks the two.

    Attributes:
        x: inputs, shape (P, ...), float32.
        labels: classes from 0 to ``classes - 1``, shape (P,), int64.
        classes: number of classes C, whether or not each of them occurs.
        name: of the data set.
        centers: means of the classes, shape (C, ...), float64, for a mixture that was made of them; None otherwise.
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
        """Targets of shape (P, C): one at the label and zero elsewhere.

        ``centered=True`` subtracts 1/C, so that each row sums to zero. The target of a sample then still depends on
        that sample alone.
        """
        targets = torch.nn.functional.one_hot(self.labels, self.classes).to(dtype)
        return targets - 1 / self.classes if centered else targets

    def signs(self, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Targets of shape (P,) for two classes: -1 for class 0 and +1 for class 1."""
        if self.classes != 2:
            raise InputValueError(
                f"there are {self.classes} classes, expected two for targets -1 and +1; choose them, classes=(0, 1), "
                "or take one_hot()"
            )
        return (2 * self.labels - 1).to(dtype)
