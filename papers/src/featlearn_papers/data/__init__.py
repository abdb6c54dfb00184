"""Data sets that only figures and examples read, from their files."""

from collections.abc import Callable
from typing import Any

from featlearn import data
from featlearn.data import Labeled
from featlearn_papers.data.celeba import celeba
from featlearn_papers.data.cifar100 import cifar100
from featlearn_papers.data.gtsrb import gtsrb
from featlearn_papers.data.shakespeare import Text, shakespeare
from featlearn_papers.data.stl10 import stl10
from featlearn_papers.data.svhn import svhn

__all__ = ["Text", "celeba", "cifar100", "gtsrb", "image_reader", "shakespeare", "stl10", "svhn"]


def image_reader(name: str) -> Callable[..., Labeled]:
    """Return the function that reads an image set, from here or from `featlearn.data`."""
    readers: dict[str, Any] = {reader.__name__: reader for reader in (celeba, cifar100, gtsrb, stl10, svhn)}
    reader: Callable[..., Labeled] = readers[name] if name in readers else getattr(data, name)
    return reader
