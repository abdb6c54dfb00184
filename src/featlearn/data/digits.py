"""Handwritten digits that come with scikit-learn, without a download."""

from typing import Literal

import torch

from featlearn.data.labeled import Labeled
from featlearn.errors import InputValueError

__all__ = ["digits"]

_PARTS = {"all": slice(None), "train": slice(1500), "test": slice(1500, None)}


def digits(split: Literal["all", "train", "test"] = "all") -> Labeled:
    """Return the 8 x 8 handwritten digits of scikit-learn, 1797 samples in 10 classes.

    Args:
        split: ``"all"`` (1797 samples), ``"train"`` (the first 1500 of the file) or ``"test"`` (the last 297).

    Returns:
        ``x`` of shape (P, 64), gray values from 0 to 1 (the file's 0 to 16, divided by 16), and ``labels``, in the
        order of the file. The file mixes the classes, so ``x[:200]`` is a representative probe.
        ``x.view(-1, 1, 8, 8)`` gives images.
    """
    if split not in _PARTS:
        raise InputValueError(f"split is {split!r}, expected one of {', '.join(map(repr, _PARTS))}")
    from sklearn.datasets import load_digits  # takes long to import

    pixels, labels = load_digits(return_X_y=True)
    part = _PARTS[split]
    return Labeled(
        x=torch.from_numpy(pixels[part]).to(torch.float32) / 16,
        labels=torch.from_numpy(labels[part]).to(torch.int64),
        classes=10,
        name="digits",
    )
