"""Number formats, states and rules that a careless engine trips over."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.ops import registry
from tests.quantities.test_ntk_traps import Net, assert_exact, drawn, linear
from tests.references.jacobian import dense_ntk


def error(model: nn.Module, x: Tensor, **options: Any) -> float:
    reference = dense_ntk(model, x)
    return float((fl.ntk(model, x, **options).double() - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize(("size", "factor"), [(1e-22, 1e18), (1e-23, 1e19), (1e20, 1e-20), (1.0, 1.0)])
def test_rows_and_gradients_of_extreme_size_whose_product_is_ordinary(size: float, factor: float):
    """The Gram matrix of the rows alone is not a float32 number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net(lambda self, x: torch.tanh(self.a(x) * factor).sum(1), a=nn.Linear(5, 4, bias=False))
    x = (drawn(8, 5) * size).float()
    twin = Net(lambda self, x: torch.tanh(self.a(x) * factor).sum(1), a=nn.Linear(5, 4, bias=False).double())
    twin.a.weight.data = model.a.weight.detach().double()
    reference = dense_ntk(twin, x.double())
    kernel = fl.ntk(model, x).double()
    assert float((kernel - reference).abs().max() / reference.abs().max()) < 1e-5


class Annealed(nn.Module):
    """A temperature that every forward pass lowers, as a buffer that is replaced and as a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(3, 5), linear(5, 2)
        self.register_buffer("temperature", torch.ones((), dtype=torch.float64))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.temperature = self.temperature * 0.9999
        return self.b(torch.tanh(self.a(x) * self.temperature * 0.999**self.calls))


@pytest.mark.parametrize("memory", [None, "12kB"])
def test_a_state_that_moves_with_every_call_does_not_drift(memory: str | None):
    model, fresh = Annealed(), Annealed()
    frozen = Net(lambda self, x: self.b(torch.tanh(self.a(x) * 0.9999 * 0.999)), a=fresh.a, b=fresh.b)
    x = drawn(30, 3)
    reference = dense_ntk(frozen, x)
    kernel = fl.ntk(model, x, memory=memory)
    assert float((kernel - reference).abs().max() / reference.abs().max()) < 1e-12
    assert model.calls == 0
    assert float(model.temperature) == 1.0


def test_a_hidden_state_kept_between_calls_is_that_of_the_first_call():
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.last = linear(4, 4), None

        def forward(self, x: Tensor) -> Tensor:
            start = 0.0 if self.last is None else self.last.mean()
            self.last = torch.tanh(self.cell(x) + start).detach()
            return torch.tanh(self.cell(x) + start)

    model, x = Stateful(), drawn(9, 4)
    fresh = Net(lambda self, x: torch.tanh(self.cell(x)), cell=model.cell)
    torch.testing.assert_close(fl.ntk(model, x, verify=True), dense_ntk(fresh, x))
    assert model.last is None


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    return


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("case", ["unseen by the audit", "wrong for large batches"])
def test_a_wrong_rule_that_the_audit_does_not_show_is_found(case: str):
    @fl.ops.register_rule("ScaleBackward")
    def scale(use: fl.ops.Use) -> fl.ops.Direct:
        x, _ = use.node.saved_tensors
        factor = 2.0 if case == "unseen by the audit" or len(x) > 8 else 1.0
        return fl.ops.Direct(lambda grad: factor * grad * x)

    def forward(self: Net, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if case == "unseen by the audit" and not bool((x[:, 0] > 100).any()):
            return self.b(h)
        return self.b(
            Scale.apply(h, self.w)
            if case != "unseen by the audit"
            else h + Scale.apply(0 * h + 1, self.w) * (x[:, :1] > 100)
        )

    model = Net(forward, a=linear(3, 4), b=linear(4, 2), w=nn.Parameter(drawn(4)))
    x = drawn(40, 3)
    x[13, 0] = 1000.0
    assert_exact(model, x)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_models_that_hold_sparse_tensors(layout: torch.layout):
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = linear(3, 2)
            adjacency = (drawn(4, 4) > 0).double()
            self.register_buffer("adjacency", adjacency.to_sparse(layout=layout))

        def forward(self, x: Tensor) -> Tensor:  # (P, 4, 3)
            h = self.a(x).permute(1, 0, 2).flatten(1)
            return (self.adjacency @ h).reshape(4, len(x), 2).permute(1, 0, 2).sum(1)

    model, x = Graph(), drawn(5, 4, 3)
    model.a.weight.grad = torch.ones_like(model.a.weight)
    kernel = fl.ntk(model, x)
    assert float(model.a.weight.grad.sum()) == 6.0
    summed = (model.adjacency.to_dense().sum(0)[:, None] * x).sum(1)
    weights = model.adjacency.to_dense().sum()
    torch.testing.assert_close(kernel, summed @ summed.T + weights**2)


@pytest.mark.parametrize("samples", [6, 60])
def test_half_formats_that_meet(samples: int):
    """bfloat16 reaches far and float16 does not: codes must fit both."""

    def forward(self: Net, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x.transpose(0, 1))).half()
        return self.b(h).mean(0)

    model = Net(forward, a=linear(3, 4).bfloat16(), b=linear(4, 2).half())
    x = drawn(samples, 6, 3).bfloat16()
    assert error(model, x) < 2e-2
    for name, kernel in fl.ntk(model, x, by="parameter").items():
        reference = dense_ntk(model, x, by="parameter")[name]
        assert float((kernel.double() - reference).abs().max() / reference.abs().max()) < 3e-2


def test_a_module_that_cannot_be_assigned_to():
    class Frozen(nn.Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            if getattr(self, "closed", False):
                raise AttributeError(f"frozen: {name}")
            super().__setattr__(name, value)

    model = Frozen(3, 2, dtype=torch.float64)
    model.closed = True
    x = drawn(4, 3)
    torch.testing.assert_close(fl.ntk(nn.Sequential(model), x), x @ x.T + 1)
    assert model.training


@pytest.mark.parametrize("outputs", ["mean", "each", "full"])
def test_a_kernel_that_single_precision_cannot_hold_is_refused_in_words(outputs: Any):
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False))
    with torch.no_grad():
        model[0].weight.mul_(1e-10)
        model[1].weight.mul_(1e20)
    x = torch.randn(6, 5)
    with pytest.raises(fl.FeatlearnError, match="not finite"):
        fl.ntk(model, x, outputs=outputs)
    assert fl.ntk(model, x, outputs=outputs, dtype=torch.float64).isfinite().all()
