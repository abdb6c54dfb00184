"""The networks of 004 Fig. 4 and 5 against gradients of torch and against a formula in numpy."""

import numpy
import pytest
import torch

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.paper_004 import two_layers

SCHEMES = ("ntk", "kaiming+", "xavier-")


def networks(inputs=6, width=9, lr=0.3):
    generator = torch.Generator().manual_seed(4)
    return [
        fl.steer.parametrize(
            MLP(inputs, 10, width=width, hidden_layers=1).double(), scheme, lr, base_width=5, generator=generator
        )
        for scheme in SCHEMES
    ]


def data(count, inputs=6):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, inputs, generator=generator, dtype=torch.float64)
    return x, torch.randint(10, (count,), generator=generator)


def test_networks_side_by_side_are_the_same_as_one_by_one(tmp_path):
    """Weights, accuracies and distances against torch.optim.SGD with the groups of `parametrize`."""
    single, (x, labels), test = networks(), data(30), data(11)
    side_by_side = two_layers.TwoLayerNetworks(networks())
    context = Context(seed=0, folder=tmp_path)
    found = side_by_side.train((x, labels), test, context, batch=7, epochs=4, every=2)
    for i, (model, groups) in enumerate(single):
        start = [weight.detach().clone() for weight in model.network.parameters()]
        assert float(found["output"][i]) == pytest.approx(float(model(x).detach().std()), rel=1e-12)
        optimizer, order, best = torch.optim.SGD(groups), context.generator(2), numpy.zeros(2)
        for epoch in range(1, 5):
            for rows in torch.randperm(30, generator=order).split(7):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x[rows]), labels[rows]).backward()
                optimizer.step()
            if epoch in (2, 4):
                shares = [float((model(a).argmax(1) == b).double().mean()) for a, b in ((x, labels), test)]
                best = numpy.maximum(best, shares)
        end = list(model.network.parameters())
        assert torch.allclose(side_by_side.first[i], end[0], rtol=1e-10, atol=1e-12)
        assert torch.allclose(side_by_side.readout[i], end[1], rtol=1e-10, atol=1e-12)
        assert [float(found["train"][i]), float(found["test"][i])] == pytest.approx(best)
        moved, first = (
            numpy.array([float(part.detach().norm()) for part in parts])
            for parts in ([now - old for now, old in zip(end, start, strict=True)], start)
        )
        expected = [*(moved / first), numpy.hypot(*moved) / numpy.hypot(*first)]
        assert found["distance"][i].numpy() == pytest.approx(numpy.array(expected), rel=1e-9)


def test_a_step_is_the_formula_in_numpy():
    x, labels = data(13)
    group = two_layers.TwoLayerNetworks(networks())
    w, u = group.first[1].numpy().copy(), group.readout[1].numpy().copy()
    scale, rate_w, rate_u = (float(each[1]) for each in (group.scale, group.rate_w, group.rate_u))
    group.step(x, torch.nn.functional.one_hot(labels, 10).double())
    h = x.numpy() @ w.T
    f = scale * numpy.maximum(h, 0) @ u.T
    chance = numpy.exp(f) / numpy.exp(f).sum(1, keepdims=True)
    residual = (chance - numpy.eye(10)[labels.numpy()]) / 13 * scale
    assert group.readout[1].numpy() == pytest.approx(u - rate_u * residual.T @ numpy.maximum(h, 0), rel=1e-10)
    assert group.first[1].numpy() == pytest.approx(w - rate_w * ((residual @ u) * (h > 0)).T @ x.numpy(), rel=1e-10)


def test_the_networks_of_a_width_come_from_the_same_draws(tmp_path):
    context = Context(seed=3, folder=tmp_path)
    group = two_layers.drawn(6, 50, ("kaiming-", "kaiming+", "ntk"), 0.05, context, base_width=10)
    assert torch.equal(group.first[0], group.first[1])
    assert torch.allclose(group.readout[2], group.readout[0] * 5)  # variances 1 and 2 / 50
    assert group.scale.flatten().tolist() == pytest.approx([1, 1 / 5, 50**-0.5])
    assert group.rate_w.flatten().tolist() == pytest.approx([0.01, 0.25, 0.05])


def test_images_are_averaged_over_squares(tmp_path):
    context = Context(seed=0, folder=tmp_path)
    whole, labels = two_layers.loaded("digits", "train", 20, 1, context)
    small, same = two_layers.loaded("digits", "train", 20, 2, context)
    assert (whole.shape, small.shape) == ((20, 64), (20, 16))
    assert torch.equal(labels, same)
    corner = whole.view(20, 8, 8)[:, :2, 2:4].mean((1, 2))
    assert torch.allclose(small.view(20, 4, 4)[:, 0, 1], corner)
