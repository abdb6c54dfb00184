"""Adaptive SLO: which layer it drives, how far each moves, and that measuring does not disturb."""

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.steer import SLO, AdaptiveSLO, hidden_correlations


def network(widths: tuple[int, ...] = (4, 9, 7, 5, 1), biased: bool = False, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out, bias=biased), nn.ReLU()]
        return nn.Sequential(*layers[:-1]).double()


def task(samples: int = 30) -> tuple[Tensor, Tensor]:
    data = fl.data.chain_monomial(samples, 4, 3, dtype=torch.float64)
    return data.x, data.y


def backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    x, y = task()
    optimizer.zero_grad()
    loss = (model(x)[:, 0] - y).square().mean()
    loss.backward()
    return loss


def uncentered(model: nn.Sequential, x: Tensor) -> dict[str, float]:
    """rho(W^T W, W^T K W) from autograd, sample by sample, without the library."""
    found = {}
    for place, layer in list(model.named_children())[:-1]:
        if not isinstance(layer, nn.Linear):
            continue
        rows = []
        for row in x:
            hidden = model[: int(place) + 1](row).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(model[int(place) + 1 :](hidden).sum(), hidden)
            rows.append(gradient)
        gradients, weight = torch.stack(rows), layer.weight.detach()
        nfm, agop = weight.T @ weight, weight.T @ gradients.T @ gradients @ weight
        found[place] = float((nfm * agop).sum() / nfm.norm() / agop.norm())
    return found


def moved(model: nn.Module, start: nn.Module) -> dict[str, float]:
    pairs = zip(model.named_parameters(), start.parameters(), strict=True)
    return {name: float((p - s).detach().norm()) for (name, p), s in pairs}


def fixed(values: Mapping[str, float]) -> Callable[[nn.Module, Any], Mapping[str, float]]:
    return lambda model, probe: values


def test_hidden_correlations_are_the_definition_and_leave_out_the_readout():
    model, (x, _) = network(), task()
    found = hidden_correlations(model, x)
    assert list(found) == ["0", "2", "4"]
    assert found == pytest.approx(uncentered(model, x), rel=1e-10)


def test_the_layer_that_is_behind_is_driven_and_all_else_held_back():
    model = network(biased=True)
    start = copy.deepcopy(model)
    optimizer = AdaptiveSLO(model, None, 0.1, boost=8.0, eps=0.0, measure=fixed({"0": 0.9, "2": 0.3, "4": 0.5}))
    backward(model, optimizer)
    optimizer.step()
    expected = dict.fromkeys(dict(model.named_parameters()), 0.1 / 8) | {"2.weight": 0.8}
    assert moved(model, start) == pytest.approx(expected, rel=1e-12)
    assert {group["name"]: group["speed"] for group in optimizer.param_groups}["2.weight"] == 8.0


def test_the_step_is_eps_plus_the_norm():
    model = network()
    start = copy.deepcopy(model)
    optimizer = AdaptiveSLO(model, task()[0], 0.05)
    backward(model, optimizer)
    sizes = {name: float(p.grad.norm()) for name, p in model.named_parameters()}  # type: ignore[union-attr]
    correlations = uncentered(model, task()[0])
    behind = min(correlations, key=lambda name: correlations[name])
    optimizer.step()
    expected = {
        name: 0.05 * (20.0 if name == f"{behind}.weight" else 1 / 20) * size / (0.01 + size)
        for name, size in sizes.items()
    }
    assert moved(model, start) == pytest.approx(expected, rel=1e-12)


def test_measuring_leaves_the_gradients_as_they_are():
    model, reference = network(), network()
    optimizer = AdaptiveSLO(model, task()[0], 0.1, boost=1.0, eps=0.01)  # the same speed for all
    plain = SLO(reference.parameters(), 0.1, eps=0.01)
    for _ in range(3):
        backward(model, optimizer)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
        backward(reference, plain)
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_an_undefined_correlation_is_passed_over():
    model = network()
    optimizer = AdaptiveSLO(model, None, 0.1, measure=fixed({"0": math.nan, "2": 0.3, "4": math.nan}))
    backward(model, optimizer)
    optimizer.step()
    assert [group["speed"] for group in optimizer.param_groups] == [1 / 20, 20.0, 1 / 20, 1 / 20]
    optimizer.measure = fixed({"0": math.nan})
    optimizer.step()
    assert [group["speed"] for group in optimizer.param_groups] == [1 / 20] * 4


def test_a_readout_of_zero_starts_slowly_and_then_layers_are_driven():
    """No gradient reaches the hidden layers at first: every correlation is nan."""
    model = network()
    nn.init.zeros_(model[-1].weight)
    optimizer = AdaptiveSLO(model, task()[0], 0.1)
    speeds = []
    for _ in range(2):
        backward(model, optimizer)
        optimizer.step()
        speeds.append([group["speed"] for group in optimizer.param_groups])
    assert speeds[0] == [1 / 20] * 4
    assert sorted(speeds[1]) == [1 / 20] * 3 + [20.0]


