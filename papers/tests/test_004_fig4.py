"""004 Fig. 4: claims that must fail on numbers that break them, and the exponents."""

import numpy
import pytest

from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_004 import fig4
from papers.tests.verdicts import failing

SETUP = fig4.Setup(samples=1000, widths=(100, 300, 1000))
WIDTHS = numpy.array(SETUP.widths)


def good():
    test = numpy.tile([[0.4], [0.42], [0.45]], 6)
    test[-1, [0, 2, 4]] = 0.4, 0.4, 0.35
    power = numpy.array([-0.5, 0.0, -1.0, 0.2, -1.0, 0.0])
    distance = (WIDTHS[:, None] / 100) ** power
    return {"test": test, "distance": numpy.repeat(distance[:, :, None], 3, axis=2)}


def verdict(**changes):
    return failing(fig4, SETUP, Runs([0], [good() | changes]))


def changed(name, where, value):
    values = good()[name].copy()
    values[where] = value
    return {name: values}


def test_exponents_are_those_of_powers():
    found = fig4.exponents(SETUP, good()["distance"][None])
    assert found[0, :, 1] == pytest.approx([-0.5, 0.0, -1.0, 0.2, -1.0, 0.0])


def test_claims_fail_on_numbers_that_break_them():
    assert verdict() == []
    assert verdict(**changed("test", (-1, 3), 0.41)) == ["gain-kaiming"]
    assert verdict(**changed("test", (-1, 1), 0.5)) == ["gain-ntk-mean-field"]
    assert verdict(**changed("test", (-1, 4), 0.42)) == ["gain-xavier"]
    assert "larger" in verdict(**changed("test", (0, [1, 3, 5]), 0.6))
    assert verdict(**changed("test", (0, 0), 0.41)) == ["same"]
    for i, scheme in enumerate(fig4.SCHEMES):
        flat, steep = numpy.ones(3), 100.0 / WIDTHS
        where = (slice(None), i, 2)
        assert verdict(**changed("distance", where, steep if i % 2 else flat)) == [f"distance-{scheme}"]


def test_other_choices_are_shown_with_their_verdicts():
    shown = {one.id: one for one in fig4.claims(SETUP, Runs([0], [good()]))}
    (narrower,) = shown["gain-kaiming"].details()["choices"]
    assert (shown["gain-kaiming"].verdict, narrower["verdict"]) == ("depends", "fails")
    assert "variance 2 / (inputs + width)" in shown["distance-xavier+"].why
