"""003 Fig. 7: its data, networks and predictions against plain algebra, and claims that must fail."""

import numpy
import pytest
import torch

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_003 import fig7, spectra
from papers.tests.verdicts import failing

SETUP = fig7.Setup(samples=11, dimension=7, widths=(9, 14), decays=(0.0, 1.5), degree=3)


def context():
    return Context(seed=3, folder=None)


@pytest.fixture(scope="module")
def numbers():
    return {name: as_array(values, name) for name, values in fig7.measure(SETUP, context()).items()}


def test_along_the_axes_the_chain_is_that_of_the_library():
    variances = fl.data.power_law_spectrum(6, 1.5)
    task = spectra.rotated_chain(context(), 20, 5, variances, torch.eye(6, dtype=torch.float64), degree=4)
    data = fl.data.chain_monomial(25, 6, 4, spectrum=variances, generator=context().generator())
    assert torch.equal(torch.cat([task.x, task.x_test]), data.x)
    assert torch.equal(torch.cat([task.y, task.y_test]), data.y)
    assert torch.allclose(task.egop, data.egop, atol=1e-12)


def test_in_a_random_eigenbasis_the_chain_has_variance_1_and_its_egop():
    """Four deviations of the mean of 200,000 samples at most."""
    variances, basis = fl.data.power_law_spectrum(5, 2.0), spectra.eigenbasis(context(), 5)
    assert torch.allclose(basis @ basis.T, torch.eye(5, dtype=torch.float64), atol=1e-12)
    task = spectra.rotated_chain(context(), 200_000, 0, variances, basis, degree=3, dtype=torch.float64)
    x, y = task.x, task.y
    centered = (y - y.mean()).square()
    assert abs(float(centered.mean()) - 1) < 4 * float(centered.std()) / len(y) ** 0.5
    covariance = (basis * variances) @ basis.T
    assert torch.allclose(x.T @ x / len(x), covariance, atol=4 * float(covariance.max()) * (2 / len(x)) ** 0.5)
    ring = x[:, :3]
    products = ring[:, 0] * ring[:, 1] + ring[:, 1] * ring[:, 2] + ring[:, 2] * ring[:, 0]
    deviation = float(products[0] / y[0])
    assert torch.allclose(products, deviation * y)
    slopes = torch.zeros_like(x)
    slopes[:, :3] = (ring.sum(1, keepdim=True) - ring) / deviation
    assert torch.allclose(slopes.T @ slopes / len(x), task.egop, atol=0.02 * float(task.egop.max()))


def test_eigenvalues_are_1_without_decay():
    assert spectra.eigenvalues(3, 0.0).tolist() == [1, 1, 1]
    assert spectra.eigenvalues(3, 2.0).tolist() == pytest.approx([1 / 2, 1 / 5, 1 / 10])


def correlated(x, residual, kernel, kind):
    """Eq. 6, sample by sample."""
    rows = residual[:, None] * x
    nfm, agop = rows.T @ kernel @ rows, rows.T @ kernel @ kernel @ rows
    if kind == "pearson":
        nfm, agop = nfm - nfm.mean(), agop - agop.mean()
    return (nfm * agop).sum() / numpy.linalg.norm(nfm) / numpy.linalg.norm(agop)


def drawn(x, activation, width):
    """Gradients of the network's output with respect to h = W x, written out: kernel and outputs."""
    weights = MLP(
        7,
        None,
        width=width,
        hidden_layers=2,
        activation=activation,
        distribution="uniform",
        weight_variance=1 / 3,
        generator=context().generator(1),
    ).parameters()
    W, V, a = (weight.detach().double().numpy() for weight in weights)
    phi, slope = ((lambda h: h**2, lambda h: 2 * h), (lambda h: numpy.maximum(h, 0), lambda h: 1.0 * (h > 0)))[
        activation == "relu"
    ]
    h = x @ W.T
    g = phi(h) @ V.T
    J = ((a * slope(g)) @ V) * slope(h)
    return J @ J.T, phi(g) @ a[0]


