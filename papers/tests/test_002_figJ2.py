"""002 Fig. J.2: kernels of Adam's update along the way by hand, times in closed form, and claims that must fail.

The experiments of Fig. J.1 and J.3 are the same with other networks.
"""

from dataclasses import replace

import numpy
import pytest
import torch

from featlearn.models import WideResNet
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_002 import figJ2, residual
from featlearn_papers.paper_002.silence import two_classes
from featlearn_papers.paper_002.whitened import Residual
from papers.tests.residual_runs import SETUP, STEPS, changed, made_up
from papers.tests.verdicts import failing

TINY = Residual(data="digits", samples=6, test_samples=5, k=0.125, lr=1e-3, steps=4, stride=2)
CONTEXT = Context(seed=0, folder=None)


@pytest.fixture(scope="module")
def found():
    return residual.measure(residual.variants(TINY, "b", (1, 2)), CONTEXT)


def gradients(model, x):
    """(P, parameters), one backward pass for each output."""
    rows = [torch.autograd.grad(f, list(model.parameters()), retain_graph=True) for f in model(x)]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def test_kernels_along_the_way_are_those_of_adam_by_hand(found):
    """Adam (Kingma & Ba 2015, Alg. 1) written out, with the kernel sum_j eta_j d_j f d_j f' of Eq. 91."""
    task = two_classes(CONTEXT, "digits", 6, 5, flatten=False)
    model = WideResNet(0.125, 2, inputs=1, weight_variance=(36.0, 0.09, 1.0), generator=CONTEXT.generator(1)).double()
    x, y = task.x.double(), task.y.double()
    first, second = 0.0, 0.0
    plain, adam = [], []
    for step in range(5):
        J = gradients(model, x)
        if step in (1, 2, 4):
            scaled = J / ((second / (1 - 0.999**step)).sqrt() + 1e-8).sqrt()
            for kernel, row in ((J @ J.T, plain), (scaled @ scaled.T, adam)):
                row.append(float(y @ kernel @ y / (kernel.norm() * y @ y)))
        slope = J.T @ (model(x) - y).detach() / 6
        first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
        m, v = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.999 ** (step + 1))
        flat = torch.nn.utils.parameters_to_vector(model.parameters()) - 1e-3 * m / (v.sqrt() + 1e-8)
        torch.nn.utils.vector_to_parameters(flat.detach(), model.parameters())
    assert found["steps"][1].tolist() == [0, 1, 2, 4]
    assert numpy.allclose(found["alignment"][1, 1:], plain, rtol=1e-3)
    assert numpy.allclose(found["update_alignment"][1, 1:], adam, rtol=1e-3)
    assert abs(numpy.array(adam) / plain - 1).max() > 0.02  # they are not the same
    assert found["update_alignment"][:, 0].isnan().all()  # before the first step Adam has none


def test_networks_differ_in_one_field_and_share_images(found):
    assert found["predictions"].shape == (2, 4, 5)
    assert found["error"].shape == found["correlation"].shape == (2, 3)
    alone = residual.measure(residual.Setup(networks=(replace(TINY, b=1),)), CONTEXT)
    assert torch.equal(alone["loss"][0], found["loss"][0])
    assert not torch.equal(found["loss"][0], found["loss"][1])


def test_times_and_shares_in_closed_form():
    runs = Runs([0], [made_up()])
    assert residual.half_times(runs)[0] == pytest.approx([60, 30], abs=0.1)
    grown = residual.times(runs, "norm", 0.1)[0]  # 0.01 + logistic = 0.101
    assert grown == pytest.approx(numpy.array([60, 30]) - 3 * numpy.log(1 / 0.091 - 1), abs=0.1)
    wanted = (0.5 - 0.4 * numpy.exp(-grown / 5)) / 0.5
    assert residual.shares(runs, "alignment")[0] == pytest.approx(wanted, abs=1e-3)
    assert residual.shares(runs, "update_alignment")[0] == pytest.approx(wanted, abs=1e-3)
    assert residual.ratios(numpy.array([[1.0, 2.0, 3.0]])).tolist() == [[2.0, 1.5]]
    judged = residual.ordered(numpy.array([[1.0, 3.0, 2.0]]), rising=True)
    assert (judged["values"].tolist(), judged["choices"][0].values.tolist()) == ([2 / 3], [2.0])


def test_claims_fail_on_numbers_that_break_them():
    def verdict(found):
        return failing(figJ2, SETUP, Runs([0], [found]))

    good = made_up()
    assert verdict(good) == []
    assert verdict(made_up(later=1.2)) == ["faster"]
    assert verdict(made_up(amount=0.5)) == ["norm"]
    assert verdict(changed(good, 1, alignment=0.1 + STEPS / 100)) == ["silent-b=2"]
    assert verdict(changed(good, 0, error=[0.2, 0.5, 0.1])) == ["final-b=1"]
    assert verdict(changed(good, 0, error=[0.1, 0.15, 0.08])) == ["initial-b=1"]
    assert verdict(changed(good, 0, error=[0.1, 0.5, 0.3])) == ["adam"]
    nan = changed(good, 0, update_alignment=numpy.nan)
    told = {
        one.id: [each["verdict"] for each in one.details()["choices"]] for one in figJ2.claims(SETUP, Runs([0], [nan]))
    }
    assert told["silent-b=1"] == ["holds", "fails"]  # centered; Adam's
    assert told["final-b=1"] == told["norm"] == ["holds"]
    assert told["faster"] == ["holds", "holds"]
