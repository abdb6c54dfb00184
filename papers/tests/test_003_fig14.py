"""003 Fig. 14 and 15: what is claimed of weights that move, on numbers that hold and that break it."""

import numpy
import pytest

from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_003 import fig14, fig15, networks
from papers.tests.verdicts import failing


def run(change, train=(1.0, 0.6, 0.2), share=0.8):
    """Three moments of two layers; `change` are the last ones."""
    change = numpy.array(change)
    return {
        "steps": numpy.array([1, 10, 100]),
        "change": numpy.stack([0 * change, change / 2, change]),
        "train": numpy.array(train),
        "test": numpy.array(train),
        "share": numpy.full((3, 2), share),
    }


def networks_of(figure):
    return networks.PERCEPTRONS if figure is fig14 else ("vgg", "gpt")


@pytest.mark.parametrize("figure", [fig14, fig15])
def test_claims_hold_and_fail_as_the_numbers_say(figure):
    names = list(networks_of(figure))

    def verdict(odd):
        """All networks but the last are good."""
        each = [*[run((0.3, 0.5))] * (len(names) - 1), odd]
        return failing(figure, {}, {name: Runs([0], [one]) for name, one in zip(names, each, strict=True)})

    assert verdict(run((0.3, 0.5))) == []
    assert verdict(run((0.05, 0.09))) == ["moves"]
    assert verdict(run((0.3, 0.5), train=(1.0, 1.0, 0.99))) == ["learns"]
    assert verdict(run((0.3, 0.5), share=-20.0)) == ["dominates"]
    back = run((0.3, 0.5))
    back["change"] = numpy.array([[0.9, 0.9], [0.5, 0.6], [0.3, 0.5]])
    assert verdict(back) == ["grows"]


def test_the_layer_that_moves_least_is_the_other_choice():
    runs = {name: Runs([0], [run((0.05, 0.5))]) for name in ("vgg", "gpt")}
    moves = next(iter(fig15.claims({}, runs)))
    assert moves.holds
    assert moves.measured == pytest.approx(0.275)
    assert moves.choices[0].values == pytest.approx([0.05])
