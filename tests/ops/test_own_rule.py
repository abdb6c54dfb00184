"""A user's own op, read by a user's own rule."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.ops import registry
from tests.references.jacobian import dense_ntk


class Tilt(torch.autograd.Function):
    """x * (1 + weight), one weight per feature, as a kernel written by hand would be wrapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * (1 + weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * (1 + weight), (grad * x).flatten(0, -2).sum(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tilt = nn.Parameter(torch.linspace(-1, 1, 3, dtype=torch.float64))
        self.head = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(Tilt.apply(x, self.tilt))).mean(1)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


X = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("rules")
def test_without_a_rule_the_fallback_is_exact_and_named():
    assert fl.plan(Model(), X).fallbacks == {"tilt": "no rule for TiltBackward"}
    model = Model()
    torch.testing.assert_close(fl.ntk(model, X), dense_ntk(model, X))


@pytest.mark.usefixtures("rules")
def test_a_rule_of_a_few_lines_is_used():
    calls = []

    @fl.ops.register_rule("TiltBackward")
    def tilt(use: fl.ops.Use) -> fl.ops.Direct:
        x, _ = use.node.saved_tensors
        calls.append(use.operand)
        return fl.ops.Direct(lambda grad: use.layout.samples_first(grad * x, 3).sum(1))

    model = Model()
    assert fl.plan(model, X).fallbacks == {}
    torch.testing.assert_close(fl.ntk(model, X, verify=True), dense_ntk(model, X))
    assert set(calls) == {1}


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("wrong", ["scaled", "other samples"])
def test_a_wrong_rule_is_found_and_not_used(wrong: str):
    @fl.ops.register_rule("TiltBackward")
    def tilt(use: fl.ops.Use) -> fl.ops.Direct:
        x, _ = use.node.saved_tensors

        def gradient(grad: Tensor) -> Tensor:
            right = use.layout.samples_first(grad * x, 3).sum(1)
            return 1.01 * right if wrong == "scaled" else right.roll(1, 0)

        return fl.ops.Direct(gradient)

    model = Model()
    assert fl.plan(model, X).fallbacks == {"tilt": "the rules for TiltBackward disagree with autograd"}
    torch.testing.assert_close(fl.ntk(model, X), dense_ntk(model, X))


@pytest.mark.usefixtures("rules")
def test_a_rule_may_decline():
    fl.ops.register_rule("TiltBackward")(lambda use: None)
    assert fl.plan(Model(), X).fallbacks == {"tilt": "the rule for TiltBackward does not cover this case"}


@pytest.mark.usefixtures("rules")
def test_a_second_rule_must_say_that_it_replaces_the_first():
    with pytest.raises(fl.FeatlearnError, match="'AddmmBackward0' is registered already; pass replace=True"):
        fl.ops.register_rule("AddmmBackward0")
    fl.ops.register_rule("AddmmBackward0", replace=True)(lambda use: None)
    model = nn.Linear(3, 2, dtype=torch.float64)
    assert set(fl.plan(model, X[:, 0]).fallbacks) == {"weight", "bias"}
    torch.testing.assert_close(fl.ntk(model, X[:, 0]), dense_ntk(model, X[:, 0]))


@pytest.mark.usefixtures("rules")
def test_a_rule_may_read_what_the_node_keeps_when_it_is_asked():
    """Not before, when it is looked for; activations are still there then."""

    @fl.ops.register_rule("TiltBackward")
    def tilt(use: fl.ops.Use) -> fl.ops.Direct:
        return fl.ops.Direct(lambda grad: use.layout.samples_first(grad * use.node.saved_tensors[0], 3).sum(1))

    model = nn.Sequential(nn.Linear(3, 3).double(), Model())  # the pass goes through it
    for _ in range(3):
        torch.testing.assert_close(fl.ntk(model, X), dense_ntk(model, X))
    assert fl.plan(model, X).fallbacks == {}
