"""Scalings of 004 Table 1 with the settings of App. B.3."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.steer import parametrize
from featlearn.steer.parametrization import SCHEMES
from featlearn.theory.phases import Exponents, Phase, classify


def network(width: int, hidden: int = 1, bias: bool = False) -> nn.Sequential:
    sizes = [6, *[width] * hidden, 1]
    layers: list[nn.Module] = []
    for n, m in pairwise(sizes):
        layers += [nn.Linear(n, m, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def built(width: int, scheme, hidden: int = 1, seed: int = 0, **options):
    return parametrize(network(width, hidden), scheme, 0.05, generator=torch.Generator().manual_seed(seed), **options)


# (output times, rate), App. B.3 with the erratum of kaiming-
PAPER = {
    "ntk": (lambda d: d**-0.5, lambda d: 0.05),
    "mean_field": (lambda d: 10 / d, lambda d: 0.05 * d / 100),
    "kaiming+": (lambda d: 100 / d, lambda d: 0.05 * d / 100),
    "kaiming-": (lambda d: 1.0, lambda d: 0.05 * 100 / d),
    "xavier+": (lambda d: 1.0, lambda d: 0.05),
    "xavier-": (lambda d: 0.01 * d, lambda d: 0.05 * (100 / d) ** 2),
    "lazy": (lambda d: 0.01 * d, lambda d: 0.05 * (100 / d) ** 2),
}
VARIANCES = {
    "ntk": (lambda d: 2 / 6, lambda d: 1.0),
    "mean_field": (lambda d: 2 / 6, lambda d: 1.0),
    "kaiming": (lambda d: 2 / 6, lambda d: 2 / d),
    "xavier": (lambda d: 2 / (6 + d), lambda d: 2 / (d + 1)),
    "lazy": (lambda d: 2 / 6, lambda d: 2 / d),
}


@pytest.mark.parametrize("width", [100, 700])
@pytest.mark.parametrize("scheme", PAPER)
def test_the_settings_are_those_of_the_paper(scheme: str, width: int):
    model, groups = built(width, scheme)
    scale, rate = PAPER[scheme]
    assert math.isclose(model.factor, scale(width), rel_tol=1e-12)
    assert [group["name"] for group in groups] == ["0", "2"]
    assert all(math.isclose(group["lr"], rate(width), rel_tol=1e-12) for group in groups)
    for layer, variance in zip((model.network[0], model.network[2]), VARIANCES[scheme.rstrip("+-")], strict=True):
        spread = 4 * (2 / layer.weight.numel()) ** 0.5
        assert abs(float(layer.weight.detach().square().mean()) / variance(width) - 1) < spread


@pytest.mark.parametrize("pair", [("ntk", "mean_field"), ("kaiming+", "kaiming-"), ("xavier+", "xavier-")])
def test_pairs_coincide_at_the_base_width(pair: tuple[str, str]):
    x = torch.randn(5, 6, dtype=torch.float64)
    (one, first), (other, second) = (built(48, scheme, base_width=48) for scheme in pair)
    torch.testing.assert_close(one(x), other(x), rtol=1e-12, atol=1e-14)
    assert [g["lr"] for g in first] == [g["lr"] for g in second]


@pytest.mark.parametrize(
    ("scheme", "hidden"), [*((name, 1) for name in PAPER if name != "lazy"), ("ntk", 3), ("mean_field", 3)]
)
def test_the_kernel_of_the_first_step_has_the_power_of_the_theory(scheme: str, hidden: int):
    """Its trace, rates inside, grows as kappa^B; B = 0 for every stable scheme."""
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    traces = []
    for width in (100, 1600) if hidden == 1 else (50, 800):
        networks = [built(width, scheme, hidden, seed) for seed in range(4)]
        kernels = [fl.ntk(model, x, optimizer=torch.optim.SGD(groups)) for model, groups in networks]
        traces.append(sum(float(kernel.trace()) for kernel in kernels))
    exponents = SCHEMES[scheme].exponents
    assert exponents.kernel_term == 0
    power = math.log(traces[1] / traces[0]) / math.log(16)
    # xavier: 2 / (6 + d) is not yet its power law
    assert abs(power) < 0.12


def relative_change(model: nn.Module, groups: list[dict], steps: int) -> float:
    """Of the kernel, after descending on a small regression problem; by its loss, training got somewhere."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    y = 3 * torch.sign(x[:, :1])  # large against the output at the start
    before = fl.ntk(model, x)
    optimizer = torch.optim.SGD(groups)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.2
    return float((fl.ntk(model, x) - before).norm() / before.norm())


