"""003 Fig. 2: correlations along training against Jacobians written out, and claims that must fail."""

from dataclasses import replace

import numpy
import pytest
import torch
from torch import nn

from featlearn.papers.context import Context
from featlearn.papers.models import GPT, MLP
from featlearn.papers.paper_003 import fig2, networks, tracking
from featlearn.papers.runs import Runs

SETUP = networks.SMOKE
IMAGES = tracking.Images(data="digits", samples=40, epochs=2, lr=3.0, batch=16, probe=11)


@pytest.fixture
def context(tmp_path):
    return Context(seed=4, folder=tmp_path)


def correlation(a, b, centred):
    a, b = (m - m.mean() if centred else m for m in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm()))


def test_a_perceptron_is_followed_as_its_jacobian_says(context):
    found = tracking.perceptron(IMAGES, 9, 2, context)
    assert found["steps"] == [1, 2, 3, 4]  # 40 images make two batches of 16 an epoch
    x, y = tracking.images(IMAGES, context)
    assert torch.allclose(y.sum(1), torch.zeros(40), atol=1e-6)
    model = MLP(
        64, 10, width=9, hidden_layers=2, distribution="uniform", weight_variance=1 / 3, generator=context.generator(1)
    )  # fmt: skip
    start = [layer.weight.detach().double().clone() for layer in model.hidden]
    order = context.generator(2)
    for _ in range(2):
        rows = torch.randperm(40, generator=order)
        for batch in (rows[:16], rows[16:32]):
            loss = (model(x[batch]) - y[batch]).square().sum() / (16 * 10)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for weight, gradient in zip(model.parameters(), gradients, strict=True):
                    weight -= 3.0 * gradient
    assert found["loss"][-1] == pytest.approx(float(loss.detach()), rel=1e-5)
    W, V, a = (weight.detach().double() for weight in model.parameters())
    h = x[:11].flatten(1).double() @ W.T
    g = torch.relu(h) @ V.T
    # rows of all ten outputs: (P, C, k)
    at_g = a[None] * (g > 0)[:, None]
    at_h = (at_g @ V) * (h > 0)[:, None]
    for layer, (now, J) in enumerate(((W, at_h), (V, at_g))):
        rows, moved = J.flatten(0, 1), now - start[layer]
        K = rows.T @ rows / 11
        for kind, centred in (("cosine", False), ("pearson", True)):
            for which, w in ((fig2.UNCENTRED, now), (fig2.CENTRED, moved)):
                expected = correlation(w.T @ w, w.T @ K @ w, centred)
                assert found[kind][-1][layer][which] == pytest.approx(expected, abs=1e-4)
        assert found["change"][-1][layer] == pytest.approx(float(moved.norm() / now.norm()), rel=1e-4)


def test_layers_of_a_gpt_come_as_query_key_and_value_of_each_block(context):
    """Column by column in the figure: a change of one layer alone must be seen in its column."""
    model = GPT(7, context=6, blocks=2, heads=2, width=8, generator=context.generator(1))
    options = {"layers": [f"blocks.*.attention.{part}" for part in ("query", "key", "value")],
               "readout": lambda logits: logits.flatten(1)}  # fmt: skip
    probe = torch.arange(12).view(2, 6) % 7
    tracker = tracking.FeatureTracker(model, probe, options, "GPT", context, 2)
    with torch.no_grad():
        model.blocks[1].attention.key.weight += 0.01
    tracker._measure(1, 0.0)
    assert [value > 0 for value in tracker.rows["change"][0]] == [False, False, False, False, True, False]


def test_a_gpt_learns_a_periodic_text(context):
    found = tracking.language_model(replace(SETUP.gpt, steps=30), context)
    assert found["loss"][0] == pytest.approx(numpy.log(7), rel=0.05)
    assert found["loss"][-1] < 1.0
    assert numpy.isfinite(found["cosine"]).all()
    assert numpy.shape(found["cosine"]) == (len(found["steps"]), 3, 2)


def test_momentum_and_warm_up_are_passed_on(context):
    """One step of plain SGD with the rate at half its value."""
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    x, y = torch.ones(4, 3), torch.zeros(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tracker = tracking.FeatureTracker(model, x, {}, "linear", context)
    tracker.through(iter([(x, y)]), nn.functional.mse_loss, optimizer, 1, warm=2)
    gradient = 2 * (x @ before.T).T @ x / 8
    assert torch.allclose(model.weight.detach(), before - 0.25 * gradient, atol=1e-6)


def made_up(difference, late, deep, centred=0.95):
    """Two seeds, four moments of 100 steps, four layers: C - UC is `difference`, `deep` more below, `late` at last."""
    gap = difference + deep * numpy.array([0, 0, 1, 1]) * numpy.array([1, 1, 1, 0])[:, None]
    gap[-1] = late
    values = numpy.stack([centred - gap, numpy.full_like(gap, centred)], -1)
    one = {}
    for name in [*SETUP.mlps, "vgg", "gpt"]:
        one |= {f"{name}/steps": numpy.array([1, 5, 10, 100]), f"{name}/cosine": values, f"{name}/pearson": values}
    return {claim.id: claim for claim in fig2.claims(SETUP, Runs([0, 1], [one, one]))}


def test_claims_hold_and_fail_as_the_numbers_say():
    good = made_up(0.2, 0.05, 0.1)
    assert all(claim.holds for claim in good.values())
    assert good["mlp-higher"].measured == pytest.approx((0.25 * 3 + 0.05) / 4)
    turned = made_up(-0.2, -0.1, -0.1, centred=0.5)
    assert not any(claim.holds for id, claim in turned.items() if not id.endswith("converge"))
    late = made_up(0.2, 0.4, 0.0)
    assert not late["vgg-early"].holds
    assert not late["gpt-deep"].holds
    assert not late["mlp-converge"].holds
    assert late["consistently"].holds
    assert not any(claim.known for claim in good.values())
