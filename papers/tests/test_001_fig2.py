"""001 Fig. 2: its numbers against plain training and plain OFE, and claims that must fail."""

import numpy
import pytest
import scipy.integrate
import torch

from featlearn.models import WideResNet
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_001 import fig2

SETUP = fig2.Setup(data="digits", samples=6, k=0.2, b=1, gammas=(0.5, 2.0), steps=7, growth=1.6)
P = 6


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    found = fig2.measure(SETUP, Context(seed=2, folder=tmp_path_factory.mktemp("seed")))
    return {name: as_array(values, name) for name, values in found.items()}


def plain(gamma):
    """Gradient descent on P^-1 sum (y - (f - f0)/gamma)^2 by Jacobians in double: outputs, kernels of f, rate."""
    context = Context(seed=2, folder=None)
    x, y = (each.double() for each in fig2.task(SETUP, context))
    model = WideResNet(0.2, 1, inputs=1, parametrization="ntk", generator=context.generator(1)).double()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def network(these):
        return torch.func.functional_call(model, these, (x,))

    start, outputs, kernels, rate = network(weights), [], [], None
    for step in range(SETUP.steps + 1):
        jacobian = torch.func.jacrev(network)(weights)
        rows = torch.cat([each.flatten(1) for each in jacobian.values()], 1)
        kernel, g = rows @ rows.T, (network(weights) - start) / gamma
        rate = SETUP.speed / torch.linalg.eigvalsh(kernel)[-1] if rate is None else rate
        if step in SETUP.moments:
            outputs.append(g)
            kernels.append(kernel)
        # with eta = eta0 gamma^2 and rate = 2 eta0 / P: theta moves by -rate gamma J^T (g - y)
        change = rate * gamma * rows.T @ (g - y)
        parts = change.split([weight.numel() for weight in weights.values()])
        weights = {name: w - part.view_as(w) for (name, w), part in zip(weights.items(), parts, strict=True)}
    return torch.stack(outputs).numpy(), torch.stack(kernels).numpy(), float(rate), y.numpy()


def aligned(kernel, y):
    return y @ kernel @ y / numpy.linalg.norm(kernel) / (y @ y)


def distance(first, second):
    return 1 - (first * second).sum() / numpy.linalg.norm(first) / numpy.linalg.norm(second)


@pytest.mark.parametrize(("i", "gamma"), [(0, 0.5), (1, 2.0)])
def test_networks_are_those_of_plain_training(numbers, i, gamma):
    outputs, kernels, _, y = plain(gamma)
    assert list(numbers["steps"]) == SETUP.moments == [0, 1, 2, 3, 5, 7]
    assert numbers["loss"][i] == pytest.approx(((outputs - y) ** 2).mean(1), rel=1e-4)
    assert numbers["alignment"][i] == pytest.approx([aligned(K, y) for K in kernels], rel=1e-4)
    assert numbers["norm"][i] == pytest.approx([numpy.linalg.norm(K) for K in kernels], rel=1e-4)
    assert numbers["moved"][i] == pytest.approx([distance(K, kernels[0]) for K in kernels], rel=1e-3, abs=1e-7)


@pytest.mark.parametrize(("i", "gamma"), [(0, 0.5), (1, 2.0)])
def test_ofe_is_the_solution_of_its_equations(numbers, i, gamma):
    _, kernels, rate, y = plain(gamma)
    before, after = aligned(kernels[0], y), aligned(kernels[-1], y)
    feature = after * numpy.sqrt((1 - before**2) / (1 - after**2)) - before
    assert numbers["feature_rate"][i] == pytest.approx(feature, rel=1e-2)
    strength = max(float(numbers["feature_rate"][i]), 0.0) * numpy.linalg.norm(kernels[0]) / P

    def velocity(_, state):
        features, residual = state[:-P].reshape(P, P), state[-P:]
        moved = strength * features @ numpy.outer(residual, residual)
        return rate * numpy.concatenate([moved.flatten(), -features.T @ (features @ residual)])

    values, vectors = numpy.linalg.eigh(kernels[0])
    features = (vectors * numpy.sqrt(values)).T
    path = scipy.integrate.solve_ivp(
        velocity,
        (0, SETUP.steps),
        numpy.concatenate([features.flatten(), -y]),
        t_eval=SETUP.moments,
        rtol=1e-9,
        atol=1e-12,
    ).y.T
    assert numbers["ofe/loss"][i] == pytest.approx((path[:, -P:] ** 2).mean(1), rel=1e-4)
    evolved = [state[:-P].reshape(P, P).T @ state[:-P].reshape(P, P) for state in path]
    assert numbers["ofe/alignment"][i] == pytest.approx([aligned(K, y) for K in evolved], rel=1e-5)
    apart = [distance(K, theirs) for K, theirs in zip(kernels, evolved, strict=True)]
    assert numbers["apart"][i] == pytest.approx(apart, rel=2e-3, abs=1e-6)


