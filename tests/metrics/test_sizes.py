"""What does not depend on the sizes of kernels and targets holds for sizes whose squares vanish or overflow."""

import numpy as np
import pytest
import torch

from featlearn import metrics

K = torch.tensor([[2.0, 0.5, 0.2], [0.5, 1.0, 0.1], [0.2, 0.1, 0.5]], dtype=torch.float64)
Y = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
SIZES = {
    "alignment": lambda K, y: metrics.alignment(K, y),
    "alignment of classes": lambda K, y: metrics.alignment(K, torch.stack([y, y.flip(0)], 1)),
    "centered_alignment": lambda K, y: metrics.centered_alignment(K, y),
    "class_alignment": lambda K, y: metrics.class_alignment(torch.stack([K, 2 * K]), torch.stack([y, 1e-9 * y], 1)),
    "specialization": lambda K, y: metrics.specialization(torch.stack([K, K.flip(0, 1)]), torch.stack([y, y**3], 1)),
    "interference": lambda K, y: metrics.interference(torch.stack([K, K / 2, K / 3, K], -1).unflatten(-1, (2, 2)))[0],
    "spread": lambda K, y: metrics.interference(torch.stack([K, K / 2, K / 3, K / 9], -1).unflatten(-1, (2, 2)))[1],
    "effective_rank": lambda K, y: metrics.effective_rank(K),
    "participation": lambda K, y: metrics.effective_rank(K, "participation"),
    "kernel_distance": lambda K, y: metrics.kernel_distance(K, K.flip(0, 1)),
    "feature_rate": lambda K, y: metrics.feature_rate(K, K.flip(0, 1), y, normalized=True),
    "cosine": lambda K, y: metrics.correlation(K, K.flip(0, 1)),
    "pearson": lambda K, y: metrics.correlation(K, K.flip(0, 1), "pearson"),
    "relative error": lambda K, y: metrics.agreement(K, K.flip(0, 1)).relative_error,
    "agreement": lambda K, y: metrics.agreement(K, K.flip(0, 1)).correlation,
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [1e-170, 1e-90, 1e90, 1e155])
def test_sizes_do_not_matter(name: str, size: float):
    """Whose squares would vanish or overflow."""
    expected = SIZES[name](K, Y)
    np.testing.assert_allclose(SIZES[name](size * K, Y), expected, rtol=1e-12)
    if name != "specialization":  # y^3 is no task of the same direction
        np.testing.assert_allclose(SIZES[name](K, size * Y), expected, rtol=1e-12)


def test_classes_of_very_different_size_are_compared_alike():
    found = metrics.class_alignment(torch.stack([1e-200 * K, 1e150 * K]), torch.stack([1e-180 * Y, 1e160 * Y], 1))
    np.testing.assert_allclose(found, float(metrics.alignment(K, Y)) * np.ones((2, 2)), rtol=1e-12)


def test_raw_feature_rates_scale_with_kernel_and_task():
    one = float(metrics.feature_rate(K, K.flip(0, 1), Y))
    assert float(metrics.feature_rate(1e200 * K, 1e-100 * K.flip(0, 1), Y)) == pytest.approx(1e200 * one, rel=1e-12)
    assert float(metrics.feature_rate(K, K.flip(0, 1), 1e-150 * Y)) == pytest.approx(1e300 * one, rel=1e-12)
