"""002 Fig. H.1: modes and their times against closed forms, and claims that must fail."""

import numpy
import pytest
import torch

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_002 import figH1
from papers.tests.verdicts import failing

SETUP = figH1.Setup(data="digits", samples=60, pooling=2, width=13, scale=1e-3, lr=0.5, moments=20)
CONTEXT = Context(seed=0, folder=None)


@pytest.fixture(scope="module")
def given():
    return figH1.task(SETUP, CONTEXT)


def test_inputs_are_white_and_modes_are_those_of_the_least_squares_fit(given):
    P, R = given.X.shape
    assert P == 60
    assert R <= 16
    assert torch.allclose(given.X.T @ given.X / P, torch.eye(R, dtype=torch.float64), atol=1e-9)
    fit = torch.linalg.lstsq(given.X, given.Y).solution.T
    assert torch.allclose((given.z * given.s) @ given.v, fit, atol=1e-9)


def test_a_two_layer_network_learns_its_modes_at_the_times_of_their_strengths(given):
    model = MLP(
        given.X.shape[1],
        10,
        width=150,
        hidden_layers=1,
        activation="linear",
        weight_variance=1e-4,
        generator=CONTEXT.generator(2),
    ).double()
    start = [weight.detach().clone() for weight in model.parameters()]
    c0 = figH1.initial_strength(start, given)
    W, a = start
    v, z = given.v[3], given.z[:, 3]
    q, r = ((W @ v) @ (W @ v) + (a.T @ z) @ (a.T @ z)) / 2, z @ a @ W @ v
    assert float(c0[3]) == pytest.approx(float(q + r) / 2)
    half = fl.theory.deep_linear.half_time(given.s, c0, 2)
    path = figH1.linear_path(start, given, torch.linspace(0, 3 * float(half.max()), 400, dtype=torch.float64))
    runs = Runs([0], [{"s": given.s.numpy(), **{f"linear2/{name}": value.numpy() for name, value in path.items()}}])
    found = figH1.mode_times(runs, "linear2")[0]
    assert found[:5] == pytest.approx(half[:5].numpy(), rel=0.05)
    assert path["loss"][0] == pytest.approx(1.0, abs=1e-3)
    assert path["loss"][-1] == pytest.approx(0.0, abs=1e-2)
    best = fl.theory.deep_linear.max_alignment(given.X, given.Y, 2)
    assert float(path["alignment"][-1]) == pytest.approx(float(best), abs=0.01)


def test_a_network_in_small_steps_follows_the_flow(given):
    """The linear case of what the tanh network does."""
    model = MLP(
        given.X.shape[1],
        10,
        width=13,
        hidden_layers=1,
        activation="linear",
        weight_variance=0.01,
        generator=CONTEXT.generator(2),
    ).double()
    start = [weight.detach().clone() for weight in model.parameters()]
    times = torch.linspace(0, 20, 21, dtype=torch.float64)
    flow = figH1.linear_path(start, given, times)
    stepped = figH1.stepped(model, given, times, figH1.Setup(lr=0.02, moments=20))
    assert torch.allclose(stepped["times"], times)
    assert torch.allclose(stepped["modes"], flow["modes"], atol=0.01)
    assert torch.allclose(stepped["kernel_times"], times[::10])
    assert torch.allclose(stepped["alignment"], flow["alignment"][::10], atol=0.01)
    assert torch.allclose(stepped["norm"], flow["norm"][::10], rtol=0.02)


def made_up(**changes):
    times, s = numpy.linspace(0, 100, 2001), numpy.linspace(0.3, 0.2, 10)
    numbers = {"s": s}
    for name, centers in (
        ("linear2", 4 / s),
        ("linear4", numpy.linspace(20, 70, 10)),
        ("tanh3", numpy.linspace(15, 70, 10)),
    ):
        speed = 1.0 if name == "linear2" else 6.0
        modes = s / (1 + numpy.exp(-speed * (times[:, None] - centers)))
        slow = numpy.clip(times / (4.0 if name == "linear2" else 90.0), 0.1, 1)
        numbers |= {
            f"{name}/times": times,
            f"{name}/kernel_times": times,
            f"{name}/modes": modes,
            f"{name}/alignment": slow,
            f"{name}/loss": ((s - modes) ** 2).sum(1) / (s**2).sum(),
            f"{name}/norm": slow,
            f"{name}/best": numpy.array(1.0),
            f"{name}/start": numpy.full(10, 1e-4),
        }
    # start such that the formula gives the times of the modes
    found = figH1.mode_times(Runs([0], [numbers]), "linear2")[0]
    numbers["linear2/start"] = s / (1 + numpy.exp(2 * s * found) / (2**0.5 - 1))
    return set(failing(figH1, SETUP, Runs([0], [numbers | changes])))


def test_claims_fail_on_numbers_that_break_them():
    known, times, s = {"mode-times-printed"}, numpy.linspace(0, 100, 2001), numpy.linspace(0.3, 0.2, 10)
    assert made_up() == known
    assert made_up(**{"linear2/best": numpy.array(0.8)}) == known | {"maximum"}
    assert made_up(**{"linear2/start": numpy.full(10, 1e-7)}) >= {"mode-times"}
    late = numpy.clip(times / 40, 0.1, 1)
    assert made_up(**{"linear2/alignment": late}) == known | {"silent", "less-silent"}
    merged = s / (1 + numpy.exp(-(times[:, None] - numpy.linspace(40, 41, 10))))
    together = {"linear4/modes": merged, "linear4/loss": ((s - merged) ** 2).sum(1) / (s**2).sum()}
    assert made_up(**together) >= {"apart-b", "drops-b"}
    assert made_up(**{"linear4/modes": s / (1 + numpy.exp(-6 * (times[:, None] - numpy.linspace(70, 20, 10))))}) >= {
        "by-size"
    }
