"""002 Fig. 1: what it measures, and claims that must fail. Its kernels and regressions: test_002_fig4.py."""

import math

import numpy
import pytest

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_002 import fig1, whitened
from papers.tests.verdicts import failing

PART = whitened.Perceptron(
    data="digits", samples=40, test_samples=10, sigma=0.05, width=12, lr=0.1, steps=20, stride=10
)
SETUP = whitened.Setup(
    mnist=PART,
    cifar=PART,
    residual=whitened.Residual(data="digits", samples=6, test_samples=5, k=0.125, lr=1e-3, steps=4, stride=2),
)


@pytest.fixture(scope="module")
def numbers():
    found = whitened.measure(SETUP, Context(seed=0, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def test_all_three_networks_are_measured(numbers):
    assert numbers["mnist/predictions"].shape == (4, 10)
    assert numbers["residual/predictions"].shape == (4, 5)
    assert numbers["residual/steps"].tolist() == [0, 1, 2, 4]
    assert numbers["mnist/best"] == pytest.approx(2 / math.sqrt(3 + 40), rel=1e-3)  # L / sqrt(L^2 - 1 + rank)
    network, final, *_ = numbers["cifar/predictions"]
    assert numbers["cifar/correlation"][0] == pytest.approx(numpy.corrcoef(network, final)[0, 1])
    # plain descent has no other kernel than its own; Adam has
    assert numbers["cifar/error"][2] == numbers["cifar/error"][0]
    assert numbers["residual/error"][2] != numbers["residual/error"][0]


def made_up():
    """Alignment at once, then one fall of the loss and one rise of the norm at step 300."""
    steps = numpy.arange(0, 601, 10.0)
    fall = 1 / (1 + numpy.exp((steps - 300) / 10))
    found = {}
    for name in ("mnist", "cifar", "residual"):
        found |= {
            f"{name}/steps": steps,
            f"{name}/loss": fall,
            f"{name}/norm": 1.01 - fall,
            f"{name}/alignment": 0.5 - 0.4 * numpy.exp(-steps / 20),
            f"{name}/centered_alignment": 0.6 - 0.4 * numpy.exp(-steps / 20),
            f"{name}/error": numpy.array([0.05, 0.4, 0.05]),
            f"{name}/correlation": numpy.array([0.99, 0.5, 0.9]),
        }
    return found


def verdict(**changes):
    changes = {name.replace("__", "/"): value for name, value in changes.items()}
    both = {"chosen": Runs([0], [made_up() | changes]), "otherwise": Runs([0], [made_up()])}
    return failing(fig1, {"chosen": SETUP, "otherwise": SETUP}, both)


def test_claims_hold_on_numbers_that_the_paper_describes():
    assert verdict() == []
    runs = Runs([0], [made_up()])
    assert fig1.grown(runs) == pytest.approx([300 - 10 * math.log(9)], abs=3)
    assert fig1.at(runs, "mnist", "loss", numpy.array([300.0])) == pytest.approx([0.5])


def test_claims_fail_on_numbers_that_break_them():
    steps = made_up()["mnist/steps"]
    late = 0.5 - 0.4 * numpy.exp(-steps / 400)
    assert verdict(mnist__alignment=late) == ["silent", "separation", "stays"]
    falling = made_up()["mnist/alignment"] * (1 - 0.3 * (steps > 350))
    assert verdict(mnist__alignment=falling) == ["stays"]
    assert verdict(mnist__error=numpy.array([0.2, 0.4, 0.2])) == ["final-kernel"]
    assert verdict(mnist__error=numpy.array([0.05, 0.1, 0.05])) == ["initial-kernel"]
    assert verdict(cifar__error=numpy.array([0.3, 0.4, 0.3])) == ["cifar"]
    assert verdict(cifar__correlation=numpy.array([0.9, 0.4, 0.9])) == ["cifar-final-kernel"]
    assert verdict(residual__alignment=late) == ["residual-silent"]
    assert verdict(residual__correlation=numpy.array([0.7, 0.5, 0.9])) == ["residual-final-kernel"]
    assert verdict(residual__correlation=numpy.array([0.9, 0.95, 0.9])) == ["residual-initial-kernel"]
    assert verdict(residual__correlation=numpy.array([0.9, 0.5, 0.6])) == ["residual-adam"]


def test_verdicts_under_the_other_choices_are_told():
    late = made_up()["residual/steps"]
    turned = 0.5 - 0.4 * numpy.exp(-late / 400)
    other = made_up() | {"mnist/error": numpy.array([0.2, 0.4, 0.2]), "cifar/error": numpy.array([0.3, 0.4, 0.3])}
    both = {
        "chosen": Runs([0], [made_up() | {"residual/centered_alignment": turned}]),
        "otherwise": Runs([0], [other]),
    }
    claims = {one.id: one for one in fig1.claims({"chosen": SETUP, "otherwise": SETUP}, both)}
    assert all(one.holds for one in claims.values())
    told = {id: [each["verdict"] for each in one.details()["choices"]] for id, one in claims.items()}
    assert told["final-kernel"] == told["cifar"] == ["fails"]
    assert told["residual-silent"] == ["fails", "holds"]  # centered; raw pixels
    assert told["silent"] == ["holds"]


def test_the_other_set_up_differs_in_what_was_chosen():
    other = whitened.otherwise(SETUP)
    assert (other.mnist.cut, other.cifar.normalization, other.residual.normalization) == (1e-6, "unit", "unit")
    assert other.mnist.normalization == SETUP.mnist.normalization
    assert other.cifar.cut == SETUP.cifar.cut
