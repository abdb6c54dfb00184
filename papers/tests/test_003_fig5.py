"""003 Fig. 5, and the experiment that it shares with Fig. 6, 8, 9 and 10: numbers against plain algebra."""

from dataclasses import replace

import numpy
import pytest
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_003 import chain, fig5, initial_scales, spectra
from papers.tests.verdicts import failing

SETUP = initial_scales.Setup(
    samples=22,
    unseen=9,
    dimension=6,
    degree=3,
    width=8,
    decays=(0.0, 2.0),
    scales=(1.0, 0.1),
    lr=0.1,
    steps=7,
    first=2,
    early=4,
    stride=3,
)


def context():
    return Context(seed=4, folder=None)


@pytest.fixture(scope="module")
def numbers():
    found = initial_scales.measure(SETUP, context())
    return {name: as_array(values, name) for name, values in found.items()}


def start(decay, scale, rotated=True, layers="hidden.0"):
    """Task and weights in double, as the experiment begins."""
    variances, basis = spectra.eigenvalues(6, decay), spectra.eigenbasis(context(), 6, rotated)
    task = spectra.rotated_chain(context(), 22, 9, variances, basis, degree=3)
    model = chain.network(context(), task, 8, scale, layers=layers)
    weights = [weight.detach().double().numpy() for weight in model.parameters()]
    return [part.double().numpy() for part in task[:4]], weights


def gradients(weights, x):
    """Outputs, df/dh of both hidden layers (n, k), and the inputs of the second."""
    W, V, a = weights
    h = x @ W.T
    z = numpy.maximum(h, 0)
    g = z @ V.T
    second = a * (g > 0)
    return numpy.maximum(g, 0) @ a[0], (second @ V) * (h > 0), second, z, numpy.maximum(g, 0)


def descended(weights, x, y, steps, lr):
    for _ in range(steps):
        f, first, second, z, last = gradients(weights, x)
        out = (2 * (f - y) / len(y))[:, None]
        moves = ((out * first).T @ x, (out * second).T @ z, (out * last).sum(0)[None])
        weights = [w - lr * move for w, move in zip(weights, moves, strict=True)]
    return weights


def rho(a, b, kind):
    if kind == "pearson":
        a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / numpy.linalg.norm(a) / numpy.linalg.norm(b)


@pytest.mark.parametrize(
    ("place", "rotated", "layers"),
    [("", True, "hidden.0"), ("all/", True, "hidden.*"), ("axes/", False, "hidden.0")],
)
@pytest.mark.parametrize(("d", "s"), [(0, 0), (1, 1), (1, 0)])
def test_numbers_are_those_of_descent_written_out(numbers, d, s, place, rotated, layers):
    (x, y, x_test, y_test), begin = start(SETUP.decays[d], SETUP.scales[s], rotated, layers)
    end = descended(begin, x, y, SETUP.steps, SETUP.lr)
    assert numbers[f"{place}train"][d, s, -1] == pytest.approx(((gradients(end, x)[0] - y) ** 2).mean(), rel=1e-4)
    test = ((gradients(end, x_test)[0] - y_test) ** 2).mean()
    assert numbers[f"{place}test"][d, s, -1] == pytest.approx(test, rel=1e-4)
    for layer in (0, 1):
        J, J0 = gradients(end, x)[1 + layer], gradients(begin, x)[1 + layer]
        W, W0 = end[layer], begin[layer]
        K, Kb, Wb = J.T @ J, (J - J0).T @ (J - J0), W - W0
        for kind in initial_scales.KINDS:
            expected = [
                rho(W.T @ W, W.T @ K @ W, kind),
                rho(Wb.T @ Wb, Wb.T @ K @ Wb, kind),
                rho(W0.T @ W0, W0.T @ Kb @ W0, kind),
            ]
            # the experiment trains in single precision
            assert numbers[f"{place}{kind}"][d, s, -1, layer] == pytest.approx(expected, abs=2e-4)
        share = numpy.trace(Wb.T @ Wb @ Wb.T @ Kb @ Wb) / numpy.trace(Wb.T @ Wb @ Wb.T @ K @ Wb)
        assert numbers[f"{place}double_share"][d, s, -1, layer] == pytest.approx(share, rel=2e-3)


