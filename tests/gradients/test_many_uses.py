"""Parameters that share one operand, and layers that are called many times, take time in proportion to their number."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from benchmarks.many_uses import Concatenated, Repeated
from featlearn.gradients import formed
from tests.references.jacobian import dense_ntk


class Mixed(nn.Module):
    """One matrix from parameters of unequal sizes, of which one is also used on its own, and one is generated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(n).double()) for n in (2, 3, 1))
        self.generator = nn.Parameter(torch.randn(50, 3).double())

    def forward(self, x: Tensor) -> Tensor:
        """(P, 2)"""
        weight = torch.cat([self.a, self.b.sin(), self.c, torch.tanh(self.generator).sum(0)])
        hidden = torch.tanh(x * weight)
        return torch.stack([hidden.sum(1), (hidden[:, :2] * self.a).sum(1)], 1)


def test_parameters_that_share_an_operand_agree_with_the_dense_jacobian():
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(5, 9).double()
    kernels = fl.ntk(model, x, outputs="full", by="parameter")
    reference = dense_ntk(model, x, outputs="full")
    torch.testing.assert_close(sum(kernels.values()), reference, rtol=1e-12, atol=1e-12)
    assert set(kernels) == {"a", "b", "c", "generator"}


def test_scalars_in_a_row_agree_with_the_closed_form():
    torch.manual_seed(0)
    model, x = Concatenated(7).double(), torch.randn(5, 7).double()
    weight = torch.stack([*model.scalars]).detach()
    jacobian = x * (1 - torch.tanh(x * weight) ** 2)  # d/dw sum_j tanh(x_j w_j)
    torch.testing.assert_close(fl.ntk(model, x), jacobian @ jacobian.T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fl.ntk(model, x), dense_ntk(model, x), rtol=1e-12, atol=1e-12)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parameters of every backward pass from operands to parameters."""
    counts: list[int] = []
    backward = formed.backward

    def counting(starts: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(parameters))
        return backward(starts, parameters, *args, **kwargs)

    monkeypatch.setattr(formed, "backward", counting)
    return counts


def test_all_parameters_of_an_operand_take_one_pass(passes: list[int]):
    fl.ntk(Concatenated(20), torch.randn(6, 20))
    assert set(passes) == {20}


def test_parameters_larger_than_the_operand_are_pulled_back_alone(passes: list[int]):
    fl.ntk(Mixed(), torch.randn(5, 9).double())
    assert max(passes) < 3


def calls(function: Callable[[], object]) -> int:
    """Python calls that a function makes."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", [Concatenated, Repeated])
def test_twice_as_many_uses_take_twice_as_many_calls(kind: Callable[[int], nn.Module]):
    counts = []
    for size in (100, 100, 200):  # the first loads modules
        model = kind(size)
        x = torch.randn(6, size if isinstance(model, Concatenated) else 4)
        counts.append(calls(lambda model=model, x=x: fl.ntk(model, x)))  # type: ignore[misc]
    assert counts[2] < 2.2 * counts[1]
