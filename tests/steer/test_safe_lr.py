"""The safe learning rate against closed forms, brute-force curvature, and training at and above the limit."""

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import InputTypeError, InputValueError
from featlearn.steer import safe_lr, scale_output
from featlearn.steer.safe_lr import loss_curvature

module = importlib.import_module("featlearn.steer.safe_lr")  # the package has the function under this name
P, D, C = 11, 4, 3


def data(outputs: int = C) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(P, size, generator=generator, dtype=torch.float64) for size in (D, outputs))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C)).double()


SQUARED = {
    "mse": nn.MSELoss(),
    "mean": lambda f, y: (f - y).square().sum() / P,
    "mean-half": lambda f, y: (f - y).square().sum() / (2 * P),
    "sum-half": lambda f, y: (f - y).square().sum() / 2,
    "mean-over-outputs": nn.MSELoss(),
}


def gauss_newton(model: nn.Module, x: Tensor, y: Tensor, loss: Any) -> float:
    """Largest eigenvalue of J^T H J by dense Jacobian and Hessian."""
    named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    jacobians = torch.func.jacrev(lambda weights: torch.func.functional_call(model, weights, x).flatten())(named)
    jacobian = torch.cat([part.flatten(1) for part in jacobians.values()], 1)
    f = model(x).detach()
    hessian = torch.autograd.functional.hessian(lambda g: loss(g, y), f).reshape(f.numel(), f.numel())
    return float(torch.linalg.eigvalsh(jacobian.mT @ hessian @ jacobian)[-1])


def last_loss(model: nn.Module, x: Tensor, y: Tensor, loss: Any, lr: float, steps: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
    return float(value.detach())


@pytest.mark.parametrize("loss", SQUARED)
def test_of_a_linear_model_it_is_the_closed_form(loss: str):
    """The kernel of W x between outputs is x x^T times the identity: k is the largest eigenvalue of x x^T."""
    x, _ = data()
    model = nn.Linear(D, C, bias=False).double()
    second = {"mse": 2 / (P * C), "mean": 2 / P, "mean-half": 1 / P, "sum-half": 1.0, "mean-over-outputs": 2 / (P * C)}
    largest = float(torch.linalg.svdvals(x)[0]) ** 2
    assert safe_lr(model, x, loss=loss) == pytest.approx(0.25 * 2 / (second[loss] * largest), rel=1e-6)


@pytest.mark.parametrize("loss", SQUARED)
def test_of_the_squared_error_it_is_a_quarter_of_the_gauss_newton_limit(loss: str):
    model, (x, y) = network(), data()
    limit = 2 / gauss_newton(model, x, y, SQUARED[loss])
    assert safe_lr(model, x, loss=loss) == pytest.approx(limit / 4, rel=1e-6)
    assert safe_lr(model, x, y, loss=SQUARED[loss]) == pytest.approx(limit / 4, rel=1e-6)
    assert safe_lr(model, x, loss=loss, share=1.0) == pytest.approx(limit, rel=1e-6)


def test_other_losses_are_bounded_by_the_product_of_kernel_and_curvature():
    model, (x, y) = network(), data()
    labels = torch.arange(P) % C
    kernel = fl.ntk(model, x, outputs="full").transpose(1, 2).reshape(P * C, P * C)
    largest = float(torch.linalg.eigvalsh(kernel)[-1])
    assert safe_lr(model, x, loss="cross-entropy") == pytest.approx(0.5 * P / largest, rel=1e-6)
    entropy = 2 / gauss_newton(model, x, labels, nn.functional.cross_entropy)
    assert safe_lr(model, x, loss="cross-entropy") < entropy / 4
    logistic = nn.BCEWithLogitsLoss()
    targets = (y > 0).double()
    assert safe_lr(model, x, loss="bce") == pytest.approx(0.5 / largest * 4 * P * C, rel=1e-6)
    f = model(x).detach()
    second = float((f.sigmoid() * (1 - f.sigmoid())).max()) / f.numel()
    rate = safe_lr(model, x, targets, loss=lambda f, y: logistic(f, y))
    assert rate == pytest.approx(0.5 / (largest * second), rel=1e-6)
    assert safe_lr(model, x, loss="bce") <= rate <= 0.25 * 2 / gauss_newton(model, x, targets, logistic)


def test_cross_entropy_given_as_a_function_is_recognized():
    model, (x, _) = network(), data()
    named = safe_lr(model, x, loss="cross-entropy")
    for loss in (nn.CrossEntropyLoss(), nn.functional.cross_entropy):
        assert safe_lr(model, x, torch.arange(P) % C, loss=loss) == named
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double())
    assert safe_lr(model, x, torch.arange(P) % C, loss=weighted) != named


