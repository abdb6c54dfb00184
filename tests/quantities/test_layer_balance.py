"""layer_balance: conserved along gradient flow, integrated here, wherever it says so; and its values by hand."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

import featlearn as fl
from featlearn.errors import InputTypeError, InputValueError
from tests.zoo.case import Net, default_dtype, parameter

Rates = Callable[[str], float]


@pytest.fixture(autouse=True)
def seeded() -> Any:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def one(_: str) -> float:
    return 1.0


def loss(outputs: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(outputs, y) if y.is_floating_point() else F.cross_entropy(outputs, y)


def flow(model: nn.Module, x: Tensor, y: Tensor, rate: Rates = one, time: float = 1.0, steps: int = 100) -> None:
    """d theta / dt = -rate dL/d theta by Runge-Kutta of fourth order, the rate by the parameter's name."""
    own = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def velocity(theta: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: value.detach().requires_grad_() for name, value in theta.items()}
        gradients = torch.autograd.grad(loss(functional_call(model, leaves, (x,)), y), list(leaves.values()))
        return {name: -rate(name) * gradient for name, gradient in zip(leaves, gradients, strict=True)}

    def moved(theta: dict[str, Tensor], direction: dict[str, Tensor], step: float) -> dict[str, Tensor]:
        return {name: value + step * direction[name] for name, value in theta.items()}

    theta, step = {name: value.detach().clone() for name, value in own.items()}, time / steps
    for _ in range(steps):
        first = velocity(theta)
        second = velocity(moved(theta, first, step / 2))
        third = velocity(moved(theta, second, step / 2))
        fourth = velocity(moved(theta, third, step))
        for name in theta:
            slope = first[name] + 2 * second[name] + 2 * third[name] + fourth[name]
            theta[name] = theta[name] + step / 6 * slope
    with torch.no_grad():
        for name, value in theta.items():
            own[name].copy_(value)


class Drift:
    """What flow did to each balance, relative to the balance's size and to how far weights moved."""

    def __init__(
        self, model: nn.Module, x: Tensor, y: Tensor, rate: Rates = one, given: Any = None, **how: Any
    ) -> None:
        before = copy.deepcopy(dict(model.named_parameters()))
        self.first = fl.quantities.layer_balance(model, x, rates=given)
        flow(model, x, y, rate, **how)
        self.last = fl.quantities.layer_balance(model, x, rates=given)
        self.moved = min(
            float((weight - before[name]).detach().norm())
            for name, weight in model.named_parameters()
            if weight.requires_grad and weight.dim() > 1
        )

    def of(self, *names: str) -> float:
        key = (names[0], names[1])
        return float((self.last[key].value - self.first[key].value).abs().max() / self.first[key].value.abs().max())


def regression(samples: int = 7, inputs: int = 4, outputs: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, inputs), 2 * torch.randn(samples, outputs) - 0.5


def classes(*shape: int, samples: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, *shape), torch.randint(3, (samples,))


# ---------------------------------------------------------------------------------------------------------------------
# conserved
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("task", ["squares", "cross-entropy"])
def test_linear_networks_conserve_the_whole_matrix(bias: bool, task: str):
    rates = {"0": 0.4, "1": 1.7, "2": 0.9}
    x, y = regression(outputs=3) if task == "squares" else classes(4)
    model = nn.Sequential(linear(4, 5, bias), linear(5, 6, bias), linear(6, 3, bias))
    drift = Drift(model, x, y, lambda name: rates[name[0]], rates, time=1.0, steps=200)
    assert drift.moved > 0.1
    for names in (("0", "1"), ("1", "2")):
        assert drift.first[names].conserved
        assert drift.first[names].value.shape == (len(model[int(names[0])].weight),) * 2
        assert drift.of(*names) < 1e-9
    wrong = fl.quantities.layer_balance(model, x)["0", "1"].value
    assert float((wrong - drift.last["0", "1"].value).abs().max()) > 0.1


