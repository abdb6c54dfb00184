"""Multiplying the output by a factor is training on labels divided by it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import featlearn as fl
from featlearn.steer import scale_init, scale_output


def network(seed: int, activation: type[nn.Module] = nn.Tanh, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(3, 7, bias=bias), activation(), nn.Linear(7, 5, bias=bias), activation(), nn.Linear(5, 2, bias=bias)
    ).double()


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(11, 3, dtype=torch.float64, generator=generator),
        torch.randn(11, 2, dtype=torch.float64, generator=generator) - 0.3,
    )


def trained(model: nn.Module, x: torch.Tensor, y: torch.Tensor, lr: float, steps: int) -> list[torch.Tensor]:
    """Outputs after each step of full-batch descent on 1/2 sum (f - y)^2."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    path = []
    for _ in range(steps):
        optimizer.zero_grad()
        f = model(x)
        path.append(f.detach())
        (f - y).square().sum().div(2).backward()
        optimizer.step()
    return path


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.floats(-2, 2), st.sampled_from([nn.Tanh, nn.ReLU, nn.SiLU]))
def test_a_multiplied_output_is_training_on_divided_labels(seed, power, activation):
    factor = 10.0**power
    x, y = data(seed)
    scaled = scale_output(network(seed, activation), factor)
    lr = 0.01 * min(1.0, factor)
    # f - f0 on labels y / factor, by hand
    plain = network(seed, activation)
    with torch.no_grad():
        start = plain(x)
    path = trained(plain, x, start + y / factor, lr, 20)
    for g, f in zip(trained(scaled, x, y, lr * scaled.rate_factor, 20), path, strict=True):
        torch.testing.assert_close(g / factor, f - start, rtol=1e-9, atol=1e-11 / factor)
    for one, other in zip(scaled.network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("a", [0.5, 1.7])
@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_scales_of_weights_output_and_labels_trade_in_homogeneous_networks(a: float, factor: float):
    """003 Sec. 5.1: with f(a W) = a^p f(W), small weights, a small output and large labels are one thing."""
    p, lr, steps = 3, 0.002, 25
    x, y = data(3)
    one = scale_output(scale_init(network(5, nn.ReLU, bias=False), a), factor, center=False)
    first = trained(one, x, y, lr, steps)
    # outputs factor f(a W) = factor a^p f(W): the same function with c = factor a^p and weights W = V / a
    c = factor * a**p
    plain = network(5, nn.ReLU, bias=False)
    # d/dV = (1/a) d/dW, so V moving at rate lr is W moving at lr / a^2; labels y for c f are labels y / c for f,
    # at the rate times c^2
    second = trained(plain, x, y / c, lr / a**2 * c**2, steps)
    for g, f in zip(first, second, strict=True):
        torch.testing.assert_close(g, c * f, rtol=1e-10, atol=1e-12)


def test_the_kernel_is_multiplied_by_the_square_and_the_rate_makes_up_for_it():
    x, _ = data(0)
    model = network(1)
    scaled = scale_output(model, 4.0)
    torch.testing.assert_close(fl.ntk(scaled, x), 16 * fl.ntk(model, x), rtol=1e-12, atol=0)
    torch.testing.assert_close(scaled.rate_factor * fl.ntk(scaled, x), fl.ntk(model, x), rtol=1e-12, atol=0)


def test_it_starts_at_zero_shares_the_parameters_and_keeps_f0():
    x, y = data(0)
    model = network(2)
    scaled = scale_output(model, 3.0)
    assert scaled(x).abs().max() == 0
    assert [id(p) for p in scaled.parameters() if p.requires_grad] == [id(p) for p in model.parameters()]
    before = model(x).detach()
    trained(scaled, x, y, 0.05, 5)
    torch.testing.assert_close(scaled(x) / 3 + before, model(x))
    assert (model(x) - before).abs().max() > 1e-3
    # a copy with other weights becomes this one, f0 included
    other = scale_output(network(9), 3.0)
    other.load_state_dict(scaled.state_dict())
    torch.testing.assert_close(other(x), scaled(x), rtol=0, atol=0)


def test_without_centering_it_only_multiplies():
    x, _ = data(0)
    model = network(2)
    torch.testing.assert_close(scale_output(model, 5.0, center=False)(x), 5 * model(x))


def test_f0_stays_in_eval_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 30), nn.Dropout(0.5), nn.BatchNorm1d(30), nn.Linear(30, 1))
    scaled = scale_output(model, 1.0)
    assert scaled.training
    scaled.train()
    assert scaled.start is not None
    assert not any(module.training for module in scaled.start.modules())
    scaled(torch.randn(8, 4))
    buffers = dict(scaled.start.named_buffers())
    assert float(buffers["2.running_mean"].abs().max()) == 0
    assert model[0].weight.requires_grad


def test_it_takes_what_the_model_takes_and_gives_logits():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, *, shift):
            return type("Output", (), {"logits": self.layer(x) + shift})()

    model = Wrapped()
    x = torch.randn(4, 3)
    torch.testing.assert_close(scale_output(model, 2.0, center=False)(x, shift=1.0), 2 * (model.layer(x) + 1))
    with pytest.raises(fl.errors.InputTypeError, match=r"tuple.*a tensor"):
        scale_output(nn.LSTM(3, 2), 2.0)(x)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf, "2"])
def test_other_factors_are_refused(factor):
    with pytest.raises(fl.FeatlearnError, match="factor"):
        scale_output(nn.Linear(1, 1), factor)


def test_other_models_are_refused():
    with pytest.raises(fl.errors.InputTypeError, match="expected a torch"):
        scale_output(torch.sin, 2.0)
