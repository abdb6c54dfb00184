"""Correlations over some axes, against numpy."""

import numpy as np
import pytest
import torch
from torch import Tensor

import featlearn as fl
from featlearn.linalg.correlation import correlation
from featlearn.theory import early


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1.0, 1e-170, 1e155])
def test_every_pair_of_a_stack_is_compared_alone(size: float):
    a, b = size * (drawn(5, 3, 4) + 2), drawn(5, 3, 4, seed=1) - 1
    flat = [(p.flatten().numpy() / size, q.flatten().numpy()) for p, q in zip(a, b, strict=True)]
    cosines = [p @ q / np.linalg.norm(p) / np.linalg.norm(q) for p, q in flat]
    np.testing.assert_allclose(correlation(a, b), cosines, rtol=1e-12)
    np.testing.assert_allclose(correlation(a, b, "pearson"), [np.corrcoef(p, q)[0, 1] for p, q in flat], rtol=1e-12)
    columns = [np.corrcoef(a[i, :, 1] / size, b[i, :, 1])[0, 1] for i in range(5)]
    np.testing.assert_allclose(correlation(a, b, "pearson", (1,))[:, 1], columns, rtol=1e-12)


def test_undefined_ones_do_not_spoil_the_others():
    a, b = drawn(3, 2, 2), drawn(3, 2, 2, seed=1)
    a[1], b[2] = 0.1, 0.0
    assert correlation(a, b, "pearson").isnan().tolist() == [False, True, True]
    assert correlation(a, b).isnan().tolist() == [False, False, True]


def test_the_theory_of_early_times_uses_the_same():
    """The matrices of a layer, by the public name of the metrics."""
    X, residual, rows = drawn(6, 4), drawn(6, seed=1), drawn(6, 5, seed=2)
    matrices = early.derivative_matrices(X, residual, rows @ rows.T)
    for kind in ("cosine", "pearson"):
        expected = float(fl.metrics.correlation(*matrices, kind))
        assert float(early.derivative_correlation(X, residual, rows @ rows.T, kind)) == pytest.approx(
            expected, rel=1e-14
        )


def test_an_unknown_kind_is_refused():
    with pytest.raises(fl.FeatlearnError, match="kind='spearman', expected 'cosine' or 'pearson'"):
        correlation(drawn(2, 2), drawn(2, 2), "spearman")
