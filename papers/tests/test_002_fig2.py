"""002 Fig. 2: its ellipses against the closed form and against gradient flow, and claims that must fail."""

import numpy
import pytest
import torch

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_002 import fig2, phases
from papers.tests.verdicts import failing

SETUP = phases.Setup(samples=5, inputs=8, width=90, lr=0.02, time=12.0, moments=30)


@pytest.fixture(scope="module")
def numbers():
    found = phases.measure(SETUP, Context(seed=0, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def test_all_points_of_the_line_interpolate_and_the_nearest_is_the_solution():
    given = phases.task(SETUP, Context(seed=0, folder=None).generator())
    beta, across = given.plane
    assert torch.allclose(given.plane @ given.plane.T, torch.eye(2, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(given.X @ (beta + 0.7 * across), given.y)
    assert torch.allclose(fl.theory.deep_linear.minimum_norm(given.X, given.y), beta)
    assert torch.allclose(given.covariance @ given.covariance, given.covariance, atol=1e-12)


def test_the_network_follows_gradient_flow(numbers):
    """The function and M = W^T W + |a|^2, from weights that are integrated and not stepped."""
    context = Context(seed=0, folder=None)
    given = phases.task(SETUP, context.generator())
    model = MLP(
        8,
        None,
        width=90,
        hidden_layers=1,
        activation="linear",
        weight_variance=SETUP.sigma**2,
        generator=context.generator(1),
    ).double()
    weights = [weight.detach().clone() for weight in model.parameters()]
    times = torch.tensor([0.0, 2.0, 12.0], dtype=torch.float64)
    path = fl.theory.deep_linear.flow(weights, given.X, given.y, times=times, rate=1 / SETUP.samples)
    for i, step in enumerate((0, 5, 30)):
        W, a = path.layers[0][i], path.layers[1][i, 0]
        inverse = torch.linalg.inv(W.T @ W + a.square().sum() * torch.eye(8, dtype=torch.float64))
        block = given.plane @ inverse @ given.plane.T
        assert numbers["form"][step] == pytest.approx((block / block[0, 0]).numpy(), rel=1e-2, abs=2e-3)
        assert numbers["position"][step] == pytest.approx((given.plane @ W.T @ a).numpy(), rel=0.06, abs=2e-4)


def test_ellipses_end_with_axes_in_the_ratio_of_the_paper(numbers):
    """M = beta beta^T + 1 has the norm w_1^2 / 2 + w_2^2."""
    assert numbers["form"][-1] == pytest.approx(numpy.diag([1.0, 2.0]), abs=2e-3)
    assert phases.elongation(numbers["form"][-1]) == pytest.approx(2**0.5, abs=1e-3)
    form = numpy.array([[1.0, 0.3], [0.3, 2.0]])
    points = numpy.stack(phases.ellipse(form, 0.7))
    assert numpy.einsum("ip,ij,jp->p", points, form, points) == pytest.approx(numpy.full(49, 0.49))


def test_claims_fail_on_numbers_that_break_them(numbers):
    def verdict(**changes):
        return set(failing(fig2, SETUP, Runs([0], [numbers | changes]))) - {"round", "second-phase-printed"}

    assert verdict() == set()
    still = numpy.repeat(numbers["form"][:1], 31, axis=0) + numpy.linspace(0, 1, 31)[:, None, None] * numpy.eye(2)
    assert {"turning-time", "scale-only", "theory"} <= verdict(form=still)
    early = numbers["position"][::-1]
    assert {"silent", "solution"} <= verdict(position=early)
    assert verdict(loss=numbers["loss"] ** 0.001) >= {"second-phase"}
    assert verdict(along=numpy.full(31, 0.3)) == {"power"}
    round_at_first = numbers["form"].copy()
    round_at_first[0] = numpy.eye(2)
    assert "round" not in failing(fig2, SETUP, Runs([0], [numbers | {"form": round_at_first}]))
