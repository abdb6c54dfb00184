"""The files of real data sets, where FEATLEARN_DATA has them, against published numbers."""

import os

import numpy
import pytest
import torch

from featlearn_papers import data

pytestmark = pytest.mark.skipif("FEATLEARN_DATA" not in os.environ, reason="FEATLEARN_DATA is not set: no data files")


def test_svhn_is_in_the_official_order():
    """The first digits are those of house numbers 19, 23, 25, 93, 31."""
    assert data.svhn(samples=10).labels.tolist() == [1, 9, 2, 3, 2, 5, 9, 3, 3, 1]
    means = data.svhn(samples=5000, generator=torch.Generator().manual_seed(0), normalization="channel").x.mean(
        (0, 2, 3)
    )
    assert means.abs().max() < 0.1


def test_shakespeare():
    train, test = data.shakespeare(), data.shakespeare(split="test")
    assert (len(train.tokens), len(test.tokens), len(train.vocabulary)) == (1003854, 111540, 65)
    assert train.text(train.tokens[:14]) == "First Citizen:"
    assert numpy.array_equal(train.tokens.unique().numpy(), numpy.arange(65))
