"""Estimates: means, errors, what they print and what they refuse."""

import math

import numpy as np
import pytest
import torch

import featlearn as fl
from featlearn.linalg.estimate import Estimate


def test_the_mean_and_its_error():
    values = [1.0, 2.0, 4.0, 9.0]
    estimate = Estimate.from_samples(torch.tensor(values, dtype=torch.float64))
    assert (estimate.value, estimate.samples) == (4.0, 4)
    assert estimate.stderr == pytest.approx(math.sqrt((9 + 4 + 0 + 25) / 3 / 4), rel=1e-12)
    assert float(estimate) == 4.0


def test_several_numbers_have_an_error_each():
    values = torch.randn(50, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    estimate = Estimate.from_samples(values)
    np.testing.assert_allclose(estimate.value, values.numpy().mean(0), rtol=1e-12)
    np.testing.assert_allclose(estimate.stderr, values.numpy().std(0, ddof=1) / math.sqrt(50), rtol=1e-12)


def test_one_sample_has_no_error_to_show():
    estimate = Estimate.from_samples(torch.tensor([2.0]))
    assert estimate.value == 2.0
    assert math.isnan(estimate.stderr)


@pytest.mark.parametrize(
    ("estimate", "words"),
    [
        (Estimate(0.123456789, 0.0123, 30), "0.123457 ± 0.012 (30 samples)"),
        (Estimate(torch.tensor(1.5), torch.tensor(0.5), 1), "1.5 ± 0.5 (1 sample)"),
        (Estimate(95.118512, 0.0, 1), "95.1185 (exact)"),
        (Estimate(torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.2]), 4), "[1 ± 0.1, 2 ± 0.2] (4 samples)"),
        (
            Estimate(torch.ones(3, 3), 0.25 * torch.ones(3, 3), 4),
            "tensor of shape (3, 3), standard errors up to 0.25 (4 samples)",
        ),
    ],
)
def test_it_reads_as_value_and_error(estimate: Estimate, words: str):
    assert str(estimate) == words


BAD = {
    "an error of another shape": lambda: Estimate(torch.ones(3), 0.1, 2),
    "no samples": lambda: Estimate(1.0, 0.1, 0),
    "half a sample": lambda: Estimate(1.0, 0.1, 2.5),
    "an empty sample": lambda: Estimate.from_samples(torch.ones(0, 3)),
    "a single number": lambda: Estimate.from_samples(torch.tensor(1.0)),
    "a list": lambda: Estimate.from_samples([1.0, 2.0]),
    "integers": lambda: Estimate.from_samples(torch.tensor([1, 2])),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        BAD[name]()


def test_a_format_is_that_of_the_value():
    estimate = Estimate(0.123456, 0.0123, 30)
    assert f"{estimate:.2f} {estimate}" == "0.12 0.123456 ± 0.012 (30 samples)"
