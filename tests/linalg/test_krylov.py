"""The largest eigenvalues against a full decomposition."""

import pytest
import torch

from featlearn.linalg.krylov import top_eigenpairs


def rotated(values: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return (rotation * values) @ rotation.T


def start(size: int, width: int) -> torch.Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


SPECTRA = {
    "decaying": torch.arange(1.0, 91).double() ** -1.5,
    "all but equal": 1.0 + 0.01 * torch.linspace(1, 0, 90).double(),
    "equal pairs": (torch.arange(90) // 3 + 1.0).double() ** -1.0,
    "low rank": torch.cat([torch.tensor([3.0, 2.0, 2.0]), torch.zeros(87)]).double(),
    "zero": torch.zeros(90).double(),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_values_vectors_and_residuals_are_those_of_the_matrix(name):
    matrix, count = rotated(SPECTRA[name]), 5
    found = top_eigenpairs(lambda v: matrix @ v, start(90, 9), count, 1e-9, 90)
    torch.testing.assert_close(found.values, SPECTRA[name][:count], rtol=0, atol=1e-9)
    torch.testing.assert_close(found.vectors.T @ found.vectors, torch.eye(count).double(), rtol=0, atol=1e-10)
    off = matrix @ found.vectors - found.vectors * found.values
    torch.testing.assert_close(found.residuals, off.norm(dim=0), rtol=1e-6, atol=1e-13)
    assert float(found.residuals.max()) <= 1e-9 * max(float(found.values[0]), 1e-6)


def test_a_limited_space_says_how_far_it_is_off():
    values = SPECTRA["all but equal"]
    matrix = rotated(values)
    found = top_eigenpairs(lambda v: matrix @ v, start(90, 6), 3, 1e-9, 12)
    assert float(found.residuals.max()) > 1e-6
    for value, residual in zip(found.values, found.residuals, strict=True):
        assert float((values - value).abs().min()) <= float(residual) + 1e-12


def test_the_number_of_products_is_small_where_the_spectrum_decays():
    matrix, blocks = rotated(torch.exp(-torch.arange(90.0).double())), []

    def product(v: torch.Tensor) -> torch.Tensor:
        blocks.append(v.shape[1])
        return matrix @ v

    top_eigenpairs(product, start(90, 9), 5, 1e-4, 90)
    assert len(blocks) <= 4