def test_a_function_gets_outputs_of_the_shape_that_the_model_gives():
    """(P,) against targets (P,): (P, 1) would broadcast to (P, P)."""
    x, y = data(1)

    class One(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, 0]

    model, target = One(D, 1).double(), y[:, 0]
    expected = safe_lr(model, x, loss="mean")
    assert safe_lr(model, x, loss=lambda f: (f - target).square().mean()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", ["mse", "sum-half", "mean-over-outputs"])
def test_training_is_stable_at_this_rate_and_not_at_five_times_the_limit(loss: str):
    x, y = data()
    rate = safe_lr(network(), x, loss=loss)
    first = float(SQUARED[loss](network()(x), y).detach())
    assert last_loss(network(), x, y, SQUARED[loss], rate, 300) < 0.5 * first
    beyond = last_loss(network(), x, y, SQUARED[loss], 5 * 4 * rate, 300)
    assert not beyond < first


def test_a_linear_model_diverges_just_above_the_limit_and_not_just_below():
    x, y = data()
    x = x[:, :2]  # two directions: descent settles within the steps
    limit = safe_lr(nn.Linear(2, C, bias=False).double(), x, loss="mse", share=1.0)

    def after(share: float) -> float:
        torch.manual_seed(0)
        return last_loss(nn.Linear(2, C, bias=False).double(), x, y, SQUARED["mse"], share * limit, 2000)

    assert after(0.99) < float(SQUARED["mse"](torch.zeros(P, C), y))
    assert after(1.02) > 1e6


def test_an_output_scale_below_one_leaves_room_to_grow():
    x, _ = data()
    plain = safe_lr(network(), x, loss="mse")
    for gamma, room in ((0.1, 1.0), (1.0, 1.0), (100.0, 4 / 100)):  # two weight layers: 4 a^(2 - 1)
        model = scale_output(network(), 1 / gamma)
        assert safe_lr(model, x, loss="mse") == pytest.approx(plain * gamma**2 * room, rel=1e-6)
    assert safe_lr(network(), x, loss="mse", output_scale=0.01) == pytest.approx(plain * 0.04, rel=1e-6)


def test_readouts_and_inputs_are_those_of_the_kernel():
    x, y = data()

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = network()

        def forward(self, features: Tensor) -> Tensor:
            return self.inside(features)

    expected = safe_lr(network(), x, y, loss=nn.MSELoss())
    assert safe_lr(network(), (x,), y, loss=nn.MSELoss()) == expected
    assert safe_lr(Named(), {"features": x}, y, loss=nn.MSELoss()) == expected
    one = safe_lr(network(), x, loss="mean", readout=lambda out: out[:, 0])
    column = fl.ntk(network(), x, outputs=0)
    assert one == pytest.approx(0.25 * P / float(torch.linalg.eigvalsh(column)[-1]), rel=1e-6)


def test_large_kernels_are_not_formed(monkeypatch: pytest.MonkeyPatch):
    model, (x, _) = network(), data()
    expected = safe_lr(model, x, loss="mse")
    monkeypatch.setattr(module, "LARGEST_DENSE", 0)
    assert safe_lr(model, x, loss="mse") == pytest.approx(expected, rel=1e-6)


def test_the_model_is_left_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, C)).double()
    x, y = data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    safe_lr(model, x, y, loss=nn.MSELoss())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_without_a_second_derivative_counts_as_one_over_the_samples():
    _, y = data()
    assert loss_curvature(lambda f: f.sum(), y, None) == 1 / P
    assert loss_curvature(lambda f: -f.square().sum(), y, None) == 1 / P, "it bends downwards"


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"loss": "msee"}, InputValueError, "loss='msee', expected 'mse'"),
        ({"loss": 1}, InputTypeError, "loss is int"),
        ({"loss": lambda f: f}, InputTypeError, r"shape \(11, 3\), expected a tensor with a single number"),
        ({"loss": lambda f: 1.0}, InputTypeError, "the loss gives float"),
        ({"loss": lambda f: f.detach().sum()}, InputTypeError, "and a gradient"),
        ({"share": 0}, InputValueError, "share=0"),
        ({"share": math.nan}, InputValueError, "share"),
        ({"output_scale": -1.0}, InputValueError, "output_scale=-1.0"),
        ({"y": [1]}, InputTypeError, "y is list"),
        ({"model": nn.Sequential(nn.Linear(D, 2), nn.Linear(2, C))}, InputValueError, "kernel of x is zero"),
    ],
)
def test_what_cannot_be_used_is_refused(change: dict[str, Any], kind: type[Exception], said: str):
    given: dict[str, Any] = {"model": network(), "x": data()[0], "loss": "mse", **change}
    if "model" in change:
        for p in given["model"].double().parameters():
            nn.init.zeros_(p)
        given["model"][1].bias.requires_grad_(False)
    with pytest.raises(kind, match=said):
        safe_lr(**given)
