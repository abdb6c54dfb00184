"""002 Fig. C.2: its numbers against closed forms, and claims that must fail."""

import math

import numpy
import pytest
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_002 import figC2

SETUP = figC2.Setup(samples=12, inputs=5, width=9, sigmas=(1e-1, 1e-2), lr=0.02, time=7.2, moments=24)


@pytest.fixture(scope="module")
def numbers():
    found = figC2.measure(SETUP, Context(seed=0, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def verdicts(numbers):
    return {claim.id: claim for claim in figC2.claims(SETUP, Runs([0], [numbers]))}


def test_inputs_are_white_and_the_teacher_has_length_one():
    X, y = figC2.task(SETUP, torch.Generator().manual_seed(3))
    assert torch.allclose(X.T @ X / SETUP.samples, torch.eye(SETUP.inputs, dtype=torch.float64), atol=1e-12)
    assert float(torch.linalg.lstsq(X, y[:, None]).solution.norm()) == pytest.approx(1.0, rel=1e-12)


def test_training_ends_at_the_formula_of_the_paper(numbers):
    assert numbers["best"] == pytest.approx(2 / math.sqrt(3 + SETUP.inputs), rel=1e-9)
    assert numbers["alignment"][-1, -1] == pytest.approx(2 / math.sqrt(3 + SETUP.inputs), abs=1e-3)


def test_the_half_time_is_that_of_the_closed_form(numbers):
    """t_1/2 = ln[(s / c0 - 1)(sqrt 2 - 1)] / 2s, so that a tenth of sigma costs ln(10), whatever c0 is."""
    (times,) = figC2.half_times(SETUP, Runs([0], [numbers]))
    assert times[1] - times[0] == pytest.approx(math.log(10), rel=0.02)


def test_claims_fail_on_numbers_that_break_them(numbers):
    good = verdicts(numbers)
    assert [id for id, claim in good.items() if not claim.holds] == ["slope-printed"]
    late = numbers | {"alignment": numpy.linspace(0, 1, SETUP.moments + 1) * numpy.ones((2, 1))}
    assert not verdicts(late)["silent"].holds
    assert not verdicts(late)["maximum"].holds
    turned = numbers | {"loss": numbers["loss"][::-1]}
    assert not verdicts(turned)["earlier-for-larger"].holds
    assert not verdicts(turned)["theory-curves"].holds
    assert not verdicts(turned)["slope"].holds
    assert good["slope-printed"].known is not None
