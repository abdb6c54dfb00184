"""Taylor models against the network, its frozen kernel and its measured one."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn import dynamics


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x, x, x, need_weights=False)[0]).mean(1))


MODELS = {
    "mlp": lambda: (nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3)), drawn(6, 4)),
    "normalized": lambda: (nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 3)), drawn(6, 4)),
    "attention": lambda: (Attention(), drawn(6, 5, 4)),
}


def built(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = MODELS[name]()
    return model.double().eval(), x, drawn(6, 3, seed=5)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, lr: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        (0.5 * (model(x) - y).square().sum()).backward()
        optimizer.step()


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_it_starts_as_the_network_with_its_kernel(name: str, order: int):
    model, x, _ = built(name)
    taylor = dynamics.linearize(model, order)
    torch.testing.assert_close(taylor(x), model(x))
    torch.testing.assert_close(fl.ntk(taylor, x, outputs="full"), fl.ntk(model, x, outputs="full"))


@pytest.mark.parametrize("name", MODELS)
def test_order_one_trains_as_its_frozen_kernel_says(name: str):
    model, x, y = built(name)
    kernel, f0 = fl.ntk(model, x, outputs="full"), model(x).detach()
    lr = 0.2 / float(torch.linalg.eigvalsh(kernel.permute(0, 2, 1, 3).reshape(18, 18)).max())
    taylor = dynamics.linearize(model)
    train(taylor, x, y, 25, lr)
    predicted = dynamics.kernel_descent(kernel, y, times=[25], rate=lr, f0=f0, discrete=True).outputs[0]
    torch.testing.assert_close(taylor(x).detach(), predicted, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(fl.ntk(taylor, x, outputs="full"), kernel, rtol=1e-9, atol=1e-10)
    assert float((predicted - f0).norm()) > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_each_order_is_closer_to_the_network(name: str):
    """Errors of outputs fall as d^2 and d^3 with the way d that the weights have gone."""
    model, x, _ = built(name)
    way = [drawn(*p.shape, seed=i) / p.numel() ** 0.5 for i, p in enumerate(model.parameters())]

    def error(order: int, size: float) -> float:
        taylor, moved = dynamics.linearize(model, order), copy.deepcopy(model)
        with torch.no_grad():
            for a, b, step in zip(taylor.parameters(), moved.parameters(), way, strict=True):
                a += size * step
                b += size * step
        return float((taylor(x) - moved(x)).detach().norm())

    for order in (1, 2):
        ratio = error(order, 2e-3) / error(order, 1e-3)
        assert ratio == pytest.approx(2 ** (order + 1), rel=0.05)


def test_the_kernel_of_order_two_moves_as_the_network_s():
    model, x, y = built("mlp")
    start = fl.ntk(model, x)
    moved = {}
    for label, twin in (("network", copy.deepcopy(model)), ("taylor", dynamics.linearize(model, 2))):
        train(twin, x, y, 3, 1e-4)
        moved[label] = fl.ntk(twin, x) - start
    assert float(moved["network"].norm()) > 1e-3
    assert float((moved["taylor"] - moved["network"]).norm() / moved["network"].norm()) < 0.02


def test_the_network_given_is_not_touched_and_frozen_weights_stay():
    model, x, y = built("mlp")
    model[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    taylor = dynamics.linearize(model)
    assert [name for name, p in taylor.named_parameters() if p.requires_grad] == [
        "network.0.bias",
        "network.2.weight",
        "network.2.bias",
    ]
    train(taylor, x, y, 3, 1e-3)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(taylor.network[0].weight, before["0.weight"])


def moved(taylor: nn.Module) -> nn.Module:
    with torch.no_grad():
        for i, parameter in enumerate(taylor.parameters()):
            parameter += 0.3 * drawn(*parameter.shape, seed=40 + i).to(parameter)
    return taylor


@pytest.mark.parametrize("order", [1, 2])
def test_the_expansion_point_changes_format_with_the_module(order: int):
    model, x, _ = built("mlp")
    taylor = moved(dynamics.linearize(model, order))
    expected = taylor(x)
    single = taylor.float()(x.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-5)
    assert taylor.double()(x).dtype == torch.float64
    twin = copy.deepcopy(taylor)
    torch.testing.assert_close(twin(x), taylor(x), rtol=0, atol=0)


@pytest.mark.parametrize("order", [1, 2])
def test_a_state_dict_carries_the_expansion_point(order: int):
    """Into the Taylor model of another network, with weights tied and weights frozen."""

    class Tied(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4, bias=bias) for bias in (True, False, True))
            for i, parameter in enumerate(self.parameters()):
                parameter.data = drawn(*parameter.shape, seed=seed + i)
            self.b.weight = self.a.weight
            self.c.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    x = drawn(6, 4)
    source, target = moved(dynamics.linearize(Tied(0), order)), dynamics.linearize(Tied(90), order)
    assert float((source(x) - target(x)).detach().abs().max()) > 0.1
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(target(x), source(x), rtol=0, atol=0)
    names = {name for name, _ in source.named_buffers()}
    assert names == {"start.a.weight", "start.a.bias", "start.c.bias"}


class Logits(NamedTuple):
    logits: Tensor


class Wrapped(nn.Module):
    """A network whose output is put into something."""

    def __init__(self, model: nn.Module, wrap: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.model, self.wrap = model, wrap

    def forward(self, x: Tensor) -> object:
        return self.wrap(self.model(x))


def test_logits_are_read_and_other_outputs_refused():
    model, x, _ = built("mlp")
    torch.testing.assert_close(dynamics.linearize(Wrapped(model, Logits))(x), model(x))
    for wrap in (lambda f: {"logits": f}, lambda f: (f, f), lambda f: None):
        with pytest.raises(fl.FeatlearnError, match=r"expected a tensor or an object with \.logits; wrap"):
            dynamics.linearize(Wrapped(model, wrap))(x)


def test_running_statistics_are_refused_in_training_mode_and_kept_in_eval_mode():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = drawn(6, 4)
    model(x)  # statistics that are not those of the start
    taylor = dynamics.linearize(model)
    assert taylor.training
    with pytest.raises(fl.FeatlearnError, match=r"BatchNorm1d '1' is in training mode.*call \.eval\(\)"):
        taylor(x)
    taylor.eval()
    torch.testing.assert_close(taylor(x), model.eval()(x))
    assert not dynamics.linearize(model).training


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(fl.FeatlearnError, match="no trainable parameter, expected at least one"):
        dynamics.linearize(nn.Linear(2, 2).requires_grad_(False))


def test_weights_frozen_later_stay_where_they_have_gone():
    model, x, _ = built("mlp")
    taylor = moved(dynamics.linearize(model))
    expected = taylor(x).detach()
    taylor.network[0].weight.requires_grad_(False)
    torch.testing.assert_close(taylor(x), expected)


def test_bad_orders_are_refused():
    with pytest.raises(fl.FeatlearnError, match="order=3, expected 1 or 2"):
        dynamics.linearize(nn.Linear(2, 2), 3)
    with pytest.raises(fl.FeatlearnError, match=r"expected a torch.nn.Module"):
        dynamics.linearize("model")
