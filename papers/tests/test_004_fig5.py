"""004 Fig. 5: its numbers against obvious ones, and claims that must fail."""

import numpy
import pytest

from featlearn.theory import phases
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_004 import fig5
from papers.tests.verdicts import failing

SETUP = fig5.Setup(data="digits", samples=30, test_samples=20, width=9, batch=7, epochs=4, every=2)


def test_the_scaling_is_that_of_section_4_2_and_the_printed_sign_is_unstable():
    up, down = fig5.scaling(1.5), fig5.scaling(-1.5)
    assert (up.gamma, up.u, up.w) == (-0.75, 1.5, 1.5)
    assert (down.gamma, down.u, down.w) == (0, 0, -1.5)
    printed = phases.Exponents(d=0, gamma=0.75, u=1.5, w=1.5, rate_u=0, rate_w=0)
    assert phases.classify(printed) is phases.Phase.UNSTABLE


def test_draws_are_shared_and_the_initial_output_has_the_exponent_of_the_erratum():
    numbers = fig5.measure(SETUP, Context(seed=0, folder=None))
    assert numbers["distance"].shape == (5, 3)
    output = numbers["output"].numpy()
    assert output == pytest.approx(output[2] * numpy.array([0.1, 10**-0.5, 1, 10**0.5, 10]))
    assert fig5.exponents_of(SETUP, output[None]) == pytest.approx([0.5])


def test_claims_fail_on_numbers_that_break_them():
    c = numpy.array(SETUP.exponents)
    good = {
        "train": numpy.array([1.0, 1.0, 1.0, 0.9, 0.8]),
        "test": numpy.array([0.45, 0.45, 0.43, 0.4, 0.4]),
        "distance": numpy.stack([numpy.where(c > 0, 0.5 * 10 ** (-c / 2), 0.5)] * 2, 1),
        "output": numpy.ones(5),
    }
    good["distance"][0] = 3.0

    def verdict(**changes):
        return failing(fig5, SETUP, Runs([0], [good | {name: numpy.array(value) for name, value in changes.items()}]))

    def moved(row, layer, value):
        changed = good["distance"].copy()
        changed[row, layer] = value
        return changed

    assert verdict() == []
    assert verdict(train=[1.0, 0.9, 1.0, 0.9, 0.8]) == ["train-learning"]
    assert verdict(train=[1.0, 1.0, 1.0, 1.0, 1.0]) == ["train-kernel"]
    assert verdict(test=[0.4, 0.4, 0.4, 0.4, 0.4]) == ["test-gap"]
    assert verdict(test=[0.6, 0.6, 0.4, 0.4, 0.4]) == ["test-gap"]
    assert verdict(distance=moved(0, 0, 0.3)) == ["moves"]
    assert verdict(distance=moved(4, 1, 0.2)) == ["stays", "law"]
    assert verdict(distance=moved(4, 0, 0.01)) == ["law"]
    assert verdict(output=[0.1, 0.3, 1.0, 10**0.5, 10.0]) == ["output"]
    claims = {
        one.id: one for one in fig5.claims(SETUP, Runs([0], [good | {"test": numpy.array([0.9, 0.4, 0.4, 0.36, 0])}]))
    }
    (nearest,) = claims["test-gap"].details()["choices"]
    assert (claims["test-gap"].verdict, nearest["verdict"]) == ("fails", "holds")
    known = {one.id: one.known for one in fig5.claims(SETUP, Runs([0], [good]))}
    assert known["output"]
    assert sum(value is not None for value in known.values()) == 1