def expected(x, activation):
    """The limit of infinite width, up to a factor."""
    S = x @ x.T
    sizes = numpy.sqrt(numpy.outer(S.diagonal(), S.diagonal()))
    if activation == "quadratic":
        return S * (sizes**2 + 2 * S**2)
    first = numpy.arccos(numpy.clip(S / sizes, -1, 1))
    numpy.fill_diagonal(first, 0)
    second = numpy.arccos(numpy.clip((numpy.sin(first) + (numpy.pi - first) * numpy.cos(first)) / numpy.pi, -1, 1))
    numpy.fill_diagonal(second, 0)
    return (numpy.pi - first) * (numpy.pi - second)


@pytest.mark.parametrize("kind", fig7.KINDS)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("i", [0, 1])
def test_numbers_are_those_of_networks_written_out(numbers, i, place, kind):
    activation = fig7.ACTIVATIONS[i]
    x, targets = fig7.tasks(SETUP, context(), SETUP.decays[place])
    x = x.numpy()
    for t, y in enumerate(target.numpy() for target in targets):
        assert numbers[f"predicted/{kind}"][i, t, 1, place] == pytest.approx(
            correlated(x, y, expected(x, activation), kind), abs=1e-8
        )
        for w, width in enumerate(SETUP.widths):
            kernel, f = drawn(x, activation, width)
            for name, residual in (("observed", y), ("residual", y - f)):
                value = correlated(x, residual, kernel, kind)
                assert numbers[f"{name}/{kind}"][i, t, w, place] == pytest.approx(value, abs=1e-8)


def test_both_tasks_have_the_same_rotated_inputs():
    """|Q x|^2 is a form of the inputs: 4 x 4 coefficients explain 60 targets, up to rounding."""
    x, (chain, form) = fig7.tasks(fig7.Setup(samples=60, dimension=4, degree=3), context(), 1.0)
    products = torch.einsum("pi,pj->pij", x, x).flatten(1)
    for y in (chain, form):
        fitted = products @ torch.linalg.lstsq(products, y[:, None], driver="gelsd").solution
        assert torch.allclose(fitted[:, 0], y, atol=1e-9)
    assert bool((form > 0).all())


MADE = fig7.Setup(decays=(0.0, 1.0, 2.0, 5.0))
CURVE = numpy.array([0.95, 0.9, 0.8, 1.0])


def made_up(**changes):
    """(activations, tasks, widths, decays): predictions are the curve, narrow, wide and ReLU networks off it."""
    curves = numpy.broadcast_to(CURVE, (2, 2, 2, 4)).copy()
    observed = curves.copy()
    observed[0, :, fig7.NARROW, 1:] -= 0.02
    observed[0, :, fig7.WIDE, 1:] -= 0.005
    observed[1, :, :, 1:] -= 0.01
    numbers = {"observed": observed, "residual": observed, "predicted": curves, "predicted_finite": curves} | changes
    return Runs([0], [{f"{name}/{kind}": values for name, values in numbers.items() for kind in fig7.KINDS}])


def changed(base, place, values):
    found = made_up()[f"{base}/cosine"][0].copy()
    found[place] = values
    return {base: found}


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        (
            changed("observed", (0, 0, 1), [0.8, 0.9, 0.95, 1.0]),
            ["dip-observed-quadratic", "wide-closer", "captured-quadratic", "relu-lesser"],
        ),
        (changed("observed", (1, 1, 1), [0.8, 0.9, 0.95, 1.0]), ["dip-observed-relu", "captured-relu"]),
        (
            changed("predicted", (0, 1, 1), [0.79, 0.79, 0.8, 1.0]),
            ["dip-predicted-quadratic", "captured-quadratic", "wide-closer", "relu-lesser"],
        ),
        (changed("observed", (1, 0, 0, 3), 0.9), ["projector"]),
        (changed("observed", (1, slice(None), 1), CURVE), ["relu-lesser"]),
    ],
)
def test_claims_fail_on_numbers_that_break_them(changes, broken):
    assert sorted(failing(fig7, MADE, made_up(**changes))) == sorted(broken)


def test_a_dip_is_judged_on_the_task_where_it_is_smaller():
    each = numpy.array([[[0.9, 0.7, 1.0], [0.9, 0.85, 0.8]]])
    assert fig7.dip(each).tolist() == pytest.approx([-0.05])
