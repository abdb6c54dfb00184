"""The files of the real sets, where there are any, against what is published about them."""

import hashlib
import os

import pytest
import torch
from torch import Tensor

import featlearn as fl

pytestmark = pytest.mark.skipif("FEATLEARN_DATA" not in os.environ, reason="FEATLEARN_DATA is not set: no data files")


def checksum(x: Tensor) -> str:
    """Of the images as bytes (P, height, width, channels)."""
    pixels = (x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    return hashlib.sha256(pixels.tobytes()).hexdigest()


def test_mnist():
    data = fl.data.mnist()
    assert data.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    deviation, mean = torch.std_mean(data.x.double(), correction=0)
    assert (float(mean), float(deviation)) == pytest.approx((0.1306605, 0.3081078), abs=1e-7)
    standard = fl.data.mnist(normalization="channel").x
    assert float(standard.double().mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(standard.double().std()) == pytest.approx(1.0, abs=1e-5)


def test_cifar10():
    data = fl.data.cifar10(split="test")
    assert checksum(data.x) == "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"
    assert data.labels.bincount().tolist() == [1000] * 10
    assert fl.data.cifar10(batches=(1,), samples=5).labels.tolist() == [6, 9, 9, 4, 1]
