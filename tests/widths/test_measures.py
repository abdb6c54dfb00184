"""Sizes, powers and updates against closed forms and other libraries."""

import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional

import featlearn as fl
from featlearn.widths.attention import record_attention
from featlearn.widths.fits import power, product_power
from featlearn.widths.observation import observe_calls, random_response
from featlearn.widths.size_runs import rms, spectral_norm, tangent_kernel, train_and_measure


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_power_law_is_found_without_error():
    widths = (8, 24, 100)
    values = torch.tensor([[3.0 * width**-0.7] * 2 for width in widths], dtype=torch.float64)
    found = power(values, widths)
    assert float(found) == pytest.approx(-0.7, abs=1e-12)
    assert float(found.stderr) < 1e-7
    assert float(product_power([(2.0, values), (-1.0, values)], widths)) == pytest.approx(-0.7, abs=1e-12)


def test_power_and_its_error_are_those_of_a_regression():
    widths = (8, 24, 100, 150)
    values = numbers(4, 3).exp()
    found = power(values, widths)
    at = [math.log(width) for width in widths for _ in range(3)]
    expected = stats.linregress(at, values.log().flatten().tolist())
    assert float(found) == pytest.approx(expected.slope, rel=1e-9)
    assert float(found.stderr) == pytest.approx(expected.stderr, rel=1e-9)


def test_zeros_and_lost_runs_have_no_power():
    values = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert math.isnan(float(power(values, (2, 4, 8))))
    values = torch.tensor([[1.0, 1.0], [2.0, math.nan], [4.0, math.inf]])
    assert float(power(values, (2, 4, 8))) == pytest.approx(1.0)


def test_spectral_norms():
    weight = numbers(5, 3, 2, 2)
    assert spectral_norm(weight) == pytest.approx(float(torch.linalg.matrix_norm(weight.flatten(1), 2)), rel=1e-10)
    tall = numbers(9, 4)
    assert spectral_norm(tall) == pytest.approx(float(torch.linalg.svdvals(tall)[0]), rel=1e-10)
    assert spectral_norm(tall[0]) == pytest.approx(float(tall[0].norm()), rel=1e-10)


def test_the_tangent_kernel_is_that_of_fl_ntk():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = numbers(5, 4)
    direction = torch.randn(3, generator=torch.Generator().manual_seed(0)).double()
    expected = fl.ntk(model, x, readout=lambda output: (output * direction).sum(-1))
    found = tangent_kernel(model, x, dict.fromkeys(dict(model.named_parameters()), 1.0))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_linear_map_answers_one_sample_by_its_inputs_squared():
    layer = nn.Linear(6, 4).double()
    x = numbers(1, 6)
    with observe_calls(layer, [""]) as seen:
        layer(x)
    response = {name: random_response(layer, seen.calls, name, proportional=True) for name in ("weight", "bias")}
    assert response == pytest.approx({"weight": float(x.square().sum()), "bias": 1.0}, rel=1e-9)
    signs = {name: random_response(layer, seen.calls, name, proportional=False) for name in ("weight", "bias")}
    assert signs["weight"] == pytest.approx(signs["bias"] * float(x.abs().sum()), rel=1e-9)
    assert 0.3 < signs["bias"] <= 1  # mean of |r| against its root mean square


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.25 * self.last(torch.tanh(self.first(x)))


