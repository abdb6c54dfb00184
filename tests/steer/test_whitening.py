"""Inputs with a flatter spectrum."""

import pytest
import torch

import featlearn as fl
from featlearn.steer import whiten


def inputs(samples: int, features: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(samples)
    scales = torch.linspace(1, 6, features, dtype=torch.float64) ** 2
    return torch.randn(samples, features, dtype=torch.float64, generator=generator) * scales + 0.5


def eigenvalues(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(x).square() / len(x)  # of x^T x / P, without its rounding


@pytest.mark.parametrize("shape", [(40, 7), (6, 9), (8, 8)])
@pytest.mark.parametrize("power", [0.0, 0.25, 0.5, 1.0, 1.5])
def test_eigenvalues_take_the_power_at_the_same_mean(shape, power):
    x = inputs(*shape)
    rank = min(shape)
    before, after = eigenvalues(x)[:rank], eigenvalues(whiten(x, power).x)[:rank]
    wanted = before**power
    torch.testing.assert_close(after, wanted * before.mean() / wanted.mean(), rtol=1e-9, atol=0)
    # eigenvectors stay: the map is symmetric and commutes with X^T X
    matrix, gram = whiten(x, power).matrix, x.mT @ x
    torch.testing.assert_close(matrix, matrix.mT, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(matrix @ gram, gram @ matrix, rtol=1e-8, atol=1e-8 * float(gram.abs().max()))


def test_power_one_changes_nothing():
    x = inputs(30, 5)
    torch.testing.assert_close(whiten(x, 1.0).x, x, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(40, 7), (6, 9)])
def test_a_mean_of_one_gives_the_projector_of_002(shape):
    x = inputs(*shape)
    white = whiten(x, mean_eigenvalue=1.0)
    second_moment = white.x.mT @ white.x / len(x)
    torch.testing.assert_close(second_moment @ second_moment, second_moment, rtol=1e-8, atol=1e-10)
    assert round(float(second_moment.trace()), 8) == min(shape) == white.rank


def test_test_points_see_the_transform_of_the_training_points():
    x, other = inputs(30, 6), inputs(11, 6)
    white = whiten(x, 0.3)
    torch.testing.assert_close(white.transform(x), white.x)
    # linear, and with the training transform
    mixed = torch.randn(4, 30, dtype=torch.float64) @ x
    torch.testing.assert_close(white.transform(mixed + other[:4]), white.transform(mixed) + white.transform(other[:4]))
    slow = torch.linalg.eigh(x.mT @ x)
    scales = slow.eigenvalues ** ((0.3 - 1) / 2)
    by_hand = other @ slow.eigenvectors @ torch.diag(scales) @ slow.eigenvectors.mT
    found = white.transform(other)
    torch.testing.assert_close(found / found.norm(), by_hand / by_hand.norm(), rtol=1e-9, atol=1e-11)


def test_directions_without_data_are_dropped():
    x = torch.cat([inputs(20, 3), torch.zeros(20, 2, dtype=torch.float64)], 1)
    white = whiten(x)
    assert white.rank == 3
    assert float(white.transform(torch.ones(1, 5, dtype=torch.float64))[0, 3:].abs().max()) == 0
    assert torch.isfinite(whiten(x, -1.0).x).all()


def test_images_keep_their_shape_and_format():
    x = torch.rand(50, 1, 4, 4)
    white = whiten(x)
    assert white.x.shape == x.shape
    assert white.x.dtype == white.transform(x[:3]).dtype == torch.float32
    torch.testing.assert_close(white.transform(x[:3]), white.x[:3])


def test_what_cannot_be_whitened_is_refused():
    with pytest.raises(fl.errors.InputValueError, match="zero"):
        whiten(torch.zeros(3, 2))
    with pytest.raises(fl.errors.InputTypeError, match="floating-point"):
        whiten(torch.ones(3, 2, dtype=torch.int64))
    with pytest.raises(fl.errors.InputValueError, match="nan"):
        whiten(torch.full((3, 2), torch.nan))
    with pytest.raises(fl.errors.InputValueError, match=r"7 numbers.*expected 5"):
        whiten(inputs(9, 5)).transform(torch.ones(2, 7))
    with pytest.raises(fl.errors.InputValueError, match="mean_eigenvalue"):
        whiten(inputs(9, 5), mean_eigenvalue=0.0)
