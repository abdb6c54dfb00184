"""Per-sample gradients as an iterator: equal to a dense Jacobian, in chunks, without a trace."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl

from ..references.jacobian import dense_jacobian
from ..zoo.case import Net

SAMPLES, CLASSES = 11, 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 9, 5, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(5, CLASSES)).double()


X = torch.randn(SAMPLES, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


DIRECTIONS = [
    ("each", torch.eye(CLASSES)),
    (1, torch.tensor([[0.0, 1.0, 0.0]])),
    (fl.Directions(2), fl.Directions(2).signs(CLASSES)),
    (torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[1.0, -2.0, 0.5]])),
]


@pytest.mark.parametrize("memory", [None, 2**16])
@pytest.mark.parametrize(("outputs", "directions"), DIRECTIONS)
def test_gradients_are_those_of_the_dense_jacobian(outputs: Any, directions: Tensor, memory: int | None):
    model = network()
    jacobian = dense_jacobian(model, X)
    counts = {name: torch.zeros(SAMPLES) for name in jacobian}
    for samples, name, part in fl.quantities.gradients(model, X, outputs=outputs, memory=memory):
        expected = torch.einsum("pcn,kc->pkn", jacobian[name][samples], directions.double())
        torch.testing.assert_close(part.tensor(), expected)
        torch.testing.assert_close(part.squared_norms(), expected.square().sum(2))
        counts[name][samples] += 1
        assert (part.samples < SAMPLES) == (memory is not None)
    assert all(torch.equal(count, torch.ones(SAMPLES)) for count in counts.values())


def test_a_quantity_is_a_loop():
    model, norms = network(), torch.zeros(SAMPLES, dtype=torch.float64)
    for samples, _, part in fl.quantities.gradients(model, X):
        norms[samples] += part.squared_norms().mean(1)
    torch.testing.assert_close(norms, fl.quantities.ntk_diagonal(model, X))
    torch.testing.assert_close(norms, fl.ntk(model, X).diagonal())


def test_layers_name_the_gradients_of_their_parameters():
    session = fl.Session(network(), X)
    names = [name for _, name, _ in session.gradients(by="layer")]
    assert sorted(names) == ["0", "0", "3", "5", "5"]
    norms = dict.fromkeys(names, torch.zeros(SAMPLES, dtype=torch.float64))
    for samples, name, part in session.gradients(by="layer", outputs=2):
        norms[name] = norms[name].index_add(0, torch.arange(SAMPLES)[samples], part.squared_norms()[:, 0])
    expected = fl.quantities.ntk_diagonal(network(), X, by="layer", outputs=2)
    for name, norm in norms.items():
        torch.testing.assert_close(norm, expected[name])


def test_a_loop_that_ends_early_leaves_no_trace():
    model = network().train()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = model[0].weight.grad
    state = torch.get_rng_state()
    for _ in fl.quantities.gradients(model, X):
        assert not model.training
        break
    assert model.training
    assert all(part.training for part in model)
    assert model[0].weight.grad is before
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in fl.quantities.gradients(model, X)]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_without_a_gradient_are_left_out():
    model = Net(lambda net, x: net.used(x), used=nn.Linear(4, 2), unused=nn.Linear(4, 2))
    names = {name for _, name, _ in fl.quantities.gradients(model, torch.randn(5, 4))}
    assert names == {"used.weight", "used.bias"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"by": "network"}, "expected 'parameter' or 'layer'"),
        ({"outputs": "sum"}, "expected 'each'"),
        ({"outputs": 3}, "between 0 and 2"),
        ({"outputs": torch.ones(2)}, r"shape \(2,\), expected directions \(K, C\) with C = 3"),
        ({"output": 1}, "did you mean 'outputs'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], words: str):
    with pytest.raises(fl.FeatlearnError, match=words):
        list(fl.quantities.gradients(network(), X, **arguments))  # type: ignore[arg-type]


def test_outputs_without_a_gradient_are_refused():
    model = Net(lambda net, x: net.layer(x).detach(), layer=nn.Linear(4, 2))
    with pytest.raises(fl.FeatlearnError, match="carry no gradient"):
        list(fl.quantities.gradients(model, torch.randn(5, 4)))
