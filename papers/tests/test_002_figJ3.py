"""002 Fig. J.3: claims that must fail. What it measures is tested with Fig. J.2."""

from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002 import figJ3
from papers.tests.residual_runs import SETUP, STEPS, changed, made_up
from papers.tests.verdicts import failing


def verdict(found):
    return failing(figJ3, SETUP, Runs([0], [found]))


def test_claims_fail_on_numbers_that_break_them():
    good = made_up(amount=0.5)
    assert verdict(good) == []
    assert verdict(made_up(later=1.2, amount=0.5)) == ["faster", "norm-rate"]
    assert verdict(changed(good, 1, loss=good["loss"][0] + 0.1)) == ["faster"]
    assert verdict(made_up(amount=2.0)) == ["norm-change"]
    assert verdict(changed(good, 0, alignment=0.1 + STEPS / 100)) == ["silent-k=1"]
    assert verdict(changed(good, 1, error=[0.3, 0.5, 0.08])) == ["final-k=2"]
    assert verdict(changed(good, 0, error=[0.1, 0.5, 0.3])) == ["adam"]


def test_the_other_measure_of_change_is_told():
    # a larger change, from a start that is larger still
    found = made_up(amount=2.0)
    found["norm"][1] += 1.0
    change = next(one for one in figJ3.claims(SETUP, Runs([0], [found])) if one.id == "norm-change")
    assert not change.holds
    assert [each["verdict"] for each in change.details()["choices"]] == ["fails", "holds"]


def test_two_blocks_and_the_axis_of_the_paper():
    networks = figJ3.WIDTHS.size(Scale.PAPER).setup.networks
    assert {(part.b, part.steps, part.lr, part.samples) for part in networks} == {(2, 7000, 1e-5, 100)}
    assert [part.k for part in networks] == [1, 2, 3, 4]
