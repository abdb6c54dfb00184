"""000 Fig. 6: its numbers against dense Jacobians, the feature rate against the library, claims that must fail."""

import numpy
import pytest
import torch

import featlearn as fl
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_000 import depth, fig6, mnist
from papers.tests.verdicts import failing

TRAINING = mnist.Setup(data="digits", samples=12, test_samples=7, width=9, lr=5.0, steps=5, growth=2.0)
SETUP = depth.Setup(hidden_layers=(1, 3), training=TRAINING)


@pytest.fixture(scope="module")
def numbers():
    found = depth.measure(SETUP, Context(seed=1, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def plain(given, hidden_layers):
    """The same training by dense Jacobians: losses, whole kernels (T, P C, P C), and those of the readout."""
    shapes = [(9, 64), *[(9, 9)] * (hidden_layers - 1), (10, 9)]
    generator = Context(seed=1, folder=None).generator(2)
    weights = tuple(torch.randn(shape, generator=generator).double() for shape in shapes)
    scales = [1 / 8, *[(2 / 9) ** 0.5] * (hidden_layers - 1), 1 / 3]
    x, y = given.x.double(), given.y.double().flatten()

    def network(*each):
        h = x
        for scale, weight in zip(scales[:-1], each[:-1], strict=True):
            h = (scale * h @ weight.T).relu()
        return (scales[-1] * h @ each[-1].T).flatten()

    losses, kernels, readouts = [], [], []
    for _ in range(TRAINING.steps + 1):
        parts = [j.flatten(1) for j in torch.func.jacrev(network, tuple(range(len(weights))))(*weights)]
        f, jacobian = network(*weights), torch.cat(parts, 1)
        losses.append(float((f - y).square().mean()))
        kernels.append((jacobian @ jacobian.T).numpy())
        readouts.append((parts[-1] @ parts[-1].T).numpy())
        change = (jacobian.T @ (f - y)) * 2 * TRAINING.lr / 120
        pieces = change.split([w.numel() for w in weights])
        weights = tuple(w - piece.view_as(w) for w, piece in zip(weights, pieces, strict=True))
    return losses, kernels, readouts


@pytest.mark.parametrize(("place", "hidden_layers"), [(0, 1), (1, 3)])
def test_numbers_are_those_of_dense_jacobians(numbers, place, hidden_layers):
    given = mnist.task(TRAINING, Context(seed=1, folder=None))
    losses, kernels, readouts = plain(given, hidden_layers)
    Y = given.y.double().numpy()
    assert numbers["steps"].tolist() == [0, 1, 2, 4, 5]
    for i, step in enumerate([0, 1, 2, 4, 5]):
        assert numbers["loss"][place, i] == pytest.approx(losses[step], rel=1e-4)
        whole, readout = (K[step].reshape(12, 10, 12, 10) for K in (kernels, readouts))
        mean, task = numpy.einsum("icjc->ij", whole) / 10, Y @ Y.T
        aligned = (mean * task).sum() / numpy.linalg.norm(mean) / numpy.linalg.norm(task)
        assert numbers["alignment"][place, i] == pytest.approx(aligned, rel=1e-4)
        assert numbers["norm"][place, i] == pytest.approx(numpy.linalg.norm(mean), rel=1e-4)
        top = 2 * TRAINING.lr / 120 * numpy.linalg.eigvalsh(mean)[-1]
        assert numbers["sharpness"][place, i] == pytest.approx(top, rel=1e-4)
        for part, K in enumerate((whole, readout, whole - readout)):
            for target in numpy.flatnonzero(Y.any(0)):
                y, own = Y[:, target], K[:, 4, :, 4]
                value = y @ own @ y / numpy.linalg.norm(own) / (y @ y)
                assert numbers["classes"][place, i, part, 4, target] == pytest.approx(value, rel=1e-3)
    ends = [2 * TRAINING.lr / 120 * numpy.linalg.eigvalsh(kernels[step])[-1] for step in (0, 5)]
    assert numbers["stability"][place] == pytest.approx(ends, rel=1e-3)


def test_the_feature_rate_is_that_of_the_library():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 3, 8, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    before, after = features @ features.mT
    after = after + 0.4 * torch.einsum("pc,qc->cpq", y, y)
    A0, A1 = (numpy.diagonal(fl.metrics.class_alignment(K, y).numpy()) for K in (before, after))
    rate = fl.metrics.feature_rate(before, after, y, normalized=True)
    assert depth.effective_rate(A0, A1).mean() == pytest.approx(float(rate))


DEPTHS = depth.Setup(training=TRAINING)
STEPS = numpy.array([0.0, 1.0, 2.0, 4.0, 8.0])
RISE = numpy.array([0.0, 0.1, 0.4, 0.8, 1.0])


def made_up(strength=(1.0, 2.0, 3.0, 4.0), contrast=(1.0, 2.0, 3.0, 4.0), stability=0.5):
    """Alignments that rise by 0.05 times a strength; contrasts on the diagonal of the class alignments."""
    traced = 0.3 + 0.05 * numpy.outer(strength, RISE)
    own = 0.1 + 0.05 * numpy.outer(strength, RISE)
    rest = own[..., None, None] * (1 - 0.05 * numpy.array(contrast)[:, None, None, None] * (1 - numpy.eye(10)))
    classes = numpy.repeat(rest[:, :, None], 3, axis=2)
    return Runs(
        [0],
        [
            {
                "steps": STEPS,
                "alignment": traced,
                "centered_alignment": traced,
                "classes": classes,
                "centered_classes": classes,
                "stability": numpy.full((4, 2), stability),
            }
        ],
    )


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"strength": (1, 3, 2, 4)}, ["deeper-higher", "deeper-earlier", "rate-grows"]),
        ({"strength": (4, 3, 2, 1)}, ["deeper-higher", "deepest-higher", "deeper-earlier", "rate-grows"]),
        ({"contrast": (1, 3, 2, 2.5)}, ["deeper-specialized", "specialization-grows"]),
        ({"contrast": (1, 2, 1.5, 4)}, ["specialization-grows"]),
        ({"contrast": (-4, -3, -2, -1)}, ["specialized"]),
        ({"stability": 2.1}, ["stable"]),
    ],
)
def test_claims_fail_on_numbers_that_break_them(changes, broken):
    assert failing(fig6, DEPTHS, made_up(**changes)) == broken


def test_a_rise_begins_when_it_has_half_of_that_of_the_shallowest():
    found = fig6.starts(made_up())[0]
    # half of 1 is a quarter of the way from 0.4 to 0.8; half of it, 1/4 of 2, between 0.1 and 0.4
    assert found[:2] == pytest.approx([2 + 2 * 0.25, 1 + 0.15 / 0.3])
    assert numpy.isnan(fig6.starts(made_up(strength=(-1, 1, 2, 3)))).all()


def test_a_rise_that_falls_back_begins_with_the_last_crossing():
    steps = numpy.arange(5.0)
    assert fig6._last_crossing(steps, numpy.array([-1.0, 1.0, -1.0, 1.0, 2.0])) == pytest.approx(2.5)
    assert numpy.isnan(fig6._last_crossing(steps, numpy.array([-1.0, 1.0, -1.0, 1.0, -2.0])))
