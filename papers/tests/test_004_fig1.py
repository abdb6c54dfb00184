"""004 Fig. 1: its numbers against obvious ones, and claims that must fail."""

import math
from dataclasses import replace

import numpy
import pytest
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_004 import fig1
from papers.tests.verdicts import failing

SETUP = fig1.Setup(
    width=7,
    linear_width=50,
    samples=4,
    steps=60,
    moments=6,
    speed=0.01,
    large_speed=0.002,
    law_widths=(5, 9, 30),
    variances=(1.0, 3.0),
)


@pytest.fixture(scope="module")
def numbers():
    found = fig1.measure(SETUP, Context(seed=3, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def test_starts_are_those_of_the_appendix():
    wide = replace(SETUP, linear_width=200_000)
    at = {start: fig1.initial_state(wide, start, "linear", torch.Generator().manual_seed(2)) for start in fig1.STARTS}
    assert at["kernel"].scale == pytest.approx(wide.linear_width**-0.5)
    assert float(at["feature"].w.var()) == pytest.approx(1, rel=0.02)
    assert torch.equal(at["orthogonal"].u, at["orthogonal"].w)
    assert float(at["near-orthogonal"].u.var()) == pytest.approx(10, rel=0.02)
    assert float((at["near-orthogonal"].w - at["near-orthogonal"].u).var()) == pytest.approx(0.1, rel=0.02)
    assert at["near-orthogonal"].lr == pytest.approx(0.002 * wide.linear_width)
    assert at["near-orthogonal"].scale * wide.linear_width == pytest.approx(1)


@pytest.mark.parametrize(
    ("activation", "phi", "slope"),
    [
        ("relu", lambda h: numpy.maximum(h, 0), lambda h: (h > 0) * 1.0),
        ("sigmoid", lambda h: 1 / (1 + numpy.exp(-h)), lambda h: numpy.exp(-h) / (1 + numpy.exp(-h)) ** 2),
    ],
)
def test_training_is_descent_written_out_by_hand(activation, phi, slope):
    """u and w by their own gradients of the mean square, with numpy."""
    at = fig1.initial_state(SETUP, "feature", activation, torch.Generator().manual_seed(5))
    x, y = numpy.array([0.5, -1.2, 2.0]), numpy.array([1.0, -2.0, 3.5])
    alignments, losses = fig1.trained(
        SETUP, at, activation, torch.tensor(x, dtype=torch.float64)[:, None], torch.tensor(y)
    )
    u, w = at.u.numpy().copy(), at.w.numpy().copy()
    for step in range(SETUP.steps + 1):
        h = numpy.outer(x, w)
        residual = at.scale * phi(h) @ u - y
        if step % SETUP.stride == 0:
            assert losses[step // SETUP.stride] == pytest.approx((residual**2).mean(), rel=1e-9)
            assert alignments[step // SETUP.stride] == pytest.approx(
                u @ w / math.sqrt((u @ u) * (w @ w)), rel=1e-9, abs=1e-12
            )
        pull = 2 * at.lr * at.scale * residual / len(x)
        u, w = u - pull @ phi(h), w - (pull * x) @ (slope(h) * u)


def test_the_theory_starts_at_the_network_and_ends_at_the_target(numbers):
    assert numbers["theory"][:, 0] == pytest.approx(numbers["alignment"][0, :, 0], abs=1e-12)
    assert numbers["alignment"].shape == (5, 4, 7)
    assert abs(numbers["theory"] - numbers["alignment"][0]).max() < 0.02


def test_claims_fail_on_numbers_that_break_them():
    """Ideal curves, and each claim broken by changing the curve that it speaks of."""
    shape = (5, 4, 7)
    time = numpy.linspace(0, 1, shape[2])
    good = numpy.zeros(shape)
    good[:, 1] = fig1.LIMIT * time
    good[:, 2] = 1.0
    good[:, 3] = 0.995 + (fig1.LIMIT - 0.995) * time
    widths = numpy.array(SETUP.law_widths, dtype=float)
    law = numpy.stack([numpy.zeros((4, 3)), numpy.tile(9 / numpy.sqrt(widths), (4, 1))], -1)
    numbers = {"alignment": good, "theory": good[0].copy(), "law": law, "lowest": numpy.array([0.97, 0.97])}

    def failed(activation, start, curve):
        changed = good.copy()
        changed[activation, start] = curve
        return failing(fig1, SETUP, Runs([0], [numbers | {"alignment": changed}]))

    assert failing(fig1, SETUP, Runs([0], [numbers])) == []
    assert "theory-lines" in failed(0, 1, good[0, 1] + 0.006)
    assert failed(0, 0, 0.6 * time) == ["theory-lines", "kernel"]
    assert failed(0, 1, 0.7 * time) == ["theory-lines", "feature"]
    assert failed(0, 2, 1 - 0.001 * time) == ["orthogonal"]
    assert failed(0, 3, 0.995 - 0.02 * time) == ["theory-lines", "near-orthogonal"]
    assert failed(0, 1, fig1.LIMIT * numpy.sin(2 * time) / math.sin(2)) == ["theory-lines", "monotone"]
    assert failed(2, 1, 0.3 * time) == ["align"]
    assert failed(3, 3, 0.995 + 0.001 * time) == ["disalign", "disalign-monotone"]
    assert failed(1, 2, 1 - 0.01 * time) == ["orthogonal-homogeneous"]
    assert failed(2, 2, 1 - 0.2 * time) == ["orthogonal-sigmoid"]
    assert failed(3, 2, 1 - 0.2 * time) == ["orthogonal-swish"]
    for activation, id in ((0, "kernel-others"), (1, "kernel-sigmoid"), (3, "kernel-others")):
        slower, falling = law.copy(), law.copy()
        slower[activation, :, 1] = widths**-0.25
        falling[activation, :, 1] = -1.0
        assert failing(fig1, SETUP, Runs([0], [numbers | {"law": slower}])) == [id]
        assert failing(fig1, SETUP, Runs([0], [numbers | {"law": falling}])) == [id]


def test_the_verdict_at_other_variances_and_at_one_width_is_told(numbers):
    claims = {one.id: one for one in fig1.claims(SETUP, Runs([0], [numbers | {"lowest": numpy.array([0.97, 0.8])}]))}
    assert [one["verdict"] for one in claims["orthogonal-sigmoid"].details()["choices"]] == ["holds", "fails"]
    assert claims["kernel-sigmoid"].details()["choices"][0]["band"] == [None, 6]


def test_the_kernel_phase_over_widths_starts_from_weights_of_these_widths(numbers):
    assert numbers["law"].shape == (4, len(SETUP.law_widths), 2)
    for i, width in enumerate(SETUP.law_widths):
        at = fig1.initial_state(SETUP, "kernel", "relu", Context(seed=3, folder=None).generator(1), width=width)
        assert len(at.u) == width
        start = float(at.u @ at.w / at.u.norm() / at.w.norm())
        assert numbers["law"][0, i, 0] == pytest.approx(start, abs=1e-6)