@pytest.mark.parametrize("hidden", [1, 2])
def test_kernels_stay_in_the_kernel_phase_and_move_in_the_learning_phase(hidden: int):
    widths = (64, 512) if hidden == 1 else (64, 256)
    changes = {
        scheme: [
            sum(relative_change(*built(width, scheme, hidden, seed, base_width=16), 200) for seed in range(3))
            for width in widths
        ]
        for scheme in ("ntk", "mean_field")
    }
    # as 1 / sqrt(width), against a constant
    assert changes["ntk"][1] < 0.7 * changes["ntk"][0]
    assert changes["mean_field"][1] > 0.6 * changes["mean_field"][0]
    assert changes["mean_field"][1] > 2 * changes["ntk"][1]


def test_names_and_phases_agree():
    for name, scheme in SCHEMES.items():
        learning = name in ("mean_field", "kaiming+", "xavier+")
        assert classify(scheme.exponents) == (Phase.LEARNING if learning else Phase.KERNEL)


def test_own_exponents():
    exponents = Exponents(d=1, gamma=-0.75, u=0.5, w=-0.25, rate_u=0.3, rate_w=-0.6)
    model, groups = built(400, exponents, base_width=50)
    assert math.isclose(model.factor, 8**-0.75)
    assert [group["lr"] for group in groups] == pytest.approx([0.05 * 8**-0.6, 0.05 * 8**0.3])
    w, u = model.network[0].weight.detach(), model.network[2].weight.detach()
    assert abs(float(w.square().mean()) / (8**-0.25 / 6) - 1) < 4 * (2 / w.numel()) ** 0.5
    assert abs(float(u.square().mean()) / (8**0.5 / 50) - 1) < 4 * (2 / u.numel()) ** 0.5


def test_layers_in_between_get_the_rate_of_weights_of_order_one():
    _, groups = built(200, "mean_field", hidden=3)
    assert [group["lr"] for group in groups] == pytest.approx([0.1, 0.05, 0.05, 0.1])
    _, groups = built(200, "lazy", hidden=2, kappa=10.0)
    assert [group["lr"] for group in groups] == pytest.approx([0.0005] * 3)


def test_lazy_is_centered_and_kappa_says_how_lazy():
    model, _ = built(30, "lazy", kappa=50.0)
    assert float(model(torch.ones(2, 6, dtype=torch.float64)).detach().abs().max()) == 0
    assert math.isclose(model.factor, 50)


def test_biases_start_at_zero_and_every_parameter_is_in_a_group():
    model = nn.Sequential(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, 3))
    scaled, groups = parametrize(model, "mean_field", 0.1)
    assert float(model[0].bias.abs().max()) == float(model[4].bias.abs().max()) == 0
    grouped = {id(p) for group in groups for p in group["params"]}
    assert grouped == {id(p) for p in scaled.parameters() if p.requires_grad}


# (rate of first, hidden, last weights and of hidden biases) at kappa = 4, Yang et al. 2022, Table 3
MUP_RATES = {"sgd": (0.2, 0.05, 0.0125, 0.2), "adam": (0.05, 0.0125, 0.0125, 0.05)}


