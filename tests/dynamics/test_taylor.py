"""Taylor models against the network, its frozen kernel and its measured one."""

import copy

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
    "normalised": lambda: (nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 3)), drawn(6, 4)),
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
        return float((taylor(x) - moved(x)).norm())

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
        "network.0.bias", "network.2.weight", "network.2.bias",
    ]  # fmt: skip
    train(taylor, x, y, 3, 1e-3)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(taylor.network[0].weight, before["0.weight"])


def test_bad_orders_are_refused():
    with pytest.raises(fl.FeatlearnError, match="order=3, expected 1 or 2"):
        dynamics.linearize(nn.Linear(2, 2), 3)
    with pytest.raises(fl.FeatlearnError, match=r"expected a torch.nn.Module"):
        dynamics.linearize("model")
