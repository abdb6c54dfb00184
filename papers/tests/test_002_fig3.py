"""002 Fig. 3: its numbers against slow ones, and claims that must fail."""

import numpy
import pytest
import torch
from scipy.integrate import solve_ivp

import featlearn as fl
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_002 import fig3

SETUP = fig3.Setup(samples=12, inputs=5, width=9, sigmas=(0.1, 0.05), lr=0.02, moments=40, scales=(0.05, 0.02, 0.01))


@pytest.fixture(scope="module")
def numbers():
    found = fig3.measure(SETUP, Context(seed=0, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def verdicts(numbers):
    return {claim.id: claim for claim in fig3.claims(SETUP, Runs([0], [numbers]))}


def test_the_networks_follow_the_flow_of_their_weights(numbers):
    """Against an integration of the same weights: descent differs by its step."""
    X, y, _ = fig3.task(SETUP, Context(seed=0, folder=None).generator())
    model = fig3.MLP(
        5,
        None,
        width=9,
        hidden_layers=2,
        activation="linear",
        weight_variance=0.01,
        generator=Context(seed=0, folder=None).generator(1),
    ).double()
    weights = [weight.detach() for weight in model.parameters()]
    path = fl.theory.deep_linear.flow(weights, X, y, times=torch.as_tensor(numbers["times"][0]), rate=1 / 12)
    distance = abs(numbers["loss"][0] - (path.loss / y.square().sum()).numpy()).max()
    assert distance < 1.6 * SETUP.lr  # of first order in the step: 1.2 lr


@pytest.mark.parametrize(("depth", "sigma"), [(3, 0.05), (4, 0.1)])
def test_the_time_of_a_mode_is_that_of_the_integrated_equation(depth, sigma):
    """du/dt = u^(L-1) (1 - u^L), until the loss is half of what it was."""
    half = lambda _, u: (1 - u[0] ** depth) ** 2 - (1 - sigma**depth) ** 2 / 2  # noqa: E731
    half.terminal = True
    run = solve_ivp(lambda _, u: u ** (depth - 1) * (1 - u**depth), (0, 1e4), [sigma], events=half, rtol=1e-9)
    assert fig3.chain_half_time(sigma, depth, 0.01) == pytest.approx(run.t_events[0][0], rel=0.01)
    assert float(fl.theory.deep_linear.half_time(1.0, sigma**depth, depth)) == pytest.approx(
        run.t_events[0][0], rel=1e-3
    )


def test_the_cosine_is_that_of_the_matrices():
    generator = torch.Generator().manual_seed(3)
    W, beta = (
        torch.randn(4, 3, generator=generator, dtype=torch.float64),
        torch.randn(3, generator=generator, dtype=torch.float64),
    )
    beta /= beta.norm()
    A, B = W.T @ W, torch.outer(beta, beta)
    assert fig3.first_cosine(W, beta) == pytest.approx(float((A * B).sum() / A.norm() / B.norm()), rel=1e-12)


def test_claims_fail_on_numbers_that_break_them(numbers):
    good = verdicts(numbers)
    assert [id for id, claim in good.items() if not claim.holds] == ["prefactor-printed"]
    assert good["prefactor-printed"].known is not None
    late = numbers | {"cosine": numpy.linspace(0, 0.9, SETUP.moments + 1) ** 4 * numpy.ones((2, 1))}
    assert not verdicts(late)["turns"].holds
    assert not verdicts(late)["alignment-first"].holds
    turned = numbers | {"loss": numbers["loss"][::-1], "times": numbers["times"][::-1]}
    assert not verdicts(turned)["later-for-smaller"].holds
    assert not verdicts(turned)["learning-power"].holds
    never = verdicts(numbers | {"loss": numpy.ones_like(numbers["loss"])})
    assert not never["learning-power"].holds
    assert not never["alignment-first"].holds
    assert not verdicts(numbers | {"exact": numbers["exact"][::-1]})["power-3"].holds