@pytest.mark.parametrize("optimizer", MUP_RATES)
def test_mup_has_the_powers_of_its_table(optimizer: str):
    net = network(192, hidden=2, bias=True)
    model, groups = parametrize(net, "mup", 0.05, base_width=48, optimizer=optimizer)
    assert model.factor == 1
    rates = {group["name"]: group["lr"] for group in groups}
    first, hidden, last, vector = MUP_RATES[optimizer]
    assert rates == pytest.approx(
        {"0": first, "0.bias": vector, "2": hidden, "2.bias": vector, "4": last, "4.bias": 0.05}
    )
    for layer, variance in ((net[0], 2 / 6), (net[2], 2 / 192), (net[4], 2 / (192 * 4))):
        spread = 4 * (2 / layer.weight.numel()) ** 0.5
        assert abs(float(layer.weight.detach().square().mean()) / variance - 1) < spread
    grouped = [p for group in groups for p in group["params"]]
    assert len(grouped) == 6
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}


def test_mup_is_fan_in_scaling_with_one_rate_at_the_base_width():
    (one, first), (other, second) = (built(48, scheme, base_width=48) for scheme in ("mup", "kaiming+"))
    x = torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(one(x), other(x), rtol=1e-12, atol=1e-14)
    assert [g["lr"] for g in first] == [g["lr"] for g in second]


@pytest.mark.parametrize("optimizer", MUP_RATES)
def test_the_width_check_finds_mup_and_nothing_wrong_with_it(optimizer: str):
    x = torch.randn(10, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = fl.width_check(
        lambda width: parametrize(network(width, hidden=3, bias=True), "mup", 0.01, optimizer=optimizer),
        (x, x[:, :1] * x[:, 1:2]),
        widths=(32, 64, 128, 256),
        seeds=2,
        steps=3,
        optimizer=torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam,
    )
    assert (found.scheme, found.phase, found.problems) == ("mup", Phase.LEARNING, ())


@pytest.mark.parametrize("scheme", ["ntk", "mean_field"])
def test_the_width_check_tells_the_schemes_apart(scheme: str):
    x = torch.randn(10, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = fl.width_check(
        lambda width: parametrize(network(width, hidden=3), scheme, 0.01),
        (x, x[:, :1]),
        seeds=2,
        steps=3,
        widths=(32, 64, 128, 256),
        optimizer=torch.optim.SGD,
    )
    phase = Phase.KERNEL if scheme == "ntk" else Phase.LEARNING
    assert (found.scheme, found.phase, found.problems) == (scheme, phase, ())


def test_adam_is_refused_where_the_theory_is_that_of_gradient_descent():
    with pytest.raises(fl.errors.InputValueError, match="'adam' with 'mup'"):
        parametrize(network(10), "ntk", 0.1, optimizer="adam")
    with pytest.raises(fl.errors.InputValueError, match="optimizer='lion'"):
        parametrize(network(10), "mup", 0.1, optimizer="lion")


def test_what_has_no_phase_is_refused():
    with pytest.raises(fl.errors.InputValueError, match=r"did you mean 'kaiming\+'|did you mean 'kaiming-'"):
        parametrize(network(10), "kaiming", 0.1)
    with pytest.raises(fl.errors.InputTypeError, match="Exponents"):
        parametrize(network(10), 3, 0.1)
    with pytest.raises(fl.errors.InputValueError, match="1 weight layers"):
        parametrize(nn.Linear(3, 1), "ntk", 0.1)
    with pytest.raises(fl.errors.InputValueError, match="BatchNorm1d"):
        parametrize(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)), "ntk", 0.1)
    with pytest.raises(fl.errors.InputValueError, match="3 weight layers, expected two"):
        parametrize(network(10, hidden=2), "kaiming+", 0.1)
    with pytest.raises(fl.errors.InputValueError, match="lr="):
        parametrize(network(10), "ntk", 0.0)
    with pytest.raises(fl.errors.InputValueError, match="kappa"):
        parametrize(network(10), "ntk", 0.1, kappa=-1.0)
