"""001 Fig. 7: its numbers against plain training, and claims that must fail."""

import numpy
import pytest
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_001 import fig7, mixture

SETUP = mixture.Setup(inputs=40, width=90, samples=12, classes=3, lr=0.3, steps=8, stride=2)
N, C = 4, 3


@pytest.fixture(scope="module")
def numbers():
    found = mixture.measure(SETUP, Context(seed=1, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def trained():
    """The same run by plain numpy: one dictionary for each step."""
    generator = Context(seed=1, folder=None).generator()
    centers = torch.randn(C, SETUP.inputs, generator=generator, dtype=torch.float64).numpy()
    centers /= numpy.linalg.norm(centers, axis=1, keepdims=True)
    noise = torch.randn(SETUP.samples, SETUP.inputs, generator=generator, dtype=torch.float64).numpy()
    labels = numpy.arange(SETUP.samples) % C
    x, y = centers[labels] + noise * (0.01 / SETUP.inputs) ** 0.5, numpy.eye(C)[labels]
    W = torch.randn(SETUP.width, SETUP.inputs, generator=generator).double().numpy() / SETUP.inputs**0.5
    V = torch.randn(C, SETUP.width, generator=generator).double().numpy() / SETUP.width**0.5
    first = x @ W.T > 0
    for _ in range(SETUP.steps + 1):
        gates, features = x @ W.T > 0, numpy.maximum(x @ W.T, 0)
        f = features @ V.T
        K_V = features @ features.T
        K_W = [(x @ x.T) * ((gates * v**2) @ gates.T) for v in V]
        yield {
            "loss": ((f - y) ** 2).sum(1).mean(),
            "readout": [y[:, d] @ K_V @ y[:, d] / N for d in range(C)],
            "hidden": [[y[:, d] @ K @ y[:, d] / N for d in range(C)] for K in K_W],
            "flips": (gates != first).mean(),
            "sign": (y * f).sum(0) / N,
            "centers": numpy.maximum(centers @ W.T, 0) @ V.T,
        }
        pull = 2 * SETUP.lr / SETUP.samples * (y - f)
        W, V = W + ((pull @ V) * gates).T @ x, V + pull.T @ features


def test_kernels_and_gates_are_those_of_the_weights(numbers):
    assert list(numbers["steps"]) == [0, 2, 4, 6, 8]
    for i, expected in enumerate(list(trained())[:: SETUP.stride]):
        for name in ("loss", "readout", "hidden", "sign"):
            assert numbers[name][i] == pytest.approx(numpy.array(expected[name]), rel=1e-3, abs=1e-4), (name, i)
        assert numbers["flips"][i] == pytest.approx(expected["flips"], abs=3e-3)


def test_theory_is_the_sum_of_its_rates_over_the_steps(numbers):
    """2 rate n^2 [|x|^2 + (n - 1) m] (sum_e s_ce + s_cd) / 2 with s_ce = (delta_ce - f_c(e)) f_c(e), over n."""
    rate, hidden, readout = 2 * SETUP.lr / SETUP.samples, numpy.zeros((C, C)), numpy.zeros(C)
    for step, state in enumerate(trained()):
        if step % SETUP.stride == 0:
            assert numbers["theory/hidden"][step // SETUP.stride] == pytest.approx(hidden, rel=2e-3, abs=1e-5)
            assert numbers["theory/readout"][step // SETUP.stride] == pytest.approx(readout, rel=2e-3, abs=1e-5)
        s = ((numpy.eye(C) - state["centers"]) * state["centers"]).T  # [c, e]
        factor = rate * N**2 * (1.01 + (N - 1)) / N
        hidden = hidden + factor * (s.sum(1, keepdims=True) + s)
        readout = readout + 2 * factor * s.sum(0)


def made_up(**changes):
    """Runs in which all claims hold but that of the misprint; arrays of one seed, moments first."""
    steps = numpy.arange(0, 151, 5)
    rise = 1 - numpy.exp(-steps / 30)
    twice = rise[:, None, None] * (1 + numpy.eye(10))
    mix = {
        "steps": steps,
        "readout": 20 * numpy.outer(rise, numpy.ones(10)),
        "hidden": 10 * twice,
        "flips": 0.07 * rise,
        "theory/readout": 20 * numpy.outer(rise, numpy.ones(10)),
        "theory/hidden": 11 * twice,
        "sign": numpy.outer(rise, numpy.ones(10)) - 0.01 * (steps == 0)[:, None],
    }
    spread = 1 + 0.1 * numpy.linspace(-1, 1, 10)
    own = 0.01 + 0.05 * numpy.eye(10)
    readout = numpy.broadcast_to(0.1 * spread, (10, 10))
    classes = numpy.array([[scale * part for part in (own, readout, own)] for scale in (0.0, 1.0)])
    mnist = {"mse/steps": numpy.array([0, 9]), "mse/classes": classes, "mse/centered_classes": classes}
    parts = {"mixture": mix, "noisy": mix, "mnist": mnist}
    return {name: Runs([0], [part | changes.get(name, {})]) for name, part in parts.items()}


def failing(**changes):
    setups = {"mixture": mixture.Setup(), "noisy": mixture.Setup(), "mnist": None}
    return {claim.id for claim in fig7.claims(setups, made_up(**changes)) if not claim.holds}


def test_claims_hold_on_numbers_as_the_paper_has_them():
    assert failing() == {"hidden-size-printed"}


@pytest.mark.parametrize(
    ("part", "name", "act", "broken"),
    [
        ("mixture", "readout", lambda v: v * numpy.linspace(0.5, 1.5, 10), {"readout-alike"}),
        ("mixture", "readout", lambda v: 2 * v, {"readout-size"}),
        ("mixture", "hidden", lambda v: v ** (1 - numpy.eye(10)), {"hidden-twice", "hidden-each", "hidden-size"}),
        ("mixture", "hidden", lambda v: v * (1 + 3 * numpy.eye(10)[3]), {"hidden-each"}),
        ("mixture", "flips", lambda v: v + 0.1, {"gates"}),
        ("mixture", "sign", lambda v: v * numpy.where(numpy.arange(10) == 4, -1, 1), {"sign"}),
        ("mnist", "mse/classes", lambda v: v[..., ::-1], {"mnist-hidden", "mnist-hidden-highly"}),
        ("mnist", "mse/classes", lambda v: v * numpy.linspace(-1, 3, 10), {"mnist-readout"}),
        ("mnist", "mse/classes", lambda v: v * numpy.linspace(1, 2, 10)[:, None], {"mnist-readout-shared"}),
    ],
)
def test_claims_fail_on_numbers_that_break_them(part, name, act, broken):
    values = made_up()[part][name][0]
    assert broken <= failing(**{part: {name: act(values)}})