def made_up(**changes):
    """A run of three gammas in which all claims hold."""
    steps = numpy.array([0, 1, 2, 4, 8, 16, 32])
    strength = numpy.array([[0.1], [1.0], [10.0]])
    loss = numpy.where(steps == 1, 0.99, numpy.exp(-steps / 30 * (1 + strength)))
    alignment = 0.1 + 0.05 * strength * (1 - numpy.exp(-steps / 10))
    moved = 0.01 * strength * (1 - numpy.exp(-steps / 10))
    found = {
        "steps": steps,
        "loss": loss,
        "alignment": alignment,
        "moved": moved,
        "apart": moved / 2,
        "ofe/loss": loss**0.8,
        "ofe/alignment": alignment,
        "feature_rate": strength[:, 0],
    }
    return Runs([0], [found | changes])


def failing(**changes):
    return {claim.id for claim in fig2.claims(fig2.Setup(), made_up(**changes)) if not claim.holds}


def test_claims_hold_on_numbers_as_the_paper_has_them():
    assert failing() == set()


@pytest.mark.parametrize(
    ("name", "act", "broken"),
    [
        ("loss", lambda v: v ** numpy.array([[1], [1], [3]]), {"same-start"}),
        ("loss", lambda v: v[::-1], {"faster"}),
        (
            "alignment",
            lambda v: v[::-1],
            {f"aligns-more-{level:g}" for level in fig2.LEVELS} | {"aligns-faster", "peaks-higher", "rich"},
        ),
        ("alignment", lambda v: v[[0, 2, 1]], {"aligns-more-0.6", "aligns-faster"}),
        ("alignment", lambda v: v[:, ::-1], {"ofe-time"}),
        ("moved", lambda v: v + 0.1, {"lazy"}),
        ("ofe/loss", lambda v: v[::-1], {"ofe-order"}),
        ("ofe/loss", lambda v: v[:, ::-1], {"ofe-loss"}),
        ("ofe/alignment", lambda v: v[::-1], {"ofe-order"}),
        ("ofe/alignment", lambda v: numpy.where(numpy.arange(7) > 0, v[:, -1:], v), {"ofe-time"}),
        ("ofe/alignment", lambda v: v ** numpy.linspace(40, 1, 7), {"ofe-time"}),
        ("apart", lambda v: 3 * v, {"ofe-kernel"}),
    ],
)
def test_claims_fail_on_numbers_that_break_them(name, act, broken):
    assert broken <= failing(**{name: act(made_up()[name][0])})


def test_curves_are_read_where_the_loss_first_is_at_a_level():
    loss = numpy.array([[1.0, 0.8, 0.5, 0.6, 0.3], [1.0, 0.9, 0.8, 0.8, 0.75]])
    curve = numpy.array([[0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    runs = Runs([0], [{"steps": numpy.array([0, 1, 3, 7, 15]), "loss": loss, "curve": curve}])
    assert fig2.reached(runs, 0.6, "curve")[0] == pytest.approx([1 + 2 / 3, numpy.nan], nan_ok=True)
    assert fig2.reached(runs, 0.6, "steps")[0, 0] == pytest.approx(1 + 2 * 2 / 3)


@pytest.mark.parametrize(
    ("steps", "answer"),
    [
        ([9.0, 5.0, 2.0], True),
        ([numpy.nan, numpy.nan, 2.0], True),
        ([numpy.nan, 5.0, 2.0], True),
        ([9.0, numpy.nan, 2.0], False),
        ([9.0, 5.0, numpy.nan], False),
        ([numpy.nan] * 3, False),
        ([5.0, 9.0, 2.0], False),
    ],
)
def test_a_level_that_is_never_reached_ranks_last(steps, answer):
    assert fig2.speeds_up(numpy.array([steps])).tolist() == [answer]
