"""003 Fig. 2: correlations along training against Jacobians written out, and claims that must fail."""

from dataclasses import replace

import numpy
import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.models import GPT, MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003 import fig2, networks, tracking

IMAGES = tracking.Perceptron(
    data="digits", samples=40, unseen=12, epochs=2, lr=3.0, batch=16, probe=11, width=9, hidden_layers=2
)


@pytest.fixture
def context(tmp_path):
    return Context(seed=4, folder=tmp_path)


def correlation(a, b, centered):
    a, b = (m - m.mean() if centered else m for m in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm()))


def test_pixels_are_standardized_by_the_training_images(context):
    (x, _), (test_x, _) = tracking.image_pairs(replace(IMAGES, standardized=True), context)
    (raw, _), (raw_test, _) = tracking.image_pairs(IMAGES, context)
    assert float(raw.min()) >= 0.0
    assert float(x.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(x.double().std(correction=0)) == pytest.approx(1.0, rel=1e-6)
    expected = (raw_test - raw.mean()) / raw.std(correction=0)
    torch.testing.assert_close(test_x, expected, rtol=1e-5, atol=1e-6)


def test_a_perceptron_is_followed_as_its_jacobian_says(context):
    found = tracking.perceptron(IMAGES, context)
    assert found["steps"] == [1, 2, 3, 4]  # 40 images make two batches of 16 an epoch
    x, y = tracking.images(IMAGES, context)
    assert torch.allclose(y.sum(1), torch.zeros(40), atol=1e-6)
    model = MLP(
        64, 10, width=9, hidden_layers=2, distribution="uniform", weight_variance=1 / 3, generator=context.generator(1)
    )
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
    for name, (inputs, targets) in {"train": (x, y), "test": tracking.images(IMAGES, context, "test")}.items():
        expected = (model(inputs) - targets).square().sum() / targets.numel()
        assert found[name][-1] == pytest.approx(float(expected.detach()), rel=1e-5)
    W, V, a = (weight.detach().double() for weight in model.parameters())
    h = x[:11].flatten(1).double() @ W.T
    g = torch.relu(h) @ V.T
    # rows of all ten outputs: (P, C, k)
    at_g = a[None] * (g > 0)[:, None]
    at_h = (at_g @ V) * (h > 0)[:, None]
    for layer, (now, J) in enumerate(((W, at_h), (V, at_g))):
        rows, moved = J.flatten(0, 1), now - start[layer]
        K = rows.T @ rows / 11
        for kind, centered in (("cosine", False), ("pearson", True)):
            for which, w in ((fig2.UNCENTERED, now), (fig2.CENTERED, moved)):
                expected = correlation(w.T @ w, w.T @ K @ w, centered)
                assert found[kind][-1][layer][which] == pytest.approx(expected, abs=1e-4)
        assert found["change"][-1][layer] == pytest.approx(float(moved.norm() / now.norm()), rel=1e-4)


def tracker(model, probe, options, context, readout=None):
    session = fl.Session(model, probe, readout=readout)
    judged = dict.fromkeys(("train", "test"), (probe, probe))
    return tracking.FeatureTracker(session, options, lambda f, y: f.mean(), judged, "", context)


def test_layers_of_a_gpt_come_as_query_key_and_value_of_each_block(context):
    """Column by column in the figure: a change of one layer alone must be seen in its column."""
    model = GPT(7, context=6, blocks=2, heads=2, width=8, generator=context.generator(1))
    options = {"layers": [f"blocks.*.attention.{part}" for part in ("query", "key", "value")], "probes": 2}
    followed = tracker(model, torch.arange(12).view(2, 6) % 7, options, context, lambda logits: logits.flatten(1))
    with torch.no_grad():
        model.blocks[1].attention.key.weight += 0.01
    followed._measure(1)
    assert [value > 0 for value in followed.rows["change"][0]] == [False, False, False, False, True, False]


def test_a_gpt_learns_a_periodic_text(context):
    smoke = networks.GPT.size(Scale.SMOKE).setup
    found = tracking.language_model(replace(smoke, steps=40, last_lr=4e-3), context)
    assert found["train"][0] == pytest.approx(numpy.log(7), rel=0.05)
    assert found["test"][-1] < 1.0
    assert numpy.isfinite(found["cosine"]).all()
    assert numpy.shape(found["cosine"]) == (len(found["steps"]), 3, 2)


def test_the_rate_of_a_gpt_rises_and_falls_as_in_nanogpt():
    chosen = tracking.Language(lr=4.0, last_lr=1.0, warm=10, steps=110)
    rates = [4.0 * chosen.rate(step) for step in (0, 4, 9, 10, 60, 110, 200)]
    assert rates == pytest.approx([0.4, 2.0, 4.0, 4.0, 2.5, 1.0, 1.0])


def test_steps_have_momentum_a_rising_rate_and_the_factor_of_the_classes(context):
    """Two steps with all 20 classes' rate doubled: lr 0.5 * 20 / 10, half of it at first."""
    model = nn.Linear(3, 20, bias=False)
    weight = model.weight.detach().clone()
    x, y = torch.ones(4, 3), torch.zeros(4, 20)
    chosen = replace(IMAGES, lr=0.5, batch=4, momentum=0.9, warm=2)
    advance = tracking.descent(model, (x, y), chosen, context)
    moved = torch.zeros_like(weight)
    for rate in (0.5, 1.0):
        advance()
        moved = 0.9 * moved + 2 * (x @ weight.T).T @ x / 80
        weight -= rate * moved
    assert torch.allclose(model.weight.detach(), weight, atol=1e-6)


def test_an_epoch_has_every_sample_at_most_once(context):
    order = tracking.shuffled(10, 4, context.generator(), torch.device("cpu"))
    for _ in range(3):
        epoch = torch.cat([next(order), next(order)]).tolist()
        assert len(set(epoch)) == 8
        assert set(epoch) <= set(range(10))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")
def test_a_recorded_step_is_the_step_itself(context):
    x, y = (part.cuda() for part in tracking.images(IMAGES, context))
    weights = []
    for recorded in (False, True):
        model = MLP(64, 10, width=9, hidden_layers=2, generator=context.generator(1)).cuda()
        momentum = 0.0 if recorded else 1e-30  # which is not recorded
        advance = tracking.descent(model, (x, y), replace(IMAGES, momentum=momentum), context)
        for _ in range(25):
            advance()
        weights.append([weight.detach() for weight in model.parameters()])
    for first, second in zip(*weights, strict=True):
        assert torch.allclose(first, second, atol=1e-5)


def made_up(difference, late, deep, centered=0.95):
    """Two seeds, four moments of 100 steps, four layers: C - UC is `difference`, `deep` more below, `late` at last."""
    gap = difference + deep * numpy.array([0, 0, 1, 1]) * numpy.array([1, 1, 1, 0])[:, None]
    gap[-1] = late
    values = numpy.stack([centered - gap, numpy.full_like(gap, centered)], -1)
    one = {"steps": numpy.array([1, 5, 10, 100]), "cosine": values, "pearson": values}
    runs = {name: Runs([0, 1], [one, one]) for name in networks.NETWORKS}
    return {claim.id: claim for claim in fig2.claims({}, runs)}


def test_claims_hold_and_fail_as_the_numbers_say():
    good = made_up(0.2, 0.05, 0.1)
    assert all(claim.holds for claim in good.values())
    assert good["mlp-higher"].measured == pytest.approx((0.25 * 3 + 0.05) / 4)
    turned = made_up(-0.2, -0.1, -0.1, centered=0.5)
    assert not any(claim.holds for id, claim in turned.items() if not id.endswith("converge"))
    late = made_up(0.2, 0.4, 0.0)
    assert not late["vgg-early"].holds
    assert not late["gpt-deep"].holds
    assert not late["mlp-converge"].holds
    assert late["consistently"].holds
    assert not any(claim.known for claim in good.values())
