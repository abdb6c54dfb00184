"""CIFAR-100, from the binary or the Python version of its files."""

from typing import Literal, Unpack

from featlearn.data.cifar import read_batch, select_images
from featlearn.data.dataset_files import Root, locate
from featlearn.data.labeled import Labeled
from featlearn.data.selection import Channels, ImageOptions, Selection
from featlearn.errors import InputValueError

__all__ = ["cifar100"]

_FOLDERS = (
    "cifar-100-binary",
    "cifar-100-python",
    "cifar100/cifar-100-binary",
    "cifar100/cifar-100-python",
    "cifar100",
    "",
)
_CHANNELS = Channels((0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047))
_COUNTS = {"train": 50_000, "test": 10_000}


def cifar100(
    root: Root = None,
    split: Literal["train", "test"] = "train",
    *,
    labels: Literal["fine", "coarse"] = "fine",
    **options: Unpack[ImageOptions],
) -> Labeled:
    """Read CIFAR-100: color photographs of 32 x 32 in 100 classes, 50,000 to train and 10,000 to test.

    Args:
        root: Directory with ``cifar-100-binary/`` (``train.bin``, ``test.bin``) or ``cifar-100-python/`` (the same
            names without ``.bin``; pickles are read without running code). FEATLEARN_DATA by default.
        split: ``"train"`` or ``"test"``.
        labels: ``"fine"``, 100 classes, or ``"coarse"``, 20.
        options: `ImageOptions`: classes, samples, balanced, generator, flatten, normalization.

    Returns:
        As `fl.data.cifar10`. ``normalization="channel"`` uses means 0.5071, 0.4865, 0.4409 and deviations 0.2673,
        0.2564, 0.2762.
    """
    if split not in _COUNTS:
        raise InputValueError(f"split is {split!r}, expected 'train' or 'test'")
    if labels not in ("fine", "coarse"):
        raise InputValueError(f"labels is {labels!r}, expected 'fine' or 'coarse'")
    selection = Selection.from_options(options)
    path = locate(root, _FOLDERS, (f"{split}.bin", split), "cifar100")
    classes = 100 if labels == "fine" else 20
    batch = read_batch(
        path,
        classes=classes,
        key=f"{labels}_labels",
        count=_COUNTS[split],
        label_bytes=2,
        label_column=int(labels == "fine"),
    )
    return select_images([batch], classes, f"cifar100 {split}", selection, _CHANNELS)
