"""004 Table 1 against the print, and against networks' exponents worked out by hand."""

from fractions import Fraction

import pytest

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_004 import table1


@pytest.fixture(scope="module")
def numbers():
    found = table1.measure(table1.Setup(), Context(seed=0, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def verdicts(numbers):
    return {claim.id: claim for claim in table1.claims(table1.Setup(), Runs([0], [numbers]))}


def phase(d, gamma, u, w, rate):
    """004 Theorem 2 at equal rates, written out."""
    A, B = 2 * gamma + 2 * rate, 2 * gamma + d + rate + max(u, w)
    if max(A, B):
        return "frozen" if max(A, B) < 0 else "unstable"
    return "kernel" if A < 0 else "learning"


def test_every_cell_but_the_head_of_kaiming_is_as_printed(numbers):
    found = verdicts(numbers)
    assert len(found) == 25
    assert [id for id, claim in found.items() if not claim.holds] == ["kaiming-start"]
    assert found["kaiming-start"].known is not None
    assert found["ntk-kernel"].measured == "0 -1/2 kernel"


def test_the_printed_exponents_have_the_printed_phases():
    for scaling, start in table1.STARTS.items():
        d, gamma, u, w = map(Fraction, start.split())
        for block, (_, *cells) in table1.BLOCKS.items():
            *numbers, expected = cells[list(table1.SCALINGS).index(scaling)].split()
            chosen = Fraction(numbers[1]) if len(numbers) == 2 else gamma
            assert phase(d, chosen, u, w, Fraction(numbers[0])) == expected, (scaling, block)


def test_a_cell_that_differs_fails(numbers):
    wrong = numbers | {"xavier/plain": numbers["xavier/plain"] + [0, 0, -1]}
    assert not verdicts(wrong)["xavier-plain"].holds
    wrong = numbers | {"lazy/kernel": numbers["lazy/kernel"] + [0, 0.5, 0]}
    assert not verdicts(wrong)["lazy-kernel"].holds