def active(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Which units are on, layer by layer."""
    patterns = []
    for part in model:
        if isinstance(part, nn.ReLU | nn.LeakyReLU):
            patterns.append(x > 0)
        x = part(x)
    return patterns


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("task", ["squares", "cross-entropy"])
def test_rectified_networks_conserve_the_diagonal(bias: bool, task: str):
    """The step is exact to fourth order where no unit switches: the flow is kept that short, and this is checked."""
    torch.manual_seed(1)
    rates = {"0": 0.4, "2": 1.7, "4": 0.9}
    x, y = regression(outputs=3) if task == "squares" else classes(4)
    model = nn.Sequential(linear(4, 5, bias), nn.ReLU(), linear(5, 6, bias), nn.LeakyReLU(0.1), linear(6, 3, bias))
    before = active(model, x)
    drift = Drift(model, x, y, lambda name: rates[name[0]], rates, time=0.02, steps=20)
    assert all(torch.equal(one, other) for one, other in zip(before, active(model, x), strict=True))
    assert drift.moved > 1e-4
    for names in (("0", "2"), ("2", "4")):
        assert drift.first[names].conserved
        assert drift.first[names].value.dim() == 1
        assert drift.of(*names) < 1e-12


def test_over_long_times_only_the_integrator_errs():
    drifts = []
    for steps in (50, 400):
        torch.manual_seed(3)
        (x, y), model = regression(), nn.Sequential(linear(4, 6), nn.ReLU(), linear(6, 2))
        drift = Drift(model, x, y, time=2.0, steps=steps)
        assert drift.moved > 0.3
        drifts.append(drift.of("0", "2"))
    assert drifts[0] < 1e-3
    assert drifts[1] < drifts[0] / 4


def test_linear_convolutions_conserve_the_whole_matrix():
    rates = {"0": 0.7, "1": 1.4, "4": 0.9}
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, (3, 2), stride=2), nn.AvgPool2d(2), nn.Flatten(), linear(4, 3)
    )
    drift = Drift(model, *classes(2, 6, 6), lambda name: rates[name[0]], rates, time=2.0)
    assert drift.moved > 0.1
    for names in (("0", "1"), ("1", "4")):
        assert drift.first[names].conserved
        assert drift.first[names].value.dim() == 2
        assert drift.of(*names) < 1e-9


def test_rectified_convolutions_conserve_the_diagonal():
    drifts = []
    for steps in (25, 200):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(3, 4, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            linear(16, 3),
        )
        drift = Drift(model, *classes(2, 6, 6), time=1.0, steps=steps)
        assert drift.moved > 0.05
        drifts.append(max(drift.of("0", "2"), drift.of("2", "6")))
        assert drift.first["0", "2"].conserved
        assert drift.first["2", "6"].conserved
        assert drift.first["2", "6"].value.shape == (4,)
    assert drifts[0] < 2e-3
    assert drifts[1] < drifts[0] / 3


def test_transposed_convolutions():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 3, 2, stride=2, bias=False), nn.Flatten(), linear(108, 3)
    )
    drift = Drift(model, *classes(2, 5, 5), time=1.0)
    assert drift.first["0", "1"].conserved
    assert drift.of("0", "1") < 1e-9
    assert drift.of("1", "3") < 1e-9


def test_tokens_that_are_averaged_and_numbers_that_multiply():
    model = Net(lambda self, x: self.second(0.5 * self.first(x)).mean(1) / 3, first=linear(4, 3), second=linear(3, 2))
    drift = Drift(model, torch.randn(6, 5, 4), torch.randn(6, 2), time=3.0)
    assert drift.first["first", "second"].conserved
    assert drift.first["first", "second"].value.shape == (3, 3)
    assert drift.of("first", "second") < 1e-9


def test_one_step_of_descent_changes_it_in_second_order():
    changes = []
    for rate in (0.02, 0.01):
        torch.manual_seed(0)
        (x, y), model = regression(), nn.Sequential(linear(4, 6), nn.ReLU(), linear(6, 2))
        optimizer = torch.optim.SGD(
            [{"params": model[0].parameters(), "lr": rate}, {"params": model[2].parameters(), "lr": 3 * rate}]
        )
        before = fl.quantities.layer_balance(model, x, rates=optimizer)["0", "2"].value * rate
        loss(model(x), y).backward()
        optimizer.step()
        changes.append(
            float((fl.quantities.layer_balance(model, x, rates=optimizer)["0", "2"].value * rate - before).abs().max())
        )
    assert changes[0] / changes[1] == pytest.approx(4.0, rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# not conserved, and said so
# ---------------------------------------------------------------------------------------------------------------------


def tanh_network() -> nn.Module:
    return nn.Sequential(linear(4, 5), nn.Tanh(), linear(5, 2))


def residual_network() -> nn.Module:
    return Net(
        lambda self, x: self.head(self.stem(x) + self.block(torch.relu(self.stem(x)))),
        stem=linear(4, 3, False),
        block=linear(3, 3, False),
        head=linear(3, 2, False),
    )


def layer_twice() -> nn.Module:
    return Net(
        lambda self, x: self.head(self.layer(self.layer(x))), layer=linear(4, 4, False), head=linear(4, 2, False)
    )


def normalized() -> nn.Module:
    return nn.Sequential(linear(4, 5), nn.LayerNorm(5), nn.ReLU(), linear(5, 2))


def frozen_between() -> nn.Module:
    model = nn.Sequential(linear(4, 4, False), nn.ReLU(), linear(4, 4, False), nn.ReLU(), linear(4, 2, False))
    model[2].requires_grad_(False)
    return model


@pytest.mark.parametrize("build", [tanh_network, residual_network, layer_twice, normalized, frozen_between])
def test_what_is_not_conserved_is_said(build: Callable[[], nn.Module]):
    drift = Drift(build(), *regression(), time=2.0)
    for names, balance in drift.first.items():
        assert not balance.conserved
        assert balance.reason
        assert drift.of(*names) > 1e-3


def test_the_reason_names_the_op():
    found = fl.quantities.layer_balance(tanh_network(), torch.randn(5, 4))["0", "2"]
    assert found.reason == "TanhBackward0 between them"
    assert found.value.shape == (5,)


# ---------------------------------------------------------------------------------------------------------------------
# said to be conserved, and not
# ---------------------------------------------------------------------------------------------------------------------


class NTKLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.in_features**-0.5, self.bias)


def frozen_bias() -> nn.Module:
    model = nn.Sequential(linear(4, 5), linear(5, 2))
    model[0].bias.requires_grad_(False)
    return model


def ntk_parametrized() -> nn.Module:
    return nn.Sequential(NTKLinear(4, 5, bias=False), NTKLinear(5, 2, bias=False))


def weight_norm() -> nn.Module:
    return nn.Sequential(linear(4, 5, False), nn.ReLU(), parametrizations.weight_norm(linear(5, 2, False)))


def constant_vector() -> nn.Module:
    return Net(
        lambda self, x: self.second(torch.tensor([1.0, 2.0, 3.0]) * self.first(x)),
        first=linear(4, 3, False),
        second=linear(3, 2, False),
    )


def also_feeds_an_unread_op() -> nn.Module:
    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.second(hidden) + self.third(hidden, hidden)

    return Net(forward, first=linear(4, 3, False), second=linear(3, 2, False), third=nn.Bilinear(3, 3, 2))


def penalty() -> nn.Module:
    return Net(
        lambda self, x: self.second(self.first(x)) + self.first.weight.square().sum(),
        first=linear(4, 3, False),
        second=linear(3, 2, False),
    )


def shared_bias() -> nn.Module:
    model = nn.Sequential(linear(4, 3), nn.ReLU(), linear(3, 3), nn.ReLU(), linear(3, 2))
    model[2].bias = model[0].bias
    return model


def transposed_again() -> nn.Module:
    return Net(
        lambda self, x: F.linear(F.linear(x, self.weight, self.bias), self.weight.T)[:, :2],
        weight=parameter(5, 4),
        bias=parameter(5),
    )


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(frozen_bias),
        pytest.param(ntk_parametrized),
        pytest.param(weight_norm),
        pytest.param(constant_vector),
        pytest.param(also_feeds_an_unread_op),
        pytest.param(penalty),
        pytest.param(shared_bias),
        pytest.param(transposed_again),
    ],
)
def test_what_is_said_to_be_conserved_is(build: Callable[[], nn.Module]):
    drift = Drift(build(), *regression(), time=2.0, steps=200)
    for names, balance in drift.first.items():
        assert not balance.conserved or drift.of(*names) < 1e-3


@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_convolutions(groups: int):
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=groups, bias=False),
        nn.Conv2d(4, 3, 1, bias=False),
        nn.Flatten(),
        linear(27, 3, False),
    )
    drift = Drift(model, *classes(4, 5, 5), time=2.0)
    assert not drift.first["0", "1"].conserved or drift.of("0", "1") < 1e-9


def test_biases_with_rates_of_their_own():
    model = nn.Sequential(linear(4, 5), linear(5, 2))
    weights, biases = [part.weight for part in model], [part.bias for part in model]
    optimizer = torch.optim.SGD([{"params": weights, "lr": 1.0}, {"params": biases, "lr": 3.0}])
    drift = Drift(model, *regression(), lambda name: 3.0 if "bias" in name else 1.0, optimizer, time=1.0)
    assert not drift.first["0", "1"].conserved or drift.of("0", "1") < 1e-9


@pytest.mark.parametrize("kind", [torch.optim.Adam, lambda p, lr: torch.optim.SGD(p, lr, weight_decay=0.1)])
def test_optimizers_that_are_no_gradient_flow(kind: Any):
    model = nn.Sequential(linear(4, 5), nn.ReLU(), linear(5, 2))
    try:
        found = fl.quantities.layer_balance(model, torch.randn(5, 4), rates=kind(model.parameters(), lr=0.1))
    except fl.FeatlearnError:
        return
    assert not any(balance.conserved for balance in found.values())


# ---------------------------------------------------------------------------------------------------------------------
# values and rates
# ---------------------------------------------------------------------------------------------------------------------


def test_values_by_hand():
    model, x = nn.Sequential(linear(4, 3), linear(3, 2)), torch.randn(5, 4)
    W, b, U = (part.detach() for part in (model[0].weight, model[0].bias, model[1].weight))
    expected = (W @ W.T + torch.outer(b, b)) / 0.5 - U.T @ U / 3
    found = fl.quantities.layer_balance(model, x, rates={"0": 0.5, "1": 3.0})["0", "1"].value
    assert found.dtype == torch.float64
    assert float((found - expected).abs().max()) < 1e-14
    rectified = nn.Sequential(model[0], nn.ReLU(), model[1])
    found = fl.quantities.layer_balance(rectified, x, rates={"0": 0.5, "2": 3.0})["0", "2"].value
    assert float((found - expected.diagonal()).abs().max()) < 1e-14


def test_rates_by_globs_and_by_optimizer():
    model, x = nn.Sequential(linear(4, 3), nn.ReLU(), linear(3, 2)), torch.randn(5, 4)
    expected = fl.quantities.layer_balance(model, x, rates={"0": 0.5, "2": 3.0})["0", "2"].value
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "lr": 3.0}]
    )
    assert torch.equal(fl.quantities.layer_balance(model, x, rates=optimizer)["0", "2"].value, expected)
    assert torch.equal(fl.quantities.layer_balance(model, x, rates={"0": 0.5, "*": 3.0})["0", "2"].value, expected)
    assert torch.equal(fl.quantities.layer_balance(model, x, rates={"[0]": 0.5, "*": 3.0})["0", "2"].value, expected)
    double = fl.quantities.layer_balance(model.float(), x.float(), rates=optimizer, dtype=torch.float64)["0", "2"].value
    assert float((double - expected).abs().max()) < 1e-6
    plain = fl.quantities.layer_balance(model, x.float())["0", "2"].value
    assert torch.equal(plain, fl.quantities.layer_balance(model, x.float(), rates={"*": 1.0})["0", "2"].value)


def test_wrong_rates_are_refused():
    model, x = nn.Sequential(linear(4, 3), nn.ReLU(), linear(3, 2)), torch.randn(5, 4)
    with pytest.raises(InputValueError, match="rates have no entry for '2', expected one for every layer; add"):
        fl.quantities.layer_balance(model, x, rates={"0": 0.5})
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(InputValueError, match=r"the learning rate of '0' is .*, expected one above zero"):
            fl.quantities.layer_balance(model, x, rates={"*": rate})
    with pytest.raises(InputTypeError, match="rates is float, expected a mapping of layer names or an optimizer"):
        fl.quantities.layer_balance(model, x, rates=0.1)  # type: ignore[arg-type]
    other = torch.optim.SGD(linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(InputValueError, match="the learning rate of '0' is 0"):
        fl.quantities.layer_balance(model, x, rates=other)


@pytest.mark.parametrize("rates", [{"frist": 0.5, "*": 1.0}, {}])
def test_rates_of_layers_that_do_not_exist_are_refused(rates: dict[str, float]):
    model = nn.Sequential(linear(4, 3), nn.ReLU(), linear(3, 2))
    with pytest.raises(InputValueError):
        fl.quantities.layer_balance(model, torch.randn(5, 4), rates=rates)


def test_channels_that_cannot_be_matched_have_no_value():
    model = Net(lambda self, x: self.second(F.glu(self.first(x))), first=linear(4, 6), second=linear(3, 2))
    (found,) = fl.quantities.layer_balance(model, torch.randn(5, 4)).values()
    assert not found.conserved
    assert "mixes several outputs" in found.reason
    assert bool(found.value.isnan().all())


def test_measuring_changes_nothing():
    model = nn.Sequential(linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(), linear(6, 3))
    x, random = torch.randn(9, 4), torch.get_rng_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = copy.deepcopy(model.state_dict())
    fl.quantities.layer_balance(model, x, rates=optimizer)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(part.training for part in model.modules())
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert optimizer.state_dict()["state"] == {}
