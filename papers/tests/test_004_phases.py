"""The phase diagrams of 004 against networks one by one, closed forms, and made-up numbers."""

import numpy
import pytest
import torch

import featlearn as fl
from featlearn.theory import phases
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_004 import phase_rate, phase_scalings, phase_width
from papers.tests.verdicts import failing


def rate_task():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    weights = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 4), (6, 6), (3, 6))]
    return weights, x, y


def test_networks_side_by_side_are_scale_output_one_by_one():
    weights, x, y = rate_task()
    gammas, rates = torch.tensor([0.5, 3.0, 0.5, 40.0]), torch.tensor([1e-4, 1e-3, 3.0, 0.3])
    found = phase_rate.losses_left(weights, gammas, rates, x, y, 20)
    for gamma, rate, left in zip(gammas.tolist(), rates.tolist(), found.tolist(), strict=True):
        layers = [torch.nn.Linear(w.shape[1], w.shape[0], bias=False).double() for w in weights]
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight.data.copy_(weight)
        network = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
        model = fl.steer.scale_output(network, 1 / gamma)
        optimizer, losses = torch.optim.SGD(network.parameters(), lr=rate), []
        for _ in range(21):
            loss = (model(x) - y).square().sum(1).mean()
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        expected = losses[-1] / losses[0] if max(losses) <= 1.001 * losses[0] else numpy.nan
        assert left == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert found.isnan().tolist() == [False, False, True, False]


def test_the_largest_stable_rate_of_a_lazy_network_is_that_of_its_hessian(tmp_path):
    setup = phase_rate.Setup(
        data="digits",
        samples=8,
        pooling=2,
        width=20,
        layers=(2,),
        gammas=(0.003, 0.01),
        rates=tuple(10 ** (i / 2) for i in range(-14, 1)),
        steps=300,
        halvings=6,
    )
    limit = phase_rate.measure(setup, Context(seed=0, folder=tmp_path))["limit"][0].double().numpy()
    assert limit / numpy.array(setup.gammas) ** 2 == pytest.approx([1, 1], rel=0.06)


def test_a_boundary_outside_the_rates_is_not_a_number(tmp_path):
    setup = phase_rate.Setup(
        data="digits", samples=6, pooling=2, width=8, layers=(2,), gammas=(1.0,), rates=(1e-4, 1e-3), steps=5
    )
    assert phase_rate.measure(setup, Context(seed=0, folder=tmp_path))["limit"].isnan().all()


def test_rate_claims_fail_on_other_exponents():
    setup = phase_rate.Setup()
    gammas = numpy.array(setup.gammas)
    limit = numpy.stack([numpy.where(gammas < 10, gammas**2, 100 * (gammas / 10) ** (2 / n)) for n in setup.layers])

    def verdict(i=None, power=None, lazy=True):
        changed = limit.copy()
        if i is not None:
            rows = setup.chosen(lazy)
            changed[i, rows] *= gammas[rows] ** power
        return failing(phase_rate, setup, Runs([0], [{"limit": changed}]))

    assert verdict() == []
    assert verdict(1, 0.2, lazy=False) == ["rich-3"]
    assert verdict(2, 0.3, lazy=False) == ["rich-4", "order"]
    assert verdict(0, 0.15) == ["lazy-2", "limit"]


def test_the_boundary_of_a_map_is_found_between_its_cells():
    setup = phase_width.Setup()
    task = setup.tasks[0]
    widths = numpy.array(task.widths)
    gaps = numpy.minimum(1.0, 0.1 * numpy.array(setup.gammas) / (widths[:, None] / 32) ** 0.5)[None]
    found = 10 ** phase_width.boundary(setup, gaps)[0]
    assert found == pytest.approx(3 * (widths / 32) ** 0.5)  # where the gap is 0.3
    assert phase_width.boundary_exponent(setup, task, gaps) == pytest.approx([0.5])
    assert numpy.isnan(phase_width.boundary(setup, numpy.zeros_like(gaps) + 0.01)).all()


