"""Gradients of large networks, some parameters at a time."""

import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.graph import graph
from featlearn.graph.graph import parameter_gradients


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize(("together", "passes"), [(2**20, 1), (300, 3), (1, 6)])
def test_groups_give_the_same_gradients_in_as_many_passes(
    together: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = network(), torch.randn(7, 4).double()
    named, cotangent = dict(model.named_parameters()), torch.randn(7, 3).double()
    outputs = model(x)
    expected = dict(zip(named, torch.autograd.grad(outputs, named.values(), cotangent, retain_graph=True), strict=True))
    made: list[int] = []
    before = graph.backward

    def counted(*args, **kwargs):
        made.append(len(args[1]))
        return before(*args, **kwargs)

    monkeypatch.setattr(graph, "backward", counted)
    monkeypatch.setattr(graph, "TOGETHER", together)
    found = parameter_gradients(outputs, named, cotangent)
    assert list(found) == list(named)
    assert len(found) == len(named)
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name])
    assert len(made) == passes
    assert sum(made) == len(named)


def test_a_wrong_rule_is_found_in_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from featlearn.graph import samples

    for module in (graph, samples):
        monkeypatch.setattr(module, "TOGETHER", 100)
    model, x = nn.Sequential(nn.Identity(), Wrapped(network())), torch.randn(9, 4).double()
    reference = fl.ntk(network(), x)
    torch.testing.assert_close(fl.ntk(model, x), reference, rtol=1e-12, atol=1e-12)
    (route,) = {one.route for one in fl.plan(model, x).parameters if one.name.endswith("2.weight")}
    assert route == "pairs"
    from featlearn.audit import gradient_check

    honest = gradient_check._weighted_sum
    monkeypatch.setattr(gradient_check, "_weighted_sum", lambda g, w: (1.01 * honest(g, w)[0], honest(g, w)[1]))
    plan = fl.plan(model, x)
    assert {one.route for one in plan.parameters} == {"fallback"}


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)
