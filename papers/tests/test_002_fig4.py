"""002 Fig. 4, and what it shares with Fig. 1: numbers against obvious ones, and claims that must fail."""

from dataclasses import replace

import numpy
import pytest
import torch

from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_002 import fig4
from featlearn_papers.paper_002.silence import (
    TwoClasses,
    agreements,
    seen_directions,
    settled,
    train_and_measure,
    two_classes,
)
from papers.tests.verdicts import failing

SETUP = fig4.Setup(data="digits", powers=(0.0, 1.0))
CONTEXT = Context(seed=0, folder=None)


def made_up_task(samples=6, others=4, inputs=5):
    x = torch.randn(samples + others, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(samples)[: samples + others]
    return TwoClasses(x[:samples], y[:samples], x[samples:], y[samples:], x[:samples])


def test_directions_that_training_points_hardly_have_are_dropped():
    rows = torch.diag(torch.tensor([3.0, 1.0, 2e-3, 4e-3], dtype=torch.float64))
    rows = torch.cat([rows, torch.full((1, 4), 7.0, dtype=torch.float64)])
    kept = seen_directions(rows, 4)
    assert torch.allclose(kept[4], torch.tensor([7.0, 7.0, 0.0, 7.0], dtype=torch.float64))
    assert torch.allclose(kept[0], rows[0])


def kernel(W, a, x, z):
    """Of a . relu(W x), written out."""
    left, right = x @ W.T, z @ W.T
    gates = ((left > 0) * a) @ ((right > 0) * a).T
    return torch.relu(left) @ torch.relu(right).T + gates * (x @ z.T)


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_inputs_are_whitened_by_the_training_points_alone(power):
    task = two_classes(CONTEXT, "digits", 50, 20, power=power, mean_eigenvalue=0.25)
    raw = two_classes(CONTEXT, "digits", 50, 20, power=1.0, mean_eigenvalue=1.0)
    was, now = (torch.linalg.svdvals(each.double()).square() for each in (raw.x, task.x))
    kept = was > 1e-9 * was[0]
    assert float((now[kept] / 50).mean()) == pytest.approx(0.25, rel=1e-5)
    ratio = now[kept] / was[kept] ** power
    assert ratio / ratio[0] == pytest.approx(torch.ones(len(ratio)), rel=1e-3)
    # the same linear map for training and test points
    there = torch.linalg.lstsq(raw.x.double(), task.x.double(), driver="gelsd", rcond=1e-6).solution
    inside = raw.test_x.double() @ there
    seen = torch.linalg.svd(raw.x.double(), full_matrices=False).Vh[kept]
    assert torch.allclose(inside @ seen.T, task.test_x.double() @ seen.T, atol=1e-3)
    assert set(task.y.tolist()) == {-1.0, 1.0}
    again = two_classes(replace(CONTEXT, seed=1), "digits", 50, 20)
    assert not torch.equal(again.y, task.y)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_followed_network_has_the_curves_and_predictions_of_formulas(adaptive):
    """Descent by hand, kernels in closed form, and regressions by a solve."""
    task, lr = made_up_task(), 0.05
    model = MLP(5, None, width=40, hidden_layers=1, generator=torch.Generator().manual_seed(4)).double()
    W, a = (weight.detach().clone() for weight in model.parameters())
    a = a[0]
    made = torch.optim.Adam if adaptive else torch.optim.SGD
    path = train_and_measure(
        model, task, made(model.parameters(), lr=lr), CONTEXT, steps=4, stride=3, dtype=torch.float64
    )
    assert path.steps.tolist() == [0, 1, 2, 3]
    first = kernel(W, a, task.x, task.x), kernel(W, a, task.test_x, task.x)
    f0, test_f0 = torch.relu(task.x @ W.T) @ a, torch.relu(task.test_x @ W.T) @ a
    assert torch.allclose(path.start.kernel, first[0])
    wanted = test_f0 + first[1] @ torch.linalg.solve(first[0], task.y - f0)
    assert torch.allclose(path.predictions(task.y)[2], wanted)
    assert float(path.alignment[0]) == pytest.approx(float(task.y @ first[0] @ task.y / first[0].norm() / 6))
    assert float(path.norm[0]) == pytest.approx(float(first[0].norm()))
    assert float(path.loss[0]) == pytest.approx(float((f0 - task.y).square().mean()))
    assert float(path.test_error[0]) == pytest.approx(float((test_f0.sign() != task.test_y).double().mean()))
    if adaptive:
        return
    for _ in range(4):
        h = task.x @ W.T
        residual = (torch.relu(h) @ a - task.y) / 6
        W, a = W - lr * ((residual[:, None] * (h > 0)) * a).T @ task.x, a - lr * residual @ torch.relu(h)
    last, cross = kernel(W, a, task.x, task.x), kernel(W, a, task.test_x, task.x)
    found = path.predictions(task.y)
    assert torch.allclose(found[0], torch.relu(task.test_x @ W.T) @ a)
    assert torch.allclose(found[1], test_f0 + cross @ torch.linalg.solve(last, task.y - f0))
    assert torch.equal(found[3], found[1])
    errors, correlations = agreements(found)
    assert float(errors[1]) == pytest.approx(float((found[2] - found[0]).norm() / found[0].norm()))
    assert float(correlations[0]) == pytest.approx(numpy.corrcoef(found[1], found[0])[0, 1])


def test_the_kernel_of_adam_weighs_parameters_by_its_second_moments():
    task = made_up_task()
    model = MLP(5, None, width=3, hidden_layers=1, generator=torch.Generator().manual_seed(4)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    path = train_and_measure(model, task, optimizer, CONTEXT, steps=5, stride=5)
    rows = []
    for x in task.x:
        gradients = torch.autograd.grad(model(x[None]).sum(), list(model.parameters()))
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        moments = [state["exp_avg_sq"] / (1 - 0.999**5) for state in states]
        scaled = [g * (0.01 / (v.sqrt() + 1e-8)).sqrt() for g, v in zip(gradients, moments, strict=True)]
        rows.append(torch.cat([each.flatten() for each in scaled]))
    assert torch.allclose(path.update.kernel, torch.stack(rows) @ torch.stack(rows).T)


def test_a_curve_has_settled_when_it_does_not_leave_again():
    steps = numpy.array([0, 1, 2, 5, 9])
    assert settled(steps, numpy.array([0.1, 1.0, 1.3, 1.05, 1.0])) == 5
    assert settled(steps, numpy.array([1.0, 1.0, 1.0, 1.0, 1.0])) == 0
    assert settled(steps, numpy.array([0.1, 0.2, 0.3, 0.4, 1.0])) == 9


@pytest.mark.parametrize("dropped", [[0, 1], [2, 0], [0, 0]])
def test_directions_that_were_dropped_do_not_count_in_any_seed(dropped):
    ranks = numpy.arange(1.0, 21)
    spectra = []
    for count in dropped:
        kept = ranks <= 20 - count
        # what rounding leaves of them
        spectra.append(numpy.stack([numpy.where(kept, ranks**-1, 3e-16), numpy.where(kept, ranks**-2, 2e-18)]))
    found = fig4.exponents(Runs([0, 1], [{"spectrum": each} for each in spectra]))
    assert found == pytest.approx(numpy.array([[0.5, 1.0]] * 2))


def test_claims_fail_on_numbers_that_break_them():
    """Whitened: settled at once, one fall. Unwhitened: slow in everything."""
    steps = numpy.concatenate([numpy.arange(10), numpy.arange(10, 1001, 10)]).astype(float)
    time = numpy.stack([steps, steps])
    fast, slow = 1 / (1 + numpy.exp((steps - 50) / 5)), (1 + steps / 3) ** -0.8
    ranks = numpy.arange(1.0, 21)
    good = {
        "steps": time,
        "loss": numpy.stack([fast, slow]),
        "norm": numpy.stack([1 - fast, 1 - numpy.exp(-steps / 300)]),
        "alignment": numpy.stack([1 - 0.9 * numpy.exp(-steps), 1 - 0.9 * numpy.exp(-steps / 100)]),
        "spectrum": numpy.stack([ranks**0, ranks**-2]),
        "error": numpy.array([[0.05, 0.5, 0.5], [0.2, 0.5, 0.5]]),
    }

    def verdict(**changes):
        return failing(fig4, SETUP, Runs([0], [good | changes]))

    assert verdict() == []
    assert verdict(spectrum=numpy.stack([ranks**-0.1, ranks**-2])) == ["spectra"]
    assert verdict(loss=numpy.stack([slow, slow])) == ["time-scales"]
    assert verdict(norm=good["norm"][[1, 1]]) == ["norm"]
    assert verdict(alignment=good["alignment"][[1, 1]]) == ["alignment", "not-silent"]
    assert verdict(error=numpy.array([[0.14, 0.5, 0.5], [0.16, 0.5, 0.5]])) == ["final-kernel"]
    assert verdict(error=numpy.array([[0.05, 0.5, 0.5], [0.07, 0.5, 0.5]])) == ["no-kernel-machine"]
    assert verdict(error=numpy.array([[0.05, 0.5, 0.5], [0.2, 0.25, 0.5]])) == ["beats-initial"]
    assert verdict(error=numpy.array([[0.25, 0.5, 0.5], [0.34, 0.5, 0.5]])) == ["fits-whitened"]