def test_steps_are_dense_first(numbers):
    assert numbers["steps"].tolist() == SETUP.measured == [0, 2, 4, 7]
    assert initial_scales.step_weights(SETUP) == [2, 2, 3]
    assert initial_scales.Setup().measured == list(range(0, 801, 5))
    assert initial_scales.drawn(SETUP) == [1, 2, 3]
    shown = [initial_scales.Setup().measured[place] for place in initial_scales.drawn(initial_scales.Setup())]
    assert shown[:14] == [*range(5, 70, 5), 75]  # 1.08 * 65 is 70.2
    assert shown[-1] == 800
    assert numbers["cosine"].shape == (2, 2, 4, 2, 3)
    assert numbers["axes/cosine"].shape == (2, 2, 3, 2, 3)
    assert numpy.isnan(numbers["cosine"][:, :, 0, :, 1:]).all()
    assert not numpy.isnan(numbers["cosine"][:, :, 1:]).any()


def test_networks_of_a_seed_begin_alike_but_for_the_factor():
    (_, large), (_, small) = start(1.0, 1.0), start(2.0, 0.1)
    assert large[0] == pytest.approx(10 * small[0], rel=1e-6)
    assert (large[1] == small[1]).all()
    _, whole = start(2.0, 0.1, layers="hidden.*")
    assert large[1] == pytest.approx(10 * whole[1], rel=1e-6)
    assert (large[2] == whole[2]).all()
    assert float(torch.tensor(large[0]).abs().max()) <= 1 / 6**0.5


MADE = replace(SETUP, decays=(0.0, 1.0, 2.0), steps=10)


def made_up(shares=((0.01, 0.02, 0.03, 0.04), (0.02, 0.3, 0.6, 0.8)), other=None):
    """Shares (scales, steps after the first), the same in both layers and all spectra, or others in the last two."""
    first = numpy.array(shares, dtype=float)
    rows = numpy.stack([first, *[first if other is None else numpy.array(other)] * 2])
    whole = numpy.concatenate([numpy.full((3, 2, 1), numpy.nan), rows], -1)
    return Runs([0], [{"double_share": numpy.stack([whole, whole], -1)}])


GOOD = ((0.01, 0.02, 0.03, 0.04), (0.02, 0.3, 0.6, 0.8))


@pytest.mark.parametrize(
    ("shares", "broken"),
    [
        (GOOD, ["late"]),
        (((0.01, 0.3, 0.5, 0.6), (0.02, 0.4, 0.6, 0.8)), ["large"]),
        (((0.2, 0.3, 0.5, 0.6), (0.02, 0.4, 0.6, 0.8)), ["early", "large"]),
        (((0.01, 0.05, 0.1, 0.06), (0.02, 0.04, 0.06, 0.01)), ["larger-less", "grows", "late"]),
    ],
)
def test_claims_fail_on_numbers_that_break_them(shares, broken):
    assert failing(fig5, MADE, made_up(shares)) == broken


def test_choices_are_those_of_other_steps_and_spectra():
    runs = made_up(other=((0.5, 0.6, 0.7, 0.8), (0.4, 0.4, 0.4, 0.4)))
    found = {claim.id: claim for claim in fig5.claims(MADE, runs)}
    early = {choice.other: float(choice.values[0]) for choice in found["early"].choices}
    assert early == {"4 steps": 0.3, "eigenvalues 1/(1+k^1)": 0.5, "eigenvalues 1/(1+k^2)": 0.5}
    large = {choice.other: float(choice.values[0]) for choice in found["large"].choices}
    assert large == pytest.approx(
        {
            "mean over the first 4 steps": 0.015,
            "the smaller": 0.027,
            "eigenvalues 1/(1+k^1)": 0.67,
            "eigenvalues 1/(1+k^2)": 0.67,
        }
    )
    less = [float(choice.values[0]) for choice in found["larger-less"].choices]
    assert less == pytest.approx([-0.145, 0.27, 0.27])
