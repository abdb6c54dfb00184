"""Weights as they are applied, which ops feed attention as what, and which weights follow each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featlearn.audited_model import AuditedModel
from featlearn.gradients.captured import Chunk
from featlearn.graph.attention_paths import FeaturePaths, attentions, nearest
from featlearn.linear_maps.consecutive import consecutive
from featlearn.linear_maps.weight_matrices import WeightMatrices, weight_matrices
from tests.zoo.case import Net, default_dtype, parameter


@pytest.fixture(autouse=True)
def seeded() -> Any:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


@contextmanager
def captured(model: nn.Module, x: Any) -> Iterator[Chunk]:
    with AuditedModel(model).measuring([x], keep_weights=True) as measurement:
        yield measurement.example()


def found_in(model: nn.Module, x: Any) -> WeightMatrices:
    with captured(model, x) as chunk:
        return weight_matrices(chunk)


def test_a_linear_layer_and_a_convolution():
    model = nn.Sequential(nn.Conv2d(4, 6, (2, 3), groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    found = found_in(model, torch.randn(5, 4, 3, 6)).by_name
    conv, linear = found["0"], found["3"]
    assert conv.parameters == ("0.weight",)
    assert conv.layer == "0"
    assert (conv.row_taps, conv.grad_taps, conv.positions) == (6, 1, 8)
    blocks = model[0].weight.detach().reshape(2, 3, 12)
    assert torch.equal(conv.weight, torch.block_diag(*blocks))
    assert (linear.row_taps, linear.grad_taps, linear.positions) == (1, 1, 1)
    assert torch.equal(linear.weight, model[3].weight.detach())


def test_the_weight_is_applied_to_its_rows():
    """W x + b is what the op gives, for every layer whose output can be read."""
    model = nn.Sequential(
        nn.Conv1d(3, 4, 2, padding=1), nn.ConvTranspose1d(4, 2, 3, stride=2), nn.Flatten(1), nn.Linear(30, 3)
    )
    x = torch.randn(5, 3, 6)
    with captured(model, x) as chunk:
        found = weight_matrices(chunk).by_name
        rows = found["0"].readings[0].form.rows().rows().flatten(2)  # type: ignore[union-attr]
        maps = model[0](chunk.batch.take(chunk.indices)).detach()
        expected = (maps - model[0].bias.detach()[:, None]).transpose(1, 2)
        assert float((rows @ found["0"].weight.T - expected).abs().max()) < 1e-12
        assert found["1"].weight.shape == (6, 4)
        assert (found["1"].row_taps, found["1"].grad_taps) == (1, 3)
        pixels = found["1"].readings[0].form.rows().flatten(2)  # type: ignore[union-attr]
        assert float((pixels - maps.transpose(1, 2)).abs().max()) < 1e-12


def test_a_weight_applied_several_times_is_one():
    model = Net(
        lambda self, x: self.layer(self.layer(x).tanh()) + F.linear(x, self.layer.weight), layer=nn.Linear(4, 4)
    )
    (one,) = found_in(model, torch.randn(5, 4)).by_name.values()
    assert len(one.readings) == 3
    assert one.positions == 3


def test_a_transposed_use_is_another_weight():
    model = Net(lambda self, x: F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.T), weight=parameter(5, 3))
    shapes = sorted(tuple(one.weight.shape) for one in found_in(model, torch.randn(6, 3)).by_name.values())
    assert shapes == [(3, 5), (5, 3)]


def test_weights_made_of_parameters_have_their_value():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    (one,) = found_in(layer, torch.randn(5, 4)).by_name.values()
    assert one.layer == ""
    assert one.parameters == ("parametrizations.weight.original0", "parametrizations.weight.original1")
    assert torch.equal(one.weight, layer.weight.detach())
    inner = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), nn.Linear(3, 2))
    assert list(found_in(inner, torch.randn(5, 4)).by_name) == ["0", "1"]


def test_weights_made_by_several_layers_are_left_out():
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.generator(self.code).view(3, 4)))

    model = Net(forward, generator=nn.Linear(2, 12), code=parameter(2), head=nn.Linear(3, 2))
    found = found_in(model, torch.randn(5, 4))
    assert list(found.by_name) == ["head"]
    assert any("several layers" in reason and "generator" in reason for reason in found.left_out.values())


def sdpa(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, y, z)


def eager(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x @ y.transpose(-1, -2) / 2 + torch.ones(x.shape[-2], y.shape[-2]).tril().log()).softmax(-1) @ z


def einsum(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", x, y)
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores.float(), -1).double(), z)


@pytest.mark.parametrize("attend", [sdpa, eager, einsum])
def test_attention_is_found_with_what_feeds_it(attend: Any):
    def forward(self: Net, x: Tensor) -> Tensor:
        parts = [layer(x).unflatten(-1, (2, 3)).transpose(1, 2) for layer in (self.a, self.b, self.c)]
        return self.out(attend(*parts).transpose(1, 2).flatten(2)).mean(1)

    layers = {name: nn.Linear(4, 6) for name in "abc"}
    with captured(Net(forward, **layers, out=nn.Linear(6, 2)), torch.randn(5, 3, 4)) as chunk:
        assert chunk.graph is not None
        found = weight_matrices(chunk).by_name
        nodes = {one.readings[0].use.node: name for name, one in found.items()}
        (attention,) = attentions(chunk.graph, nodes)
        feeding = [[nodes[node] for node in nearest(value, nodes)] for value in (attention.q, attention.k, attention.v)]
        assert feeding == [["a"], ["b"], ["c"]]
        assert [found[name].role for name in ("a", "b", "c", "out")] == ["q", "k", "v", None]
        out = found["out"].readings[0].use.node
        following = FeaturePaths(chunk.graph, nodes, [attention]).sources([out.next_functions[1]])
        assert [nodes[node] for node in following] == ["c"]


def test_attention_without_an_axis_of_heads_is_found():
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.out(F.scaled_dot_product_attention(self.a(x), self.b(x), self.c(x))).mean(1)

    layers = {name: nn.Linear(4, 6) for name in "abc"}
    found = found_in(Net(forward, **layers, out=nn.Linear(6, 2)), torch.randn(5, 3, 4)).by_name
    assert [found[name].role for name in "abc"] == ["q", "k", "v"]


def test_units_with_two_roles_have_none():
    def forward(self: Net, x: Tensor) -> Tensor:
        shared, query = (layer(x).unsqueeze(1) for layer in (self.shared, self.q))
        return self.out(F.scaled_dot_product_attention(query, shared, shared)).mean((1, 2))

    model = Net(forward, q=nn.Linear(4, 6), shared=nn.Linear(4, 6), out=nn.Linear(6, 2))
    found = found_in(model, torch.randn(5, 3, 4)).by_name
    assert {name: one.role for name, one in found.items()} == {"q": "q", "shared": None, "out": None}


def test_a_projection_that_also_feeds_something_else_stays_whole():
    def forward(self: Net, x: Tensor) -> Tensor:
        query, key, value, rest = self.fused(x).unsqueeze(1).chunk(4, -1)
        return self.out(F.scaled_dot_product_attention(query, key, value) + torch.relu(rest)).mean((1, 2))

    found = found_in(Net(forward, fused=nn.Linear(4, 24), out=nn.Linear(6, 2)), torch.randn(5, 3, 4)).by_name
    assert list(found) == ["fused", "out"]
    assert found["fused"].role is None


def test_what_lies_between_two_ops():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Tanh(), nn.Linear(5, 2))
    with captured(model, torch.randn(6, 4)) as chunk:
        found = weight_matrices(chunk).by_name
        assert chunk.graph is not None
        first, second = (found[name].readings[0].use.node for name in ("0", "3"))
        nodes = FeaturePaths(chunk.graph, {first, second}, []).between([second.next_functions[1]], first)
        assert sorted(node.name() for node in nodes) == ["ReluBackward0", "TanhBackward0"]


def test_pairs_say_whether_they_are_alone():
    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.c(torch.relu(self.b(torch.relu(hidden)))) + hidden

    model = Net(forward, a=nn.Linear(4, 3), b=nn.Linear(3, 5), c=nn.Linear(5, 3))
    with captured(model, torch.randn(6, 4)) as chunk:
        found, _ = consecutive(chunk)
    assert {names: pair.alone for names, pair in found.items()} == {("a", "b"): False, ("b", "c"): True}
    assert found["b", "c"].before.shape == (5, 3)
    assert found["b", "c"].after is not None
    assert found["b", "c"].after.shape == (3, 5)