def test_width_claims_fail_on_other_maps():
    setup = phase_width.Setup()
    good = {}
    for task in setup.tasks:
        ratio = numpy.array(setup.gammas) / (numpy.array(task.widths)[:, None] / task.widths[0]) ** 0.5
        good[f"{task.network}/gap"] = numpy.minimum(1.0, 0.1 * ratio)
        good[f"{task.network}/left"] = numpy.full(ratio.shape, 0.05)

    def verdict(**changes):
        return failing(phase_width, setup, Runs([0], [good | changes]))

    assert verdict() == []
    flat = numpy.tile(good["cnn/gap"][:1], (4, 1))
    assert verdict(**{"cnn/gap": flat}) == ["cnn-boundary"]
    assert verdict(**{"mlp/gap": good["mlp/gap"] + 0.15})[-1] == "mlp-lazy"
    assert verdict(**{"mlp/gap": good["mlp/gap"] * 0.6}) == ["mlp-rich"]
    assert verdict(**{"mlp/left": good["mlp/left"] * 3}) == ["mlp-trained"]


def test_a_lazy_network_has_no_gap(tmp_path):
    setup = phase_width.Setup()
    task = phase_width.Task(network="mlp", data="digits", pooling=2, widths=(200,), samples=6)
    context = Context(seed=0, folder=tmp_path)
    x, y = phase_width.two_classes(task, context)
    assert sorted(y.tolist()) == [-1, -1, -1, 1, 1, 1]
    gap, left = phase_width.trained(setup, task, 200, 0.01, 0, x, y, context)
    assert gap < 0.01
    assert left <= task.end


EXPECTED = {"ntk": -1.0, "mean_field": 0.0, "xavier": 0.0, "kaiming": -2.0, "lazy": -1.0}


def test_exponents_of_the_motion_are_those_of_orders_of_magnitude():
    """Random sums with numbers of the sizes that the exponents say."""
    xavier = phases.TABLE_1["xavier"].kernel.exponents
    for exponents, expected in [
        *((phase_scalings.stable(name), power) for name, power in EXPECTED.items()),
        (xavier, -1.5),
    ]:
        assert phase_scalings.motion_exponent(exponents) == pytest.approx(expected)
        moved = [typical_motion(exponents, kappa) for kappa in (10.0**3, 10.0**5)]
        assert numpy.log10(moved[1] / moved[0]) / 2 == pytest.approx(expected, abs=0.1)


def typical_motion(e: phases.Exponents, kappa: float) -> float:
    """|K - K0| / K0 for one step of a linear unit: root mean square over the signs of independent u_i and h_i."""
    d, gamma, u2, h2, rate_u, rate_w = (kappa**power for power in (e.d, e.gamma, e.u, e.w, e.rate_u, e.rate_w))
    kernel = gamma**2 * d * (rate_u * h2 + rate_w * u2)
    first = 4 * gamma**3 * rate_u * rate_w * (d * u2 * h2) ** 0.5
    second = gamma**4 * rate_u * rate_w * d * (rate_w * u2 + rate_u * h2)
    return (first**2 + second**2) ** 0.5 / kernel


def test_scaling_claims_fail_on_other_slopes():
    setup = phase_scalings.Setup()
    kappas, sigmas = numpy.array(setup.kappas), numpy.array(setup.sigmas)
    good = {
        "swish": numpy.stack([0.3 * kappas**power for power in EXPECTED.values()]),
        "relu": numpy.ones((5, 6)),
        "swish/left": numpy.zeros((5, 6)),
        "relu/left": numpy.zeros((5, 6)),
        "map": 0.1 * (sigmas[:, None] ** 2 * kappas) ** -2.0,
    }

    def verdict(**changes):
        return failing(phase_scalings, setup, Runs([0], [good | changes]))

    assert verdict() == []
    for i, scaling in enumerate(EXPECTED):
        changed = good["swish"].copy()
        changed[i] *= kappas**0.3
        assert verdict(swish=changed) == [f"slope-{scaling.replace('_', '-')}"]
    assert verdict(map=0.1 * (sigmas[:, None] ** 2 * kappas**0.5) ** -2.0) == ["boundary"]
    assert verdict(**{"relu/left": numpy.full((5, 6), 0.6)}) == ["learned"]


def test_kernel_motion_is_relative_and_zero_without_training():
    setup = phase_scalings.Setup(steps=3)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 5, generator=generator, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(5, 1, bias=False), torch.nn.Flatten(0)).double()
    moved, left = phase_scalings.motion(model, torch.optim.SGD(model.parameters(), lr=0.05), x, y, setup)
    assert moved == 0  # the kernel of a linear model is that of its inputs
    assert 0 < left < 10
