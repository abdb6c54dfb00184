"""Refusals name their cause: each text is that of one cause, and says what to do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import CoupledSamplesError, InputValueError, NotFiniteError, UnsupportedModelError
from tests.references.jacobian import dense_ntk
from tests.zoo.case import Net

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BATCH_NORM = "Use running statistics, check batch_first"


@pytest.fixture(autouse=True)
def in_double() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def message(model: nn.Module, error: type[Exception], x: Any = X) -> str:
    with pytest.raises(error) as caught:
        fl.ntk(model, x)
    return str(caught.value)


def test_statistics_of_the_batch() -> None:
    text = message(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False)), CoupledSamplesError)
    assert "first seen in 1 (BatchNorm1d)" in text
    assert BATCH_NORM in text
    assert "random" not in text


def test_a_model_that_samples() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        mean, log = self.encode(x).chunk(2, -1)
        return self.decode(mean + torch.exp(log / 2) * torch.randn_like(mean))

    text = message(Net(forward, encode=nn.Linear(4, 6), decode=nn.Linear(3, 4)), CoupledSamplesError)
    assert text.startswith("the model draws random numbers in eval mode")
    assert "if self.training else 0" in text
    assert BATCH_NORM not in text


def solved(adaptive: bool) -> nn.Module:
    """An ODE by Heun's method, whose steps or whose number of steps depend on the error of the whole batch."""

    def forward(self: Net, x: Tensor) -> Tensor:
        step = 0.1 / (1 + 0.01 * float(x.detach().norm()))
        for _ in range(5):
            slope = torch.tanh(self.f(x))
            x = x + step * slope
        done = 0.0
        while adaptive and done < 1:
            first = torch.tanh(self.f(x))
            step = min(0.1 / float(first.detach().norm()), 1 - done)
            x, done = x + step * first, done + step
        return self.head(x)

    return Net(forward, f=nn.Linear(4, 4), head=nn.Linear(4, 2))


@pytest.mark.parametrize("adaptive", [False, True])
def test_an_adaptive_solver(adaptive: bool) -> None:
    text = message(solved(adaptive), CoupledSamplesError)
    assert ("Fix the number of steps" if adaptive else "Fix the steps (method='rk4'") in text
    assert "tighten the tolerance" in text
    assert BATCH_NORM not in text


class ActNorm(nn.Module):
    """Sets its weights from the first batch."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.scale, self.head, self.replaces = nn.Parameter(torch.ones(4)), nn.Linear(4, 2), replaces
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            scale = 1 / (x.detach().std(0) + 1e-6)
            if self.replaces:
                self.scale.data = scale
            else:
                self.scale.data.copy_(scale)
            self.ready.fill_(True)
        return self.head(torch.tanh(x * self.scale))


@pytest.mark.parametrize("replaces", [False, True])
def test_weights_that_are_set_from_the_first_batch(replaces: bool) -> None:
    model = ActNorm(replaces)
    text = message(model, UnsupportedModelError)
    assert "rewrites scale" in text
    assert "run it once on a batch of your own" in text
    assert torch.equal(model.scale, torch.ones(4))
    model(X)
    torch.testing.assert_close(fl.ntk(model, X), dense_ntk(model, X), rtol=1e-12, atol=1e-12)


def test_a_state_of_an_earlier_pass() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        self.mem = 0.9 * self.mem + torch.tanh(self.layer(x))
        return self.mem

    model = Net(forward, layer=nn.Linear(4, 2), mem=torch.zeros(1))
    expected = fl.ntk(model, X)
    model(X)
    assert "reset it first" in message(model, UnsupportedModelError)
    model.mem = torch.zeros(1)
    assert torch.equal(fl.ntk(model, X), expected)


class Messages(nn.Module):
    """A graph convolution with the edges in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]]))

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Tensor:
        source, target = self.edges if edges is None else edges
        h = torch.tanh(self.layer(x))
        return torch.zeros_like(h).index_add(-2, target, h.index_select(-2, source)).flatten(1)


def test_nodes_of_a_graph_are_no_samples() -> None:
    model = Messages()
    assert "(graphs, nodes, features)" in message(model, InputValueError, (X, model.edges))
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(fl.ntk(model, x), dense_ntk(model, x), rtol=1e-12, atol=1e-12)


class Changed(torch.autograd.Function):
    """Its backward pass is another function of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradients[0]), None


@pytest.mark.parametrize("change", [lambda g: g.clamp(-0.1, 0.1), torch.sign, lambda g: g / g.norm()])
@pytest.mark.parametrize("by_hook", [False, True])
def test_a_backward_pass_that_is_not_linear(change: Any, by_hook: bool) -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if by_hook and h.requires_grad:
            h.register_hook(change)
        return self.second(h if by_hook else Changed.apply(h, change))

    text = message(Net(forward, first=nn.Linear(4, 5), second=nn.Linear(5, 2)), CoupledSamplesError)
    assert "is not linear in the gradient of the outputs" in text
    assert "first.weight" in text


def test_a_backward_pass_that_couples_samples() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.second(Changed.apply(torch.tanh(self.first(x)), lambda g: g - g.mean(0)))

    text = message(Net(forward, first=nn.Linear(4, 5), second=nn.Linear(5, 2)), CoupledSamplesError)
    assert "not linear" not in text


@pytest.mark.parametrize("measure", [fl.ntk, fl.quantities.ntk_diagonal], ids=["kernel", "diagonal"])
def test_gradients_that_are_not_a_number(measure: Any) -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        h = self.layer(x) * (x[:, :1] > 0)
        return torch.where(h == 0, h, h.abs().sqrt())

    with pytest.raises(NotFiniteError, match="an op has no derivative at its input"):
        measure(Net(forward, layer=nn.Linear(4, 2)), X)