def test_sizes_of_one_step_are_those_of_the_equations():
    torch.manual_seed(3)
    net, x, y, lr = Net(), numbers(5, 4), numbers(5, 3, seed=1), 0.07
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    sizes = train_and_measure(net, torch.optim.SGD(net.parameters(), lr), x, y, nn.MSELoss(), 1, proportional=True)

    w, b, u = before["first.weight"], before["first.bias"], before["last.weight"]
    z = x @ w.T + b
    h = torch.tanh(z)
    f = 0.25 * h @ u.T
    at_f = 2 * (f - y) / (5 * 3)
    at_u, at_h = 0.25 * at_f, 0.25 * at_f @ u
    at_z = at_h * (1 - h.square())
    gradient_u, gradient_w = at_u.T @ h, at_z.T @ x
    last, first = sizes.parameters["last.weight"], sizes.parameters["first.weight"]
    assert last["descent"] == pytest.approx(lr * float(gradient_u.square().sum()), rel=1e-9)
    assert first["descent"] == pytest.approx(lr * float(gradient_w.square().sum()), rel=1e-9)
    moved = -lr * x @ gradient_w.T
    expected = abs(float((moved * at_z).sum())) / float(at_z.norm()) / at_z.numel() ** 0.5
    assert first["effect"] == pytest.approx(expected, rel=1e-9)
    assert first["gradient"] == pytest.approx(rms(at_z), rel=1e-9)
    assert first["multiplier"] == pytest.approx(rms(at_z) / rms(at_h), rel=1e-9)
    assert last["multiplier"] == pytest.approx(0.25, rel=1e-9)  # the factor behind the readout
    assert last["entry"] == pytest.approx(rms(h), rel=1e-9)
    assert first["update"] == pytest.approx(float(torch.linalg.matrix_norm(lr * gradient_w, 2)), rel=1e-8)
    assert sizes.network["output"] == pytest.approx(rms(f), rel=1e-9)
    after = {name: p.detach() for name, p in net.named_parameters()}
    hidden = torch.tanh(x @ after["first.weight"].T + after["first.bias"])
    change = 0.25 * hidden @ after["last.weight"].T - f
    assert sizes.network["output_change"] == pytest.approx(rms(change), rel=1e-9)
    grams = z @ z.T, (x @ after["first.weight"].T + after["first.bias"])
    motion = float((grams[1] @ grams[1].T - grams[0]).norm() / grams[0].norm())
    assert sizes.layers["first"]["kernel_motion"] == pytest.approx(motion, rel=1e-9)


def test_the_rate_of_adam_is_read_off_its_first_step():
    torch.manual_seed(3)
    net, x, y = Net(), numbers(5, 4), numbers(5, 3, seed=1)
    optimizer = torch.optim.Adam(net.parameters(), 0.002)
    sizes = train_and_measure(net, optimizer, x, y, nn.MSELoss(), 1, proportional=False)
    with observe_calls(net, ["last"]) as seen:
        net(x)
    hidden = torch.tanh(net.first(x)).detach()
    expected = 0.002 * random_response(net.last, seen.calls, "weight", proportional=False)
    # the response is that of the inputs, which this step has hardly moved
    assert sizes.parameters["last.weight"]["response"] == pytest.approx(expected, rel=0.02)
    assert sizes.parameters["last.weight"]["entry"] == pytest.approx(rms(hidden), rel=0.02)


def test_a_readout_of_zero_is_looked_at_until_gradients_come():
    torch.manual_seed(0)
    net, x, y = Net(), numbers(5, 4), numbers(5, 3, seed=1)
    nn.init.zeros_(net.last.weight)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    sizes = train_and_measure(net, optimizer, x, y, nn.MSELoss(), 2, proportional=True)
    assert sizes.parameters["first.weight"]["effect"] > 0
    assert sizes.parameters["last.weight"]["weight"] == 0
    assert sizes.parameters["last.weight"]["multiplier"] == 0.25


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in (self.query(x), self.key(x), x))
        if self.fused:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        scores = 0.3 * q @ k.transpose(-1, -2)
        mask = torch.ones(scores.shape[-2:]).triu(1).bool()
        return scores.masked_fill(mask, -1e9).softmax(-1) @ v


@pytest.mark.parametrize("fused", [True, False])
def test_attention_logits_are_seen_fused_or_not(fused: bool):
    torch.manual_seed(0)
    model, x = Attention(fused), numbers(3, 5, 8)
    with record_attention(model) as found:
        model(x)
    q, k = (one(x).detach().unflatten(-1, (2, 4)).transpose(1, 2) for one in (model.query, model.key))
    scores = 0.3 * q @ k.transpose(-1, -2)
    seen = scores if fused else scores[..., torch.ones(5, 5).tril().bool()]
    assert found[""].size == pytest.approx(rms(seen), rel=1e-9)
    assert found[""].head == 4
    assert found[""].scale == (0.3 if fused else None)
