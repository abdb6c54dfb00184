"""001 Fig. 5: claims on made-up kernels, and claims that must fail. Its experiment is tested with 000 Fig. 6."""

import numpy
import pytest

from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_000 import depth
from featlearn_papers.paper_001 import fig5

SETUP = depth.DEPTH.size(Scale.LAPTOP).setup


def made_up(last=(0.31, 0.33, 0.36, 0.4), first=(0.3, 0.3, 0.3, 0.3)):
    """Alignments of one seed, from `first` to `last` over the depths, equal by all measures."""
    levels = numpy.stack([numpy.array(first), numpy.array(last)], 1)  # depths, T
    classes = levels[:, :, None, None, None] * numpy.ones((3, 10, 10))
    found = {
        "steps": numpy.array([0, 100]),
        "alignment": levels,
        "centered_alignment": levels,
        "classes": classes,
        "centered_classes": classes,
    }
    return Runs([0], [found])


def failing(*args, **options):
    return {claim.id for claim in fig5.claims(SETUP, made_up(*args, **options)) if not claim.holds}


def test_claims_hold_on_numbers_as_the_paper_has_them():
    assert failing() == set()


@pytest.mark.parametrize(
    ("last", "first", "broken"),
    [
        ((0.31, 0.4, 0.36, 0.41), (0.3,) * 4, {"deeper-higher", "rate-grows"}),
        ((0.4, 0.36, 0.33, 0.31), (0.3,) * 4, {"deeper-higher", "deepest-higher", "rate-grows"}),
        ((0.31, 0.33, 0.36, 0.4), (0.1, 0.2, 0.3, 0.38), {"same-start", "rate-grows"}),
    ],
)
def test_claims_fail_on_numbers_that_break_them(last, first, broken):
    assert failing(last, first) == broken


def test_the_feature_rate_is_that_of_a_kernel_with_a_spike():
    """K0 + gamma y y^T with |K0| = |y| = 1 has the alignment (A0 + gamma) / sqrt(1 + 2 A0 gamma + gamma^2)."""
    before, gamma = 0.3, numpy.array([0.05, 0.1, 0.2, 0.5])
    after = (before + gamma) / numpy.sqrt(1 + 2 * before * gamma + gamma**2)
    runs = made_up(last=tuple(after))
    for measure in depth.MEASURES:
        assert fig5.rates(runs, measure)[0] == pytest.approx(gamma, rel=1e-9)


def test_all_measures_are_given_beside_the_verdict():
    for claim in fig5.claims(SETUP, made_up()):
        assert len(claim.choices) == len(depth.MEASURES) - 1
