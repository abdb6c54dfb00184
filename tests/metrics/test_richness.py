"""Low-rank richness and features at convergence against their definitions."""

import pytest
import torch
from torch import Tensor

import featlearn as fl
from featlearn.errors import InputValueError

P, N, C = 13, 7, 3


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("features", [N, 40])
def test_low_rank_richness_is_one_minus_the_cka_of_two_gram_matrices(features: int):
    phi, f = drawn(P, features), drawn(P, C, seed=1)
    H = torch.eye(P, dtype=torch.float64) - 1 / P
    K = H @ phi @ phi.T @ H
    F = H @ f
    T = F @ torch.linalg.inv(F.T @ F) @ F.T
    expected = 1 - float((K * T).sum() / (K.norm() * T.norm()))
    assert float(fl.metrics.low_rank_richness(phi + 5.0, 3.0 * f - 2.0)) == pytest.approx(expected, rel=1e-10)


def test_collapsed_features_are_the_richest():
    """Class means at the corners of a simplex, and outputs that are a linear map of them."""
    hot = torch.eye(4, dtype=torch.float64)[torch.arange(20) % 4]
    assert abs(float(fl.metrics.low_rank_richness(hot @ drawn(4, 4).qr()[0], hot[:, :3]))) < 1e-10


def test_features_of_which_the_outputs_use_one_direction_are_lazy():
    phi = drawn(200, 100)
    assert float(fl.metrics.low_rank_richness(phi, phi[:, 0])) > 0.85


def test_constant_features_have_no_richness():
    assert torch.isnan(fl.metrics.low_rank_richness(torch.ones(P, N), drawn(P, C)))
    assert torch.isnan(fl.metrics.low_rank_richness(drawn(P, N), torch.ones(P, C)))


def test_features_at_convergence_are_a_cosine_of_two_products():
    W, G = drawn(4, 6), drawn(4, 6, seed=1)
    A, B = W.T @ W, -W.T @ G
    expected = float((A * B).sum() / (A.norm() * B.norm()))
    assert float(fl.metrics.features_at_convergence(W, 0.1 * G)) == pytest.approx(expected, rel=1e-10)


def test_a_stationary_point_of_the_decayed_loss_has_cosine_one():
    W = drawn(4, 2, 3)
    assert float(fl.metrics.features_at_convergence(W, -0.01 * W)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("features", "outputs"), [(drawn(P, N), drawn(P + 1, C)), (drawn(P), drawn(P, C)), (drawn(1, N), drawn(1, C))]
)
def test_shapes_that_do_not_fit_are_refused(features: Tensor, outputs: Tensor):
    with pytest.raises(InputValueError, match="expected"):
        fl.metrics.low_rank_richness(features, outputs)
    with pytest.raises(InputValueError, match="expected"):
        fl.metrics.features_at_convergence(features, outputs)
