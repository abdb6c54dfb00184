"""What the theories take for numbers, times, counts and sources of randomness, and what they say to the rest."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from featlearn.errors import FeatlearnError, InputTypeError, InputValueError
from featlearn.theory import deep_linear, early, latent, ofe, relu, transfer
from featlearn.theory.arguments import (
    checked_count,
    checked_generator,
    checked_number,
    checked_numbers,
    checked_rows,
    checked_time_axis,
    checked_times,
    checked_vector,
)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    "value", [2, 2.0, Fraction(2), np.float32(2), np.int64(2), np.array(2), torch.tensor(2), torch.tensor(2.0)]
)
def test_one_number_has_no_axes(value: object):
    found = checked_numbers(value, "s")
    assert found.dtype == torch.float64
    assert found.shape == ()
    assert float(found) == checked_number(value, "s") == 2.0


@pytest.mark.parametrize(
    "value",
    [
        [1, 2.5],
        (1.0, 2.5),
        [Fraction(1), np.float64(2.5)],
        [torch.tensor(1), 2.5],
        [np.array(1.0), torch.tensor(2.5)],
        np.array([1.0, 2.5], dtype=">f4"),
        np.array([2.5, 1.0])[::-1],
        torch.tensor([1.0, 2.5]).half(),
        torch.tensor([1.0, 2.5], requires_grad=True),
    ],
)
def test_several_numbers_come_out_in_double(value: object):
    found = checked_numbers(value, "s")
    assert found.dtype == torch.float64
    assert not found.requires_grad
    assert found.tolist() == [1.0, 2.5]


def test_lists_nest():
    rows = [[1, 2], torch.tensor([3.0, 4.0]), np.array([5, 6])]
    assert checked_numbers(rows, "s").tolist() == [[1, 2], [3, 4], [5, 6]]
    assert checked_numbers([], "s").shape == (0,)


def test_an_array_is_copied():
    given = np.array([1.0, 2.0])
    checked_numbers(given, "s")[0] = 5.0
    assert given[0] == 1.0


@pytest.mark.parametrize(
    "value",
    ["1", True, None, [True, 1.0], [1.0, "2"], [[1.0], [1.0, 2.0]], np.array(["1"]), torch.tensor([True])],
)
def test_what_is_no_number_is_named(value: object):
    with pytest.raises(FeatlearnError, match=rf"^s is {type(value).__name__}, expected finite numbers; pass one"):
        checked_numbers(value, "s")


def test_complex_numbers_are_refused():
    with pytest.raises(FeatlearnError, match="s is complex, expected real numbers"):
        checked_numbers(torch.tensor([1j]), "s")


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (math.nan, {}, "^s=nan, expected finite numbers$"),
        (math.nan, {"infinite": True}, "^s=nan, expected numbers$"),
        (-math.inf, {"least": 0.0, "infinite": True}, "^s=-inf, expected numbers >= 0$"),
        ([1.0, math.inf], {}, r"^s of shape \(2,\) has inf, expected finite numbers$"),
        (0, {"above": 0.0}, r"^s=0\.0, expected finite numbers > 0$"),
        ([0.5, 2.0], {"least": -1.0, "most": 1.0}, r"^s of shape \(2,\) has 2\.0, .* numbers >= -1 and <= 1$"),
        (-1, {"least": 0.0, "hint": "see rate"}, r"^s=-1\.0, expected finite numbers >= 0; see rate$"),
    ],
)
def test_bounds_are_named(value: object, bounds: dict, message: str):
    with pytest.raises(InputValueError, match=message):
        checked_numbers(value, "s", **bounds)


def test_bounds_themselves():
    assert checked_number(0, "s", least=0.0) == 0
    assert checked_number([[1]], "s", most=1.0) == 1
    assert checked_number(math.inf, "s", infinite=True) == math.inf
    with pytest.raises(InputValueError, match=r"^s has shape \(2,\), expected one finite number > 0$"):
        checked_number([1.0, 2.0], "s", above=0.0)


def test_times():
    assert checked_times([[0, 1], [2, 3]]).shape == (2, 2)
    assert checked_times(math.inf, infinite=True) == math.inf
    assert checked_time_axis(2).tolist() == checked_time_axis(np.array(2)).tolist() == [2.0]
    assert checked_time_axis([2, 1]).tolist() == [2.0, 1.0]
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(InputValueError, match=f"^t={wrong}, expected finite numbers >= 0$"):
            checked_times(wrong, "t")
    for wrong in ([], [[1.0]]):
        with pytest.raises(InputValueError, match=r"expected one time or \(T,\) with T >= 1"):
            checked_time_axis(wrong)
    with pytest.raises(InputValueError, match="go back, expected increasing order; sort them"):
        checked_time_axis([2, 1], increasing=True)


def test_counts():
    assert checked_count(np.int64(3), "width") == 3
    assert type(checked_count(np.int64(3), "width")) is int
    for wrong in (0, 1.0, True, "1", None):
        with pytest.raises(InputValueError, match=r"expected an integer >= 1$"):
            checked_count(wrong, "width")
    with pytest.raises(InputValueError, match=r"^layer=3, expected an integer from 0 to 2; count them$"):
        checked_count(3, "layer", 0, 2, hint="count them")


def test_rows_and_vectors():
    with pytest.raises(InputValueError, match=r"X has shape \(3, 2\), expected \(samples, 4\)"):
        checked_rows(torch.ones(3, 2), columns=4)
    with pytest.raises(InputValueError, match=r"X of shape .* nan or infinite"):
        checked_rows(torch.full((3, 2), math.nan))
    with pytest.raises(InputValueError, match=r"y has shape \(3,\), expected \(4,\)"):
        checked_vector(torch.ones(3), "y", 4)


def test_generators():
    own = torch.Generator()
    assert checked_generator(own) is own
    first, second = (torch.randn(3, generator=checked_generator(None)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.randn(3, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(InputTypeError, match=r"generator is int, expected a torch\.Generator"):
        checked_generator(3)


K, Y = torch.eye(2, dtype=torch.float64), tensor(1.0, -2.0)
U, W, X = tensor(1.0, 2.0), tensor(1.3, 1.6)[:, None], tensor(1.0)
SAME: dict[str, Callable[[Callable], torch.Tensor]] = {
    "ofe.solve": lambda of: ofe.solve(K, Y, 1.5, of([0.5, 2.0])).loss,
    "ofe.kernel": lambda of: ofe.solve(K, Y, 1.5, 1.0).kernel(of([0.5, 2.0])),
    "ofe.integrate": lambda of: ofe.integrate(K, Y, 1.5, of([0.5, 2.0])).residual,
    "ofe.scalar": lambda of: torch.stack(tuple(ofe.scalar(of([0.5, 2.0]), 1.0, -1.0, of([1.0, 2.0])))),
    "latent.solve": lambda of: latent.solve(U, W, X, -1.0, times=of([0.5, 2.0])).output,
    "latent.kernel": lambda of: latent.solve(U, W, X, -1.0, times=1.0).kernel(of([0.5, 2.0]), X),
    "latent.integrate": lambda of: latent.integrate(U, W, X, of([-1.0]), times=of([0.5, 2.0])).loss,
    "deep_linear.strength": lambda of: deep_linear.strength(of([0.5, 2.0]), of([2.0, 3.0]), 0.1, 3),
    "deep_linear.solve": lambda of: deep_linear.solve(K, Y, times=of([0.5, 2.0]), c0=of([0.1]), weight_layers=2).loss,
    "deep_linear.widths": lambda of: deep_linear.width_corrections(of([3.0, 4.0, 2.0])),
    "relu.solve": lambda of: relu.solve(K, K, Y, times=of([0.5, 2.0])).loss,
    "relu.mixture_rates": lambda of: relu.mixture_rates(K / 2, of([3.0, 4.0])),
    "transfer.learning_curve": lambda of: transfer.learning_curve(of([5.0, 9.0]), 8, 1.0, of([0.5, -0.5])).error,
    "early.expected_ptk": lambda of: early.expected_ptk(K, 3, "relu", 1, of([0.5, 2.0])),
}


@pytest.mark.parametrize("name", SAME)
def test_every_theory_takes_numbers_in_the_same_forms(name: str):
    expected = SAME[name](lambda values: tensor(*values))
    assert bool(expected.isfinite().all())
    for form in (list, tuple, np.array, lambda values: [torch.tensor(v, dtype=torch.float64) for v in values]):
        assert torch.equal(SAME[name](form), expected)


ONE_TIME: dict[str, Callable[[object], torch.Tensor]] = {
    "ofe.kernel": lambda t: ofe.solve(K, Y, 1.5, 1.0).kernel(t),
    "latent.kernel": lambda t: latent.solve(U, W, X, -1.0, times=1.0).kernel(t, X[None]),
}


@pytest.mark.parametrize("name", ONE_TIME)
def test_one_time_has_no_axis_in_the_kernel_at_it(name: str):
    several = ONE_TIME[name]([2])
    assert several.dim() == 3
    for t in (2, 2.0, np.float64(2), np.array(2), torch.tensor(2)):
        assert torch.equal(ONE_TIME[name](t), several[0])


def test_infinity_is_a_time_where_a_theory_has_an_end():
    assert float(deep_linear.strength(math.inf, 2.0, 0.1, 3)) == 2.0
    assert float(latent.solve(U, W, X, -1.0, times=math.inf).output) == pytest.approx(-1.0)
    for call in (
        lambda: ofe.solve(K, Y, 1.5, math.inf),
        lambda: latent.integrate(U, W, X, -1.0, times=math.inf),
        lambda: deep_linear.flow([K, Y], K, Y, times=[math.inf]),
        lambda: deep_linear.unwhitened_path(math.inf, torch.ones(5), 1.0, 1.5, 1.0),
        lambda: relu.solve(K, K, Y, times=[math.inf]),
    ):
        with pytest.raises(InputValueError, match=r"^times=inf, expected finite numbers >= 0$"):
            call()
