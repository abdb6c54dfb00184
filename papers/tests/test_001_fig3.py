"""001 Fig. 3: its numbers against plain training, and claims that must fail."""

from dataclasses import replace

import numpy
import pytest
import torch

from featlearn.models import CNN
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_001 import convolution, fig3

SETUP = convolution.Setup(
    data="digits", samples=11, probe=6, width=4, kernel_size=3, batch=4, epochs=3, epochs_measured=(0, 1, 3)
)


@pytest.fixture(scope="module")
def numbers():
    found = convolution.measure(SETUP, Context(seed=3, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def trained():
    """Outputs and kernels (C, P, P) on the probe by plain descent in double, after every epoch."""
    context = Context(seed=3, folder=None)
    x, y = (each.double() for each in convolution.task(SETUP, context))
    model = CNN(
        1,
        2,
        width=4,
        kernel_size=3,
        parametrization="ntk",
        weight_variance=(1.0, 2.0, 1.0),
        generator=context.generator(1),
    ).double()
    weights, order = {name: weight.detach() for name, weight in model.named_parameters()}, context.generator(2)

    def network(these, inputs):
        return torch.func.functional_call(model, these, (inputs,))

    def loss(these, chosen):
        return (network(these, x[chosen]) - y[chosen]).square().sum() / (len(chosen) * SETUP.divisor)

    for epoch in range(SETUP.epochs + 1):
        for chosen in torch.randperm(SETUP.samples, generator=order).split(SETUP.batch) if epoch else ():
            gradient = torch.func.grad(loss)(weights, chosen)
            weights = {name: weight - SETUP.lr * gradient[name] for name, weight in weights.items()}
        jacobian = torch.func.jacrev(network)(weights, x[: SETUP.probe])
        rows = torch.cat([each.flatten(2) for each in jacobian.values()], 2)
        yield (
            network(weights, x[: SETUP.probe]).numpy(),
            torch.einsum("mcp,ncp->cmn", rows, rows).numpy(),
            y[:6].numpy(),
        )


def test_kernels_are_those_of_plain_training(numbers):
    states = list(trained())
    assert list(numbers["steps"]) == [0, 3, 9]
    for i, epoch in enumerate(SETUP.epochs_measured):
        f, kernels, y = states[epoch]
        assert numbers["loss"][i] == pytest.approx(((f - y) ** 2).sum(1).mean(), rel=1e-3)
        assert numbers["accuracy"][i] == pytest.approx((f.argmax(1) == y.argmax(1)).mean())
        expected = [[t @ K @ t / numpy.linalg.norm(K) / (t @ t) for t in y.T] for K in kernels]
        assert numbers["classes"][i] == pytest.approx(numpy.array(expected), rel=1e-3)
        largest = numpy.linalg.eigvalsh(kernels.mean(0))[-1]
        assert numbers["stability"][i] == pytest.approx(2 * SETUP.lr / SETUP.divisor * largest / SETUP.probe, rel=1e-3)


def test_a_network_that_overflows_has_no_numbers_from_then_on():
    found = convolution.measure(replace(SETUP, lr=1e30), Context(seed=3, folder=None))
    assert as_array(found["loss"], "loss")[0] > 0
    for name in ("loss", "accuracy", "classes", "centered_classes", "stability"):
        values = as_array(found[name], name)
        assert numpy.isfinite(values[0]).all()
        assert numpy.isnan(values[-1]).all()


def test_two_complementary_targets_are_one_when_centered(numbers):
    assert numbers["centered_classes"][..., 0] == pytest.approx(numbers["centered_classes"][..., 1], rel=1e-5)


def made_up(**changes):
    """Runs in which all claims hold."""
    cifar = {
        "steps": numpy.array([0, 100]),
        "accuracy": numpy.array([0.5, 0.8]),
        "classes": numpy.array([numpy.ones((2, 2)), numpy.ones((2, 2)) + 0.1 * numpy.eye(2)]),
        "centered_classes": numpy.ones((2, 2, 2)),
    }
    classes = numpy.ones((2, 3, 10, 10)) + numpy.array([0.0, 0.1])[:, None, None, None] * numpy.eye(10)
    mnist = {"mse/steps": numpy.array([0, 100]), "mse/classes": classes, "mse/centered_classes": classes}
    parts = {"mnist": mnist, "cifar": cifar, "fast": cifar}
    return {name: Runs([0], [part | changes.get(name, {})]) for name, part in parts.items()}


def failing(**changes):
    return {claim.id for claim in fig3.claims({}, made_up(**changes)) if not claim.holds}


def test_claims_hold_on_numbers_as_the_paper_has_them():
    assert failing() == set()


@pytest.mark.parametrize(
    ("part", "name", "act", "broken"),
    [
        ("mnist", "mse/classes", lambda v: v[..., ::-1], {"mnist", "mnist-columns"}),
        ("mnist", "mse/classes", lambda v: v[::-1], {"mnist-trained", "mnist-columns"}),
        ("cifar", "classes", lambda v: v[..., ::-1], {"cifar", "cifar-trained", "cifar-columns"}),
        (
            "cifar",
            "classes",
            lambda v: v[[1, 1]] + numpy.eye(2) * numpy.array([0.1, 0])[:, None, None],
            {"cifar-trained"},
        ),
        ("cifar", "classes", lambda v: v * numpy.array([[1.2], [1.0]]), {"cifar-columns"}),
        ("cifar", "accuracy", lambda v: v - 0.3, {"cifar-learns"}),
        ("cifar", "centered_classes", lambda v: v + 0.1 * numpy.eye(2), {"cifar-centered"}),
    ],
)
def test_claims_fail_on_numbers_that_break_them(part, name, act, broken):
    values = made_up()[part][name][0]
    assert broken <= failing(**{part: {name: act(values)}})
