"""fl.layer_alignment: values by hand, values of random weights, and which pairs there are."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import InputTypeError, InputValueError
from featlearn.quantities.layer_pairs import random_spectral_alignment
from tests.zoo.case import Net, default_dtype, parameter
from tests.zoo.families import CASES as FAMILIES

NORMS: dict[str, Any] = {"fro": "fro", "spectral": 2}


@pytest.fixture(autouse=True)
def seeded() -> Any:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


def zeta(after: Tensor, before: Tensor, norm: str = "fro") -> float:
    kind = NORMS[norm]
    sizes = torch.linalg.norm(after, kind) * torch.linalg.norm(before, kind)
    return float(torch.linalg.norm(after @ before, kind) / sizes)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def matrix(layer: nn.Module) -> Tensor:
    return layer.weight.detach()


def pairs(model: nn.Module, x: Any, **options: Any) -> set[tuple[str, str]]:
    return set(fl.layer_alignment(model, x, **options))


# ---------------------------------------------------------------------------------------------------------------------
# values
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("between", [[nn.ReLU()], [nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.5)], [nn.LayerNorm(7)]])
def test_multilayer_perceptrons(norm: str, between: list[nn.Module]):
    model = nn.Sequential(linear(4, 7), *between, linear(7, 5, False), nn.ReLU(inplace=True), linear(5, 3)).double()
    found = fl.layer_alignment(model, torch.randn(6, 4), norm=norm)
    middle, last = str(1 + len(between)), str(3 + len(between))
    assert list(found) == [("0", middle), (middle, last)]
    layers = dict(model.named_children())
    for (first, second), pair in found.items():
        assert pair.value == pytest.approx(zeta(matrix(layers[second]), matrix(layers[first]), norm), rel=1e-12)
        assert pair.width == len(matrix(layers[first]))
        assert pair.reason == ""
    assert found["0", middle].random == pytest.approx(
        1 / math.sqrt(7) if norm == "fro" else random_spectral_alignment(5, 7, 4)
    )


def test_vectors_give_the_cosine():
    model = nn.Sequential(linear(1, 6, False), linear(6, 1, False))
    (pair,) = fl.layer_alignment(model, torch.randn(5, 1)).values()
    cosine = F.cosine_similarity(matrix(model[0]).flatten(), matrix(model[1]).flatten(), 0)
    assert pair.value == pytest.approx(abs(float(cosine)), rel=1e-12)


def test_aligned_and_orthogonal_layers():
    model = nn.Sequential(linear(3, 6, False), nn.ReLU(), linear(6, 2, False))
    basis = torch.linalg.qr(torch.randn(6, 6))[0]
    with torch.no_grad():
        model[0].weight.copy_(basis[:, :1] @ torch.randn(1, 3))
        model[2].weight.copy_(torch.randn(2, 1) @ basis[:, :1].T)
    (pair,) = fl.layer_alignment(model, torch.randn(5, 3)).values()
    assert pair.value == pytest.approx(1.0, abs=1e-12)
    with torch.no_grad():
        model[2].weight.copy_(torch.randn(2, 1) @ basis[:, 1:2].T)
    (pair,) = fl.layer_alignment(model, torch.randn(5, 3)).values()
    assert pair.value == pytest.approx(0.0, abs=1e-12)


def test_a_zero_weight_is_undefined_with_a_reason():
    model = nn.Sequential(linear(3, 6), nn.ReLU(), linear(6, 2))
    nn.init.zeros_(model[2].weight)
    (pair,) = fl.layer_alignment(model, torch.randn(5, 3)).values()
    assert math.isnan(pair.value)
    assert pair.reason == "a weight is zero"
    assert pair.random == pytest.approx(1 / math.sqrt(6))


@pytest.mark.parametrize("norm", NORMS)
def test_consecutive_convolutions(norm: str):
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 4, (1, 2)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        linear(4, 3),
    )
    found = fl.layer_alignment(model, torch.randn(4, 2, 6, 6), norm=norm)
    assert list(found) == [("0", "4"), ("4", "7")]
    U = matrix(model[4]).permute(0, 2, 3, 1).reshape(-1, 5)
    assert found["0", "4"].value == pytest.approx(zeta(U, matrix(model[0]).reshape(5, -1), norm), rel=1e-12)
    W = matrix(model[4]).reshape(4, -1)
    assert found["4", "7"].value == pytest.approx(zeta(matrix(model[7]), W, norm), rel=1e-12)


@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_convolutions(groups: int):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=groups), nn.ReLU(), nn.Conv2d(4, 6, 2, groups=2), nn.Flatten())
    (pair,) = fl.layer_alignment(model, torch.randn(4, 4, 5, 5)).values()
    W = torch.block_diag(*matrix(model[0]).reshape(groups, 4 // groups, -1))
    U = torch.zeros(6, 2, 2, 4)
    for group in range(2):
        rows, columns = slice(3 * group, 3 * group + 3), slice(2 * group, 2 * group + 2)
        U[rows, :, :, columns] = matrix(model[2])[rows].permute(0, 2, 3, 1)
    assert pair.value == pytest.approx(zeta(U.reshape(-1, 4), W), rel=1e-12)


def test_transposed_convolutions():
    model = nn.Sequential(
        nn.Conv2d(2, 5, 2),
        nn.ReLU(),
        nn.ConvTranspose2d(5, 3, 2, stride=2),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3),
        nn.Flatten(),
    )
    found = fl.layer_alignment(model, torch.randn(4, 2, 4, 5))
    U = matrix(model[2]).reshape(5, -1).T
    assert found["0", "2"].value == pytest.approx(zeta(U, matrix(model[0]).reshape(5, -1)), rel=1e-12)
    W, U = matrix(model[2]).transpose(0, 1).reshape(3, -1), matrix(model[4]).permute(0, 2, 3, 1).reshape(-1, 3)
    assert found["2", "4"].value == pytest.approx(zeta(U, W), rel=1e-12)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_convolution_flattened_into_a_linear_layer(channels_last: bool, norm: str):
    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = F.max_pool2d(torch.relu(self.conv(x)), 2)
        hidden = hidden.permute(0, 2, 3, 1) if channels_last else hidden
        return self.head(hidden.flatten(1))

    model = Net(forward, conv=nn.Conv2d(2, 5, 3), head=linear(30, 4))
    (pair,) = fl.layer_alignment(model, torch.randn(6, 2, 6, 8), norm=norm).values()
    shape = (4, 6, 5) if channels_last else (4, 5, 6)
    U = matrix(model.head).reshape(shape).transpose(1, 2) if not channels_last else matrix(model.head).reshape(shape)
    U = U.reshape(-1, 5)
    assert pair.value == pytest.approx(zeta(U, matrix(model.conv).reshape(5, -1), norm), rel=1e-12)
    assert pair.width == 5


def test_dead_units_do_not_hide_where_channels_lie():
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), linear(60, 4))
    nn.init.constant_(model[0].bias[1:3], -100.0)
    (pair,) = fl.layer_alignment(model, torch.randn(6, 2, 5, 6)).values()
    U = matrix(model[3]).reshape(4, 5, 12).transpose(1, 2).reshape(-1, 5)
    assert pair.value == pytest.approx(zeta(U, matrix(model[0]).reshape(5, -1)), rel=1e-12)


def test_a_pointwise_convolution_as_long_as_it_is_wide():
    model = nn.Sequential(nn.Conv1d(3, 5, 1), nn.Tanh(), nn.Flatten(), linear(25, 2))
    (pair,) = fl.layer_alignment(model, torch.randn(6, 3, 5)).values()
    U = matrix(model[3]).reshape(2, 5, 5).transpose(1, 2).reshape(-1, 5)
    assert pair.value == pytest.approx(zeta(U, matrix(model[0])[:, :, 0]), rel=1e-12)


@pytest.mark.parametrize("how", ["shuffled", "rolled"])
def test_channels_in_another_order(how: str):
    def forward(self: Net, x: Tensor) -> Tensor:
        maps = torch.relu(self.first(x))
        maps = maps.unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2) if how == "shuffled" else maps.roll(1, 1)
        return self.second(maps).mean((2, 3))

    model = Net(forward, first=nn.Conv2d(2, 6, 1), second=nn.Conv2d(6, 4, 1))
    (pair,) = fl.layer_alignment(model, torch.randn(5, 2, 3, 4)).values()
    order = torch.arange(6).reshape(2, 3).T.flatten() if how == "shuffled" else torch.arange(6).roll(1)
    expected = zeta(matrix(model.second)[:, :, 0, 0], matrix(model.first)[order, :, 0, 0])
    assert pair.value == pytest.approx(expected, rel=1e-12)


def test_positions_are_not_channels():
    """A mixer with as many tokens as channels: what one layer gives as positions the next does not take as channels."""

    def forward(self: Net, x: Tensor) -> Tensor:
        return self.channels(torch.tanh(self.tokens(x.transpose(1, 2)).transpose(1, 2))).mean(1)

    model = Net(forward, tokens=linear(4, 4), channels=linear(4, 2))
    found = fl.layer_alignment(model, torch.randn(5, 4, 4))
    assert all(math.isnan(pair.value) for pair in found.values())


def test_a_frozen_weight_between_two_layers_is_a_weight():
    model = nn.Sequential(linear(3, 4), nn.ReLU(), linear(4, 4), nn.ReLU(), linear(4, 2))
    model[2].requires_grad_(False)
    found = fl.layer_alignment(model, torch.randn(5, 3))
    assert ("0", "4") not in found or math.isnan(found["0", "4"].value)


@pytest.mark.parametrize("widths", [(4, 5), pytest.param((4, 4))])
def test_concatenation(widths: tuple[int, int]):
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.cat([torch.tanh(self.a(x)), torch.tanh(self.b(x))], 1))

    first, second = widths
    model = Net(forward, a=linear(3, first), b=linear(3, second), head=linear(first + second, 2))
    found = fl.layer_alignment(model, torch.randn(6, 3))
    assert set(found) == {("a", "head"), ("b", "head")}
    U = matrix(model.head)
    assert found["a", "head"].value == pytest.approx(zeta(U[:, :first], matrix(model.a)), rel=1e-12)
    assert found["b", "head"].value == pytest.approx(zeta(U[:, first:], matrix(model.b)), rel=1e-12)


def test_one_layer_concatenated_with_a_function_of_itself():
    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.head(torch.cat([hidden, -torch.tanh(hidden)], 1))

    model = Net(forward, a=linear(3, 4), head=linear(8, 2))
    (pair,) = fl.layer_alignment(model, torch.randn(6, 3)).values()
    U = matrix(model.head).reshape(2, 2, 4).transpose(0, 1).reshape(4, 4)
    assert pair.value == pytest.approx(zeta(U, matrix(model.a)), rel=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# values of random weights
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "k", "n", "expected"), [(256, 256, 256, 0.649519), (10, 256, 784, 0.6547), (300, 100, 784, 0.8032)]
)
def test_spectral_values_of_random_weights(m: int, k: int, n: int, expected: float):
    assert random_spectral_alignment(m, k, n) == pytest.approx(expected, abs=6e-5)
    assert random_spectral_alignment(m, k, n) == pytest.approx(random_spectral_alignment(n, k, m), rel=1e-12)
    psi = torch.logspace(-4, 3, 400_001)
    least = float(((1 + psi) * (1 + psi * k / m) * (1 + psi * k / n) / psi).min())
    roots = [math.sqrt(size) for size in (m, k, n)]
    by_grid = math.sqrt(m * n * least) / ((roots[0] + roots[1]) * (roots[1] + roots[2]))
    assert random_spectral_alignment(m, k, n) == pytest.approx(by_grid, rel=1e-8)


def test_square_weights_have_the_closed_form():
    assert random_spectral_alignment(7, 7, 7) == pytest.approx(3 * math.sqrt(3) / 8, rel=1e-12)


@pytest.mark.parametrize("sizes", [(30, 60, 10), (60, 20, 40)])
@pytest.mark.parametrize("norm", NORMS)
def test_random_layers_have_the_value_that_is_said(norm: str, sizes: tuple[int, int, int]):
    n, k, m = sizes
    model, x = nn.Sequential(linear(n, k), nn.ReLU(), linear(k, m)), torch.randn(4, n)
    values = []
    for _ in range(25):
        for weight in (model[0].weight, model[2].weight):
            nn.init.normal_(weight)
        (pair,) = fl.layer_alignment(model, x, norm=norm).values()
        values.append(pair.value)
    mean, error = torch.tensor(values).mean(), torch.tensor(values).std() / math.sqrt(25)
    finite = 0.03 if norm == "spectral" else 0.002  # the limits are those of large matrices
    assert float((mean - pair.random).abs()) <= 4 * float(error) + finite * pair.random


@pytest.mark.parametrize("flattened", [False, True])
def test_random_convolutions_have_the_value_that_is_said(flattened: bool):
    last = [nn.Flatten(), linear(20 * 9, 6)] if flattened else [nn.Conv2d(20, 6, 3), nn.Flatten()]
    model, x = nn.Sequential(nn.Conv2d(4, 20, 3), nn.ReLU(), *last), torch.randn(3, 4, 5, 5)
    values = []
    for _ in range(30):
        for weight in model.parameters():
            nn.init.normal_(weight)
        (pair,) = fl.layer_alignment(model, x).values()
        values.append(pair.value)
    mean, error = torch.tensor(values).mean(), torch.tensor(values).std() / math.sqrt(30)
    assert pair.random == pytest.approx(1 / math.sqrt(20))
    assert float((mean - pair.random).abs()) <= 4 * float(error) + 0.005 * pair.random


# ---------------------------------------------------------------------------------------------------------------------
# pairs
# ---------------------------------------------------------------------------------------------------------------------


def test_residual_networks():
    def forward(self: Net, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for block in (self.one, self.two):
            x = x + block(x)
        return self.head(x)

    def block() -> nn.Module:
        return nn.Sequential(linear(5, 6), nn.ReLU(), linear(6, 5))

    model = Net(forward, stem=linear(3, 5), one=block(), two=block(), head=linear(5, 2))
    found = fl.layer_alignment(model, torch.randn(6, 3))
    assert set(found) == {
        ("stem", "one.0"),
        ("one.0", "one.2"),
        ("stem", "two.0"),
        ("one.2", "two.0"),
        ("two.0", "two.2"),
        ("stem", "head"),
        ("one.2", "head"),
        ("two.2", "head"),
    }
    expected = zeta(matrix(model.head), matrix(model.one[2]))
    assert found["one.2", "head"].value == pytest.approx(expected, rel=1e-12)


def test_a_residual_network_of_convolutions_with_a_projected_shortcut():
    def forward(self: Net, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.shortcut(x) + self.second(torch.relu(self.first(x))))
        return self.head(x.mean((2, 3)))

    model = Net(
        forward,
        stem=nn.Conv2d(2, 3, 3, padding=1, bias=False),
        norm=nn.BatchNorm2d(3),
        first=nn.Conv2d(3, 4, 3, stride=2, padding=1),
        second=nn.Conv2d(4, 4, 3, padding=1),
        shortcut=nn.Conv2d(3, 4, 1, stride=2),
        head=linear(4, 2),
    )
    assert pairs(model, torch.randn(5, 2, 6, 6)) == {
        ("stem", "first"),
        ("stem", "shortcut"),
        ("first", "second"),
        ("second", "head"),
        ("shortcut", "head"),
    }


def test_branches_and_heads():
    def forward(self: Net, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return torch.cat([self.left(hidden), self.right(torch.relu(self.deep(hidden)))], 1)

    model = Net(forward, trunk=linear(3, 4), left=linear(4, 2), deep=linear(4, 5), right=linear(5, 2))
    assert pairs(model, torch.randn(6, 3)) == {("trunk", "left"), ("trunk", "deep"), ("deep", "right")}


def dense_network(activation: Callable[[Tensor], Tensor]) -> nn.Module:
    def forward(self: Net, x: Tensor) -> Tensor:
        features = [activation(self.stem(x))]
        for layer in (self.one, self.two):
            features.append(activation(layer(torch.cat(features, 1))))
        return self.head(torch.cat(features, 1))

    return Net(forward, stem=linear(3, 5), one=linear(5, 4), two=linear(9, 7), head=linear(16, 2))


def test_densely_connected_layers():
    model = dense_network(torch.tanh)
    found = fl.layer_alignment(model, torch.randn(20, 3))
    assert set(found) == {
        ("stem", "one"),
        ("stem", "two"),
        ("one", "two"),
        ("stem", "head"),
        ("one", "head"),
        ("two", "head"),
    }
    assert found["one", "two"].value == pytest.approx(zeta(matrix(model.two)[:, 5:], matrix(model.one)), rel=1e-12)
    assert found["two", "head"].value == pytest.approx(zeta(matrix(model.head)[:, 9:], matrix(model.two)), rel=1e-12)


def test_densely_connected_layers_that_are_not_neighbors():
    model = dense_network(torch.tanh)
    found = fl.layer_alignment(model, torch.randn(20, 3))
    assert found["stem", "two"].value == pytest.approx(zeta(matrix(model.two)[:, :5], matrix(model.stem)), rel=1e-12)
    assert found["one", "head"].value == pytest.approx(zeta(matrix(model.head)[:, 5:9], matrix(model.one)), rel=1e-12)


def test_dead_units_in_a_concatenation():
    model, x = dense_network(torch.relu), torch.randn(200, 3)
    with torch.no_grad():  # alive on a few samples only
        model.one.bias[1] -= model.one(torch.relu(model.stem(x)))[:, 1].quantile(0.97)
    found = fl.layer_alignment(model, x)
    assert found["one", "two"].value == pytest.approx(zeta(matrix(model.two)[:, 5:], matrix(model.one)), rel=1e-12)


def test_a_residual_sum_that_is_flattened():
    def forward(self: Net, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        return self.head((x + self.block(x)).flatten(1))

    model = Net(forward, stem=nn.Conv2d(2, 3, 2), block=nn.Conv2d(3, 3, 3, padding=1), head=linear(36, 2))
    found = fl.layer_alignment(model, torch.randn(6, 2, 4, 5))
    U = matrix(model.head).reshape(2, 3, 12).transpose(1, 2).reshape(-1, 3)
    assert found["block", "head"].value == pytest.approx(zeta(U, matrix(model.block).reshape(3, -1)), rel=1e-12)
    assert found["stem", "head"].value == pytest.approx(zeta(U, matrix(model.stem).reshape(3, -1)), rel=1e-12)


def test_gates():
    model = Net(
        lambda self, x: self.down(F.silu(self.gate(x)) * self.up(x)),
        gate=linear(3, 5),
        up=linear(3, 5),
        down=linear(5, 2),
    )
    assert pairs(model, torch.randn(6, 3)) == {("gate", "down"), ("up", "down")}
    fused = Net(lambda self, x: self.down(F.glu(self.both(x))), both=linear(3, 10), down=linear(5, 2))
    (pair,) = fl.layer_alignment(fused, torch.randn(6, 3)).values()
    assert math.isnan(pair.value)
    assert "mixes several outputs" in pair.reason


def test_a_layer_called_twice():
    model = Net(
        lambda self, x: self.head(torch.relu(self.layer(torch.relu(self.layer(x))))),
        layer=linear(4, 4),
        head=linear(4, 2),
    )
    found = fl.layer_alignment(model, torch.randn(6, 4))
    assert set(found) == {("layer", "layer"), ("layer", "head")}
    assert found["layer", "layer"].value == pytest.approx(zeta(matrix(model.layer), matrix(model.layer)), rel=1e-12)


def test_embeddings_and_unknown_ops_end_a_chain():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), linear(8, 5), nn.ReLU(), linear(5, 2))
    assert pairs(model, torch.randint(6, (5, 2))) == {("2", "4")}
    recurrent = Net(
        lambda self, x: self.head(self.gru(torch.relu(self.body(x)))[0][:, -1]),
        body=linear(3, 4),
        gru=nn.GRU(4, 4, batch_first=True),
        head=linear(4, 2),
    )
    assert ("body", "head") not in pairs(recurrent, torch.randn(5, 3, 3))


def attention(layout: str, fused: bool, heads: int = 2, key_heads: int = 2) -> nn.Module:
    def forward(self: Net, x: Tensor) -> Tensor:
        def split(rows: Tensor, count: int) -> Tensor:
            return rows.unflatten(-1, (count, 3)).transpose(1, 2)

        x = self.stem(x)
        if layout == "fused":
            query, key, value = (split(part, heads) for part in self.qkv(x).chunk(3, -1))
        else:
            query, key, value = split(self.q(x), heads), split(self.k(x), key_heads), split(self.v(x), key_heads)
            key, value = (part.repeat_interleave(heads // key_heads, 1) for part in (key, value))
        if fused:
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        return self.head(self.out(mixed.transpose(1, 2).flatten(2)).mean(1))

    wide, narrow = 3 * heads, 3 * key_heads
    parts = (
        {"qkv": linear(5, 3 * wide)}
        if layout == "fused"
        else {"q": linear(5, wide), "k": linear(5, narrow), "v": linear(5, narrow)}
    )
    return Net(forward, stem=linear(4, 5), **parts, out=linear(wide, 5), head=linear(5, 2))


SDPA = pytest.param(True, id="sdpa")
EAGER = pytest.param(False, id="eager")


@pytest.mark.parametrize("fused", [SDPA, EAGER])
@pytest.mark.parametrize("layout", ["fused", "separate"])
def test_values_of_attention_are_followed_by_the_next_layer_and_queries_are_not(layout: str, fused: bool):
    model, x = attention(layout, fused), torch.randn(5, 4, 4)
    found = fl.layer_alignment(model, x)
    q, k, v = ("qkv.q", "qkv.k", "qkv.v") if layout == "fused" else ("q", "k", "v")
    assert set(found) == {("stem", q), ("stem", k), ("stem", v), (v, "out"), ("out", "head")}
    weight = matrix(model.qkv)[12:] if layout == "fused" else matrix(model.v)
    assert found[v, "out"].value == pytest.approx(zeta(matrix(model.out), weight), rel=1e-12)
    assert found["stem", v].value == pytest.approx(zeta(weight, matrix(model.stem)), rel=1e-12)


@pytest.mark.parametrize("fused", [SDPA, EAGER])
def test_values_that_several_heads_share(fused: bool):
    model, x = attention("separate", fused, heads=4, key_heads=2), torch.randn(5, 4, 4)
    found = fl.layer_alignment(model, x)
    assert set(found) == {("stem", "q"), ("stem", "k"), ("stem", "v"), ("v", "out"), ("out", "head")}
    shared = torch.arange(6).reshape(2, 1, 3).expand(2, 2, 3).flatten()  # the value that each input comes from
    U = torch.stack([matrix(model.out)[:, shared == channel] for channel in range(6)], -1).reshape(-1, 6)
    assert found["v", "out"].value == pytest.approx(zeta(U, matrix(model.v)), rel=1e-12)


def test_multihead_attention():
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), nn.Flatten(), linear(12, 2))
    found = pairs(model, torch.randn(5, 3, 4))
    assert ("0.self_attn.v", "0.self_attn.out_proj") in found
    assert not any(second == "0.self_attn.out_proj" and first != "0.self_attn.v" for first, second in found)


@pytest.mark.parametrize(
    ("name", "values", "out", "extra"),
    [
        ("llama_eager", "model.layers.{}.self_attn.v_proj", "model.layers.{}.self_attn.o_proj", []),
        ("gpt2_eager", "transformer.h.{}.attn.c_attn.v", "transformer.h.{}.attn.c_proj", []),
        ("bert_eager", "encoder.layer.{}.attention.self.value", "encoder.layer.{}.attention.output.dense", []),
        pytest.param("llama", "model.layers.{}.self_attn.v_proj", "model.layers.{}.self_attn.o_proj", []),
        pytest.param("gpt2", "transformer.h.{}.attn.c_attn.v", "transformer.h.{}.attn.c_proj", []),
    ],
)
def test_attention_of_transformers(name: str, values: str, out: str, extra: list[str]):
    pytest.importorskip("transformers")
    model, x, _, readout = {case.name: case for case in FAMILIES}[name].build()
    found = fl.layer_alignment(model, x, readout=readout)
    for block in range(2):
        assert [first for first, second in found if second == out.format(block)] == [values.format(block)]
        assert found[values.format(block), out.format(block)].value > 0


def test_layers_before_a_router_are_followed_by_the_next():
    pytest.importorskip("transformers")
    model, x, _, readout = {case.name: case for case in FAMILIES}["mixtral"].build()
    found = pairs(model, x, readout=readout)
    assert ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.gate") in found


def test_a_softmax_may_be_an_activation():
    layers = [linear(4, 5, False), nn.ReLU(), linear(5, 6, False), nn.Softmax(1), linear(6, 2, False)]
    assert pairs(nn.Sequential(*layers), torch.randn(7, 4)) == {("0", "2"), ("2", "4")}


def test_scores_without_a_softmax_are_no_features():
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.out(torch.sigmoid(self.q(x) @ self.k(x).transpose(1, 2)) @ self.v(x)).mean(1)

    model = Net(forward, q=linear(3, 4), k=linear(3, 4), v=linear(3, 4), out=linear(4, 2))
    found = fl.layer_alignment(model, torch.randn(5, 6, 3))
    assert {names for names, pair in found.items() if not math.isnan(pair.value)} == {("v", "out")}


def channel_bias() -> nn.Module:
    return Net(
        lambda self, x: self.second(torch.relu(self.first(x) + self.bias)).mean((2, 3)),
        first=nn.Conv2d(2, 3, 3),
        bias=parameter(1, 3, 1, 1),
        second=nn.Conv2d(3, 2, 3),
    )


def norm_over_maps() -> nn.Module:
    model = nn.Sequential()
    for name, part in (
        ("first", nn.Conv2d(2, 3, 3)),
        ("norm", nn.LayerNorm([3, 4, 5])),
        ("act", nn.ReLU()),
        ("second", nn.Conv2d(3, 2, 3)),
        ("flat", nn.Flatten()),
    ):
        model.add_module(name, part)
    return model


def position_table() -> nn.Module:
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.second((self.first(x).flatten(2).mT + self.positions).mean(1))

    return Net(forward, first=nn.Conv2d(2, 3, 3), positions=parameter(1, 20, 3), second=linear(3, 2))


@pytest.mark.parametrize("build", [channel_bias, norm_over_maps, position_table])
def test_scales_and_shifts_between_two_layers(build: Callable[[], nn.Module]):
    assert ("first", "second") in pairs(build(), torch.randn(5, 2, 6, 7))


def test_a_norm_before_flattened_tokens():
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).flatten(1))

    model = Net(forward, body=linear(3, 4), norm=nn.LayerNorm(4), head=linear(20, 2))
    (pair,) = fl.layer_alignment(model, torch.randn(6, 5, 3)).values()
    U = matrix(model.head).reshape(2, 5, 4).reshape(-1, 4)
    assert pair.value == pytest.approx(zeta(U, matrix(model.body)), rel=1e-12)


def test_layers_that_cannot_be_read_are_named():
    model = nn.Sequential(linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), linear(5, 2))
    flipped = Net(lambda self, x: self.body[4](self.body[2](self.body[0](x).flip(0)).flip(0)), body=model)
    found = fl.layer_alignment(flipped, torch.randn(5, 3))
    assert "body.2" in str(found) or hasattr(found, "left_out")


# ---------------------------------------------------------------------------------------------------------------------
# measuring
# ---------------------------------------------------------------------------------------------------------------------


def test_measuring_changes_nothing():
    model = nn.Sequential(linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.ReLU(inplace=True), linear(6, 3))
    x, random = torch.randn(9, 4), torch.get_rng_state()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    flags = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    fl.layer_alignment(model, x)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(part.training for part in model.modules())
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert flags == (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())


def test_the_probe_and_its_precision_do_not_matter():
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), linear(60, 4)).float()
    first = fl.layer_alignment(model, torch.randn(6, 2, 5, 6, dtype=torch.float32))
    second = fl.layer_alignment(model, torch.randn(40, 2, 5, 6, dtype=torch.float32), dtype=torch.float64)
    assert first["0", "3"].value == pytest.approx(second["0", "3"].value, rel=1e-12)


def test_wrong_arguments_are_refused():
    model, x = nn.Sequential(linear(4, 6), nn.ReLU(), linear(6, 3)), torch.randn(9, 4)
    with pytest.raises(InputValueError, match="norm='nuclear', expected 'fro' or 'spectral'"):
        fl.layer_alignment(model, x, norm="nuclear")  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="dtype is"):
        fl.layer_alignment(model, x, dtype=torch.int32)
    with pytest.raises(InputTypeError, match="x is"):
        fl.layer_alignment(model, [[1.0, 2.0, 3.0, 4.0]])
