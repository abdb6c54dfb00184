"""001 Fig. 4: its numbers against plain training and the closed form, and claims that must fail."""

import numpy
import pytest
import torch

import featlearn as fl
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_000 import linear_outputs
from featlearn_papers.paper_001 import fig4

SETUP = fig4.Setup(samples=14, inputs=5, width=7, gains=(0.2, 1.0), steps=240, stride=60)


@pytest.fixture(scope="module")
def numbers():
    found = fig4.measure(SETUP, Context(seed=2, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def task():
    data = fl.data.linear_teacher(14, 5, generator=Context(seed=2, folder=None).generator(), dtype=torch.float64)
    return data.x.numpy(), data.y.numpy(), data.target.weights.numpy()


def trained(gain):
    """Weights and kernel of plain gradient descent at the moments."""
    X, y, _ = task()
    generator, shapes = Context(seed=2, folder=None).generator(1), ((7, 5), (7, 7), (1, 7))
    W, U, V = (torch.randn(*shape, generator=generator).double().numpy() * gain / shape[1] ** 0.5 for shape in shapes)
    for step in range(SETUP.steps + 1):
        first, second = X @ W.T, X @ W.T @ U.T
        residual = (second @ V.T)[:, 0] - y
        if step % SETUP.stride == 0:
            kernel = X @ X.T * ((V @ U) ** 2).sum() + first @ first.T * (V**2).sum() + second @ second.T
            yield residual, (V @ U @ W)[0], W, kernel
        pull = -2 * SETUP.lr / len(y) * residual[None]
        W, U, V = W + (V @ U).T @ pull @ X, U + V.T @ pull @ first, V + pull @ second


def cosine(a, b):
    return (a * b).sum() / numpy.linalg.norm(a) / numpy.linalg.norm(b)


@pytest.mark.parametrize(("i", "gain"), list(enumerate(SETUP.gains)))
def test_networks_are_those_of_plain_training(numbers, i, gain):
    _, y, beta = task()
    for k, (residual, product, W, kernel) in enumerate(trained(gain)):
        expected = {
            "loss": (residual**2).sum() / (y**2).sum(),
            "teacher": cosine(product, beta),
            "first_layer": abs(cosine(numpy.linalg.svd(W)[2][0], beta)),
            "alignment": y @ kernel @ y / numpy.linalg.norm(kernel) / (y @ y),
            "top": abs(cosine(numpy.linalg.eigh(kernel)[1][:, -1], y)),
        }
        for name, value in expected.items():
            assert numbers[name][i, k] == pytest.approx(value, rel=1e-5, abs=1e-9), (name, k)


def test_the_last_kernel_is_compared_with_equation_12(numbers):
    X, y, _ = task()
    states = list(trained(SETUP.gains[0]))
    first, last, task_kernel = states[0][-1], states[-1][-1], numpy.outer(y, y)
    right, printed = 2 * task_kernel + X @ X.T, 2 * task_kernel + first  # s = 1
    assert numbers["final_distance"][0] == pytest.approx(1 - cosine(last, right), rel=1e-4)
    assert numbers["printed_distance"][0] == pytest.approx(1 - cosine(last, printed), rel=1e-4)
    assert numbers["best_top"] == pytest.approx(abs(cosine(numpy.linalg.eigh(right)[1][:, -1], y)), rel=1e-9)
    assert numbers["best"] == pytest.approx(y @ right @ y / numpy.linalg.norm(right) / (y @ y), rel=1e-9)


def test_small_weights_end_at_the_closed_form(numbers):
    assert numbers["alignment"][0, -1] == pytest.approx(float(numbers["best"]), rel=0.03)
    assert numbers["final_distance"][0] < 0.01 < numbers["final_distance"][1]


def made_up(**changes):
    """Runs in which all claims hold but that of the misprint."""
    rise = numpy.linspace(0, 1, 6) * numpy.ones((3, 1))
    teacher = {
        "steps": numpy.arange(6),
        "teacher": rise,
        "first_layer": rise,
        "alignment": 0.2 + 0.2 * rise,
        "top": 0.1 + 0.85 * rise,
        "best": numpy.array(0.4),
        "best_top": numpy.array(0.97),
        "final_distance": 0.01 * numpy.ones(3),
        "printed_distance": 0.3 * numpy.ones(3),
    }
    outputs = {"steps": numpy.arange(4), "classes": numpy.ones((2, 4, 10, 10)) + 0.01 * numpy.eye(10)}
    parts = {"teacher": teacher, "outputs": outputs}
    return {name: Runs([0], [part | changes.get(name, {})]) for name, part in parts.items()}


def failing(**changes):
    setups = {"teacher": fig4.Setup(), "outputs": linear_outputs.Setup()}
    return {claim.id for claim in fig4.claims(setups, made_up(**changes)) if not claim.holds}


def test_claims_hold_on_numbers_as_the_paper_has_them():
    assert failing() == {"final-kernel-printed"}


@pytest.mark.parametrize(
    ("part", "name", "act", "broken"),
    [
        ("teacher", "teacher", lambda v: 0.9 * v, {"teacher"}),
        ("teacher", "first_layer", lambda v: 0.9 * v, {"first-layer"}),
        ("teacher", "alignment", lambda v: v[:, ::-1], {"aligns", "maximum", "asymptote"}),
        ("teacher", "top", lambda v: v[:, ::-1], {"top", "top-end"}),
        ("teacher", "final_distance", lambda v: 3 * v, {"final-kernel"}),
        ("outputs", "classes", lambda v: v + 0.1 * numpy.eye(10), {"no-specialization", "no-specialization-ever"}),
        (
            "outputs",
            "classes",
            lambda v: v - 0.1 * numpy.eye(10) * (numpy.arange(4) == 1)[:, None, None],
            {"no-specialization-ever"},
        ),
    ],
)
def test_claims_fail_on_numbers_that_break_them(part, name, act, broken):
    values = made_up()[part][name][0]
    assert broken <= failing(**{part: {name: act(values)}})
