"""000 Fig. 4: linear networks against their kernels in closed form, the matrix, and claims that must fail."""

import numpy
import pytest
import torch

import featlearn as fl
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_000 import fig4, linear_outputs, specialization
from papers.tests.verdicts import failing

SETUP = linear_outputs.Setup(inputs=5, width=6, samples=9, outputs=3, lr=0.8, steps=12, moments=3)


def aligned(K, y):
    return y @ K @ y / numpy.linalg.norm(K) / (y @ y)


def test_linear_networks_have_the_kernels_of_the_closed_form():
    """Plain descent, and K^cc as a sum over layers of the weights above times the Gram matrix below."""
    context = Context(seed=1, folder=None)
    found = linear_outputs.measure(SETUP, context)
    X, Y = (one.numpy() for one in linear_outputs.task(SETUP, context.generator()))
    assert numpy.linalg.norm(X, axis=1) == pytest.approx(numpy.ones(9))
    assert found["steps"].tolist() == [0, 4, 8, 12]
    for g, gain in enumerate(SETUP.gains):
        generator = context.generator(1)
        shapes = ((6, 5), (6, 6), (6, 6), (3, 6))
        weights = [gain * torch.randn(shape, generator=generator).double().numpy() for shape in shapes]
        scales = numpy.array([1 / shape[1] ** 0.5 for shape in shapes])
        for step in range(SETUP.steps + 1):
            scaled = [scale * weight for scale, weight in zip(scales, weights, strict=True)]
            below, above = [X.T], [numpy.eye(3)]
            for weight in scaled:
                below.append(weight @ below[-1])
            for weight in reversed(scaled):
                above.append(above[-1] @ weight)
            above.reverse()
            pull = 2 * SETUP.lr / Y.size * (below[-1] - Y.T)
            if step % 4 == 0:
                loss = ((below[-1] - Y.T) ** 2).mean()
                assert found["loss"][g, step // 4] == pytest.approx(loss, rel=1e-6)
                grams = [scale**2 * h.T @ h for scale, h in zip(scales, below, strict=False)]
                weigh = [a @ a.T for a in above[1:]]
                each = [sum(w[c, c] * gram for w, gram in zip(weigh, grams, strict=True)) for c in range(3)]
                expected = [[aligned(K, y) for y in Y.T] for K in each]
                assert found["classes"][g, step // 4] == pytest.approx(numpy.array(expected), rel=1e-6)
                mean, task = sum(each) / 3, Y @ Y.T
                value = (mean * task).sum() / numpy.linalg.norm(mean) / numpy.linalg.norm(task)
                assert found["alignment"][g, step // 4] == pytest.approx(value, rel=1e-6)
            weights = [
                weight - scale * (a.T @ pull) @ h.T
                for weight, scale, a, h in zip(weights, scales, above[1:], below, strict=False)
            ]


def test_symmetry_is_the_spread_of_the_weights_in_the_kernels():
    """alpha(c, c) of the last hidden layer is |V_c|^2."""
    setup = linear_outputs.Setup(inputs=5, width=6, samples=9, outputs=3, hidden_layers=1, lr=1e-9, steps=1, moments=1)
    found = linear_outputs.measure(setup, Context(seed=1, folder=None))
    generator = Context(seed=1, folder=None).generator(1)
    _, V = (torch.randn(shape, generator=generator).double().numpy() for shape in ((6, 5), (3, 6)))
    sizes = (V**2).sum(1)
    assert found["symmetry"] == pytest.approx(numpy.full((2, 1), sizes.std(ddof=1) / sizes.mean()), rel=1e-6)


def test_the_matrix_is_that_of_the_library():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(4, 7, 5, generator=generator, dtype=torch.float64)
    kernels, Y = features @ features.mT, torch.randn(7, 4, generator=generator, dtype=torch.float64)
    matrix = specialization.specialization(fl.metrics.class_alignment(kernels, Y).numpy())
    assert matrix == pytest.approx(fl.metrics.specialization(kernels, Y).numpy())
    assert matrix.mean(0) == pytest.approx(numpy.ones(4))


def test_diagonal_and_rest_of_a_matrix():
    matrix = numpy.array([[1.2, 0.9, 1.0], [0.8, 1.2, 0.9], [1.0, 0.9, 1.1]])
    diagonal, others = specialization.diagonal_and_others(matrix)
    assert (diagonal, others) == pytest.approx((3.5 / 3, 5.5 / 6))
    assert specialization.contrast(matrix) == pytest.approx(3.5 / 3 - 5.5 / 6)  # its columns have mean 1
    assert specialization.own_peaks(matrix) == 1.0
    assert specialization.own_peaks(matrix[[1, 0, 2]]) == pytest.approx(1 / 3)


def classes(contrast, count=4):
    """(T, C, C): three moments, from none to this much on the diagonal."""
    return 0.1 + contrast * numpy.linspace(0, 0.1, 3)[:, None, None] * numpy.eye(count)


def made_up(**changes):
    linear = {
        "classes": numpy.stack([classes(0.0)] * 2),
        "alignment": numpy.tile([0.2, 0.4, 0.6], (2, 1)),
        "loss": numpy.tile([1.0, 0.1, 1e-4], (2, 1)),
        "symmetry": numpy.full((2, 3), 0.05),
        "steps": numpy.arange(3),
    }
    parts = numpy.stack([classes(1.0)] * 3, 1)
    found = {
        "relu": {"mse/classes": parts, "mse/centered_classes": parts, "mse/steps": numpy.arange(3)},
        "depth": {"classes": parts[None]},
        "linear": linear,
        "narrow": linear,
    }
    for name, act in changes.items():
        experiment, number = name.split("_", 1)
        number = f"mse/{number}" if experiment == "relu" else number
        found[experiment] = found[experiment] | {number: act(found[experiment][number])}
    return {name: Runs([0], [numbers]) for name, numbers in found.items()}


SETUPS = {"linear": linear_outputs.Setup(), "narrow": linear_outputs.Setup(), "relu": None, "depth": None}


def specialized(v):
    return v + 0.01 * numpy.eye(4)


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"relu_classes": lambda v: v[::-1] + 0.001 * numpy.eye(4)}, ["during-training"]),
        ({"relu_classes": lambda v: v[:, :, [1, 0, 3, 2]]}, ["specialized", "every-output", "during-training"]),
        ({"relu_classes": lambda v: v[:, :, [1, 0, 2, 3]]}, ["every-output"]),
        ({"linear_classes": specialized}, ["linear-alike"]),
        ({"narrow_classes": specialized}, ["narrow-alike"]),
        ({"linear_alignment": lambda v: v[:, ::-1]}, ["linear-aligns"]),
        ({"linear_symmetry": lambda v: 3 * v}, ["symmetry"]),
        ({"linear_loss": lambda v: v**0.1}, ["linear-learns"]),
    ],
)
def test_claims_fail_on_numbers_that_break_them(changes, broken):
    assert failing(fig4, SETUPS, made_up(**changes)) == broken


def test_one_hidden_layer_and_centered_alignments_are_the_other_choices():
    runs = made_up(depth_classes=lambda v: v[:, :, :, [1, 0, 3, 2]])
    claim = next(one for one in fig4.claims(SETUPS, runs) if one.id == "specialized")
    told = [(one["made"], one["verdict"]) for one in claim.details()["choices"]]
    assert told == [("raw alignments", "holds"), ("two hidden layers", "fails")]