def test_it_measures_every_so_many_steps():
    calls = []

    def measure(model: nn.Module, probe: Any) -> dict[str, float]:
        calls.append(torch.is_grad_enabled())
        return {"0": float(len(calls)), "2": 1.5}

    model = network()
    optimizer = AdaptiveSLO(model, None, 0.01, every=3, measure=measure)
    driven = []
    for _ in range(7):
        backward(model, optimizer)
        optimizer.step()
        driven.append(next(group["name"] for group in optimizer.param_groups if group["speed"] > 1))
    assert calls == [True] * 3
    assert driven == ["0.weight"] * 3 + ["2.weight"] * 4


def test_resuming_from_a_state_dict_goes_on_bit_for_bit():
    def built() -> tuple[nn.Module, AdaptiveSLO]:
        model = network(biased=True)
        return model, AdaptiveSLO(model, task()[0], 0.02, every=3)

    def train(model: nn.Module, optimizer: AdaptiveSLO) -> None:
        for _ in range(5):
            backward(model, optimizer)
            optimizer.step()

    model, optimizer = built()
    train(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer)
    again, resumed = built()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.param_groups[0]["steps"] == 5  # the next measurement is one step away
    train(again, resumed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_schedulers_and_closures():
    model = network()
    optimizer = AdaptiveSLO(model, task()[0], 0.1, boost=4.0, eps=0.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    longest = []
    for _ in range(3):
        start = copy.deepcopy(model)
        loss = optimizer.step(lambda: backward(model, optimizer))
        assert loss is not None
        assert float(loss.detach()) > 0
        scheduler.step()
        longest.append(max(moved(model, start).values()))
    assert longest == pytest.approx([0.4, 0.2, 0.1], rel=1e-12)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, bias=False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.normed(self.attention(x, x, x, need_weights=False)[0]))).mean(1)


def test_projections_that_share_a_tensor_and_parametrized_weights_are_found():
    model = Attention().double()
    x = torch.randn(6, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    names = list(hidden_correlations(model, x))
    assert {"attention.q", "attention.k", "attention.v", "attention.out_proj", "normed"} <= set(names)
    for layer, expected in {
        "attention.q": {"attention.in_proj_weight"},
        "attention.out_proj": {"attention.out_proj.weight"},
        "normed": {f"normed.parametrizations.weight.original{i}" for i in (0, 1)},
    }.items():
        optimizer = AdaptiveSLO(model, x, 0.1, measure=fixed(dict.fromkeys(names, 1.0) | {layer: 0.0}))
        model(x).sum().backward()
        optimizer.step()
        assert {group["name"] for group in optimizer.param_groups if group["speed"] > 1} == expected


def test_options_reach_the_measurement():
    model = network((4, 9, 7, 5, 3))
    x, _ = task()
    measure = partial(hidden_correlations, outputs=1)
    assert measure(model, x) != hidden_correlations(model, x)
    optimizer = AdaptiveSLO(model, x, 0.1, measure=measure)
    model(x).sum().backward()
    optimizer.step()


MODEL = network()
REFUSED: list[tuple[Callable[[], Any], type, str]] = [
    (lambda: AdaptiveSLO(MODEL.parameters(), None, 0.1), TypeError, "model is generator, expected an nn.Module"),
    (lambda: AdaptiveSLO(MODEL, None, -0.1), ValueError, "lr is -0.1"),
    (lambda: AdaptiveSLO(MODEL, None, 0.1, eps=-0.1), ValueError, "eps is -0.1"),
    (lambda: AdaptiveSLO(MODEL, None, 0.1, boost=0.5), ValueError, "boost is 0.5, expected a number >= 1"),
    (lambda: AdaptiveSLO(MODEL, None, 0.1, boost="20"), TypeError, "boost is '20', expected a number"),
    (lambda: AdaptiveSLO(MODEL, None, 0.1, boost=math.nan), ValueError, "boost is nan"),
    (lambda: AdaptiveSLO(MODEL, None, 0.1, every=0), ValueError, "every is 0"),
    (lambda: AdaptiveSLO(MODEL, None, 0.1, every=2.0), ValueError, "every is 2.0"),
    (lambda: AdaptiveSLO(nn.ReLU(), None, 0.1), ValueError, "no trainable parameters"),
    (lambda: AdaptiveSLO(MODEL, None, 0.1).add_param_group({"params": [torch.ones(2)]}), ValueError, "its 'name'"),
    (lambda: AdaptiveSLO(MODEL, None, 0.1, measure=fixed({})).step(), ValueError, "no hidden layer was measured"),
    (lambda: AdaptiveSLO(MODEL, None, 0.1, measure=fixed({"9": 0.1})).step(), ValueError, "'9', has no trainable"),
    (lambda: AdaptiveSLO(nn.Linear(4, 1).double(), task()[0], 0.1).step(), ValueError, "no hidden layer"),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_wrong_input_is_refused(call: Callable[[], Any], kind: type, words: str):
    with pytest.raises(fl.FeatlearnError, match=words) as failure:
        call()
    assert isinstance(failure.value, kind)
