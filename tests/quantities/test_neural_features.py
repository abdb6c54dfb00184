"""fl.neural_features against zeros that are differentiated by one by one, closed forms and the reference case 003-A."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import featlearn as fl
from featlearn.errors import InputTypeError, InputValueError, MemoryBudgetError, UnsupportedModelError
from featlearn.measurement import Measurement
from featlearn.quantities.layer_features import LayerFeatures, NeuralFeatures
from tests.references.features import Features, features
from tests.zoo.case import Net, parameter

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def seeded() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(DOUBLE)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def assert_equal(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def assert_features(found: LayerFeatures, expected: Features) -> None:
    assert torch.equal(found.weight, expected.weight)
    assert found.rows == len(expected.rows)
    assert_equal(found.ptk_covariance, expected.K)
    assert_equal(found.agop, expected.G)
    assert_equal(found.nfm, expected.F)
    each = expected.deltas @ expected.weight
    assert_equal(found.agop, torch.einsum("pcrn,pcrm->nm", each, each) / found.rows)
    assert float(expected.K.norm()) > 0
    for kind in ("cosine", "pearson"):
        value = found.correlations(kind).uncentered
        assert value == pytest.approx(float(fl.metrics.correlation(found.nfm, found.agop, kind)), abs=1e-10)
        assert -1 - 1e-12 <= value <= 1 + 1e-12


def attend(query: Tensor, key: Tensor, value: Tensor, fused: bool = True) -> Tensor:
    """(P, heads, T, d) -> (P, T, heads * d)"""
    if fused:
        mixed = F.scaled_dot_product_attention(query, key, value)
    else:
        mixed = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1) @ value
    return mixed.transpose(1, 2).flatten(2)


# ---------------------------------------------------------------------------------------------------------------------
# every kind of layer
# ---------------------------------------------------------------------------------------------------------------------

Built = tuple[nn.Module, Any, dict[str, str]]


def mlp() -> Built:
    model = nn.Sequential(linear(4, 7), nn.ReLU(), linear(7, 5), nn.Tanh(), linear(5, 3))
    return model, torch.randn(9, 4), {"0": "0.weight", "2": "2.weight", "4": "4.weight"}


def mlp_without_bias() -> Built:
    model = nn.Sequential(linear(4, 7, False), nn.GELU(), linear(7, 1, False))
    return model, torch.randn(9, 4), {"0": "0.weight", "2": "2.weight"}


def in_place_relu() -> Built:
    model = nn.Sequential(linear(4, 7), nn.ReLU(inplace=True), linear(7, 5), nn.ReLU(inplace=True), linear(5, 2))
    return model, torch.randn(9, 4), {"0": "0.weight", "2": "2.weight", "4": "4.weight"}


def tokens() -> Built:
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).mean(1)

    return Net(forward, first=linear(4, 6), second=linear(6, 3)), torch.randn(5, 7, 4), named("first", "second")


def tokens_time_first() -> Built:
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.transpose(0, 1))))[-1]

    return Net(forward, first=linear(4, 6), second=linear(6, 3)), torch.randn(5, 5, 4), named("first", "second")


def convolution_1d() -> Built:
    model = nn.Sequential(nn.Conv1d(3, 5, 4, stride=2, padding=3, dilation=2), nn.Tanh(), nn.Flatten(), linear(25, 2))
    return model, torch.randn(6, 3, 9), {"0": "0.weight", "3": "3.weight"}


def convolution_2d() -> Built:
    first = nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2)
    model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(6, 4, 2, bias=False), nn.Flatten(), linear(32, 3))
    return model, torch.randn(5, 4, 5, 7), {"0": "0.weight", "2": "2.weight", "4": "4.weight"}


def depthwise_convolution() -> Built:
    layers = [nn.Conv2d(3, 6, 3, groups=3, padding="same"), nn.SiLU(), nn.Conv2d(6, 4, 1), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten()), torch.randn(5, 3, 4, 6), {"0": "0.weight", "2": "2.weight"}


def convolution_3d() -> Built:
    model = nn.Sequential(nn.Conv3d(2, 3, (2, 1, 2)), nn.Tanh(), nn.Flatten(), linear(24, 2))
    return model, torch.randn(4, 2, 3, 2, 3), {"0": "0.weight", "3": "3.weight"}


def transposed_convolution() -> Built:
    conv = nn.ConvTranspose2d(4, 6, (3, 2), stride=2, padding=1, output_padding=(1, 0), groups=2)
    model = nn.Sequential(conv, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), linear(24, 2))
    return model, torch.randn(5, 4, 3, 4), {"0": "0.weight", "4": "4.weight"}


def transposed_convolution_1d() -> Built:
    conv = nn.ConvTranspose1d(4, 6, 3, stride=3, groups=2, dilation=2, output_padding=2, bias=False)
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), linear(96, 2))
    return model, torch.randn(5, 4, 4), {"0": "0.weight", "3": "3.weight"}


def called_twice() -> Built:
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))) + self.layer(x.flip(1)))

    return Net(forward, layer=linear(4, 4), head=linear(4, 3)), torch.randn(7, 4), named("layer", "head")


def called_on_two_scales() -> Built:
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(self.conv(x).tanh().mean((2, 3)) * self.conv(F.avg_pool2d(x, 2)).tanh().mean((2, 3)))

    return Net(forward, conv=nn.Conv2d(2, 3, 2), head=linear(3, 2)), torch.randn(5, 2, 4, 6), named("conv", "head")


def weight_norm() -> Built:
    first = parametrizations.weight_norm(linear(4, 6))
    second = parametrizations.spectral_norm(linear(6, 5))
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), parametrizations.orthogonal(linear(5, 3)))
    return (
        model,
        torch.randn(7, 4),
        {str(n): f"{n}.parametrizations.weight.{'original' * (n > 0) or 'original1'}" for n in (0, 2, 4)},
    )


def functional_weight() -> Built:
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.weight * 2.0))

    return (
        Net(forward, weight=parameter(4, 6), head=linear(6, 3)),
        torch.randn(7, 4),
        {"": "weight", "head": "head.weight"},
    )


def rescaled_weight() -> Built:
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(x, self.layer.weight * 0.5, self.layer.bias)))

    return Net(forward, layer=linear(4, 6), head=linear(6, 3)), torch.randn(7, 4), named("layer", "head")


def frozen_embedding_below() -> Built:
    """No input needs a gradient: the op keeps its weight no longer."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.table(ids))).mean(1))

    model = Net(forward, table=nn.Embedding(6, 4).requires_grad_(False), body=linear(4, 5), head=linear(5, 2))
    return model, torch.randint(6, (5, 3)), named("body", "head")


def named(*layers: str) -> dict[str, str]:
    return {layer: f"{layer}.weight" for layer in layers}


KINDS = [
    mlp,
    mlp_without_bias,
    in_place_relu,
    tokens,
    tokens_time_first,
    convolution_1d,
    convolution_2d,
    depthwise_convolution,
    convolution_3d,
    transposed_convolution,
    transposed_convolution_1d,
    called_twice,
    called_on_two_scales,
    weight_norm,
    functional_weight,
    rescaled_weight,
    frozen_embedding_below,
]


@pytest.mark.parametrize("build", KINDS, ids=lambda build: build.__name__)
def test_every_kind_of_layer(build: Callable[[], Built]):
    model, x, layers = build()
    found = fl.neural_features(model, x)
    assert list(found) == list(layers)
    for name, weight in layers.items():
        assert_features(found[name], features(model, x, weight))


@pytest.mark.parametrize("output", [0, 2])
def test_a_single_output(output: int):
    model, x, layers = mlp()
    found = fl.neural_features(model, x, outputs=output)
    for name, weight in layers.items():
        assert_equal(found[name].ptk_covariance, features(model, x, weight, outputs=[output]).K)


def test_outputs_add_up():
    model, x, _ = convolution_2d()
    parts = [fl.neural_features(model, x, outputs=c)["0"].ptk_covariance for c in range(3)]
    assert_equal(fl.neural_features(model, x)["0"].ptk_covariance, sum(parts))


def test_the_agop_of_a_first_layer_is_that_of_the_input_gradient():
    model, x, _ = mlp()
    inputs = x.clone().requires_grad_()
    outputs = model(inputs)
    expected = torch.zeros(4, 4)
    for c in range(3):
        (gradient,) = torch.autograd.grad(outputs[:, c].sum(), inputs, retain_graph=True)
        expected += gradient.T @ gradient / len(x)
    assert_equal(fl.neural_features(model, x)["0"].agop, expected)


def test_the_input_gradient_of_a_convolution_is_the_fold_of_patch_gradients():
    conv = nn.Conv2d(2, 3, 2, bias=False)
    model, x = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), linear(18, 1)), torch.randn(5, 2, 4, 3)
    reference = features(model, x, "0.weight")
    patches = reference.through[:, 0].reshape(5, 5, 6, 8).diagonal(dim1=0, dim2=1).permute(2, 1, 0)  # (P, C q^2, T)
    inputs = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs)
    assert_equal(F.fold(patches, (4, 3), 2), gradient)
    assert_equal(fl.neural_features(model, x)["0"].agop, torch.einsum("pnt,pmt->nm", patches, patches) / 30)


def test_float32_and_its_copy_in_double():
    model, x, _ = mlp()
    expected = fl.neural_features(model, x)
    single = fl.neural_features(model.float(), x.float())
    double = fl.neural_features(model.float(), x.float(), dtype=DOUBLE)
    assert single["0"].weight.dtype == single["0"].ptk_covariance.dtype == DOUBLE
    assert_equal(single["2"].ptk_covariance, expected["2"].ptk_covariance, 1e-5)
    assert_equal(double["2"].ptk_covariance, expected["2"].ptk_covariance, 1e-6)  # rounded weights
    assert single["0"].uncentered == pytest.approx(expected["0"].uncentered, abs=1e-5)


def test_small_gradients_in_single_precision_have_the_same_correlation():
    model, x = nn.Sequential(linear(4, 5), nn.Tanh(), linear(5, 2)).float(), torch.randn(9, 4).float()
    expected = fl.neural_features(model, x)["0"].uncentered
    with torch.no_grad():
        model[2].weight.mul_(1e-22)
    assert fl.neural_features(model, x, dtype=DOUBLE)["0"].uncentered == pytest.approx(expected, abs=1e-5)
    assert fl.neural_features(model, x)["0"].uncentered == pytest.approx(expected, abs=1e-5)


def test_inputs_may_be_written_to_by_the_model():
    model, x = nn.Sequential(nn.ReLU(inplace=True), linear(4, 6), nn.Tanh(), linear(6, 2)), torch.randn(5, 4)
    expected = features(model, x.clone(), "1.weight").K
    assert_equal(fl.neural_features(model, x)["1"].ptk_covariance, expected)


# ---------------------------------------------------------------------------------------------------------------------
# attention
# ---------------------------------------------------------------------------------------------------------------------


def head_units(layout: str, heads: int, width: int, part: int) -> list[int]:
    """Units of a fused projection that are queries, keys or values (part 0, 1, 2)."""
    if layout == "(3, heads, d)":
        return list(range(part * heads * width, (part + 1) * heads * width))
    return [(head * 3 + part) * width + place for head in range(heads) for place in range(width)]


def fused_attention(layout: str, fused: bool, rotary: bool = False) -> nn.Module:
    def rotate(x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[-2])[:, None] * torch.tensor([1.0, 0.3])
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    def forward(self: Net, x: Tensor) -> Tensor:
        samples, positions, _ = x.shape
        if layout == "(3, heads, d)":
            parts = self.qkv(x).view(samples, positions, 3, 2, 4).permute(2, 0, 3, 1, 4)
        else:
            parts = self.qkv(x).view(samples, positions, 2, 3, 4).permute(3, 0, 2, 1, 4)
        query, key, value = parts
        if rotary:
            query, key = rotate(query), rotate(key)
        return self.head(self.out(attend(query, key, value, fused)).tanh().mean(1))

    return Net(forward, qkv=linear(6, 24), out=linear(8, 5), head=linear(5, 3))


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("fused", [True, False], ids=["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["(3, heads, d)", "(heads, 3, d)"])
def test_fused_projections_are_taken_apart(layout: str, fused: bool, rotary: bool):
    model, x = fused_attention(layout, fused, rotary), torch.randn(5, 7, 6)
    found = fl.neural_features(model, x)
    assert list(found) == ["qkv.q", "qkv.k", "qkv.v", "out", "head"]
    for part, role in enumerate("qkv"):
        units = head_units(layout, 2, 4, part)
        assert found[f"qkv.{role}"].role == role
        assert_features(found[f"qkv.{role}"], features(model, x, "qkv.weight", units=units))
    assert found["out"].role is None
    assert_features(found["out"], features(model, x, "out.weight"))


def test_the_gradient_of_a_token_is_not_the_agop_of_one_projection():
    model, x = fused_attention("(3, heads, d)", True), torch.randn(5, 7, 6)
    inputs = x.clone().requires_grad_()
    whole = torch.stack([torch.autograd.grad(model(inputs)[:, c].sum(), inputs)[0] for c in range(3)]).reshape(-1, 6)
    expected = whole.T @ whole / 35
    assert float((fl.neural_features(model, x)["qkv.v"].agop - expected).norm()) > 0.1 * float(expected.norm())


def separate_attention(fused: bool) -> nn.Module:
    def forward(self: Net, x: Tensor, memory: Tensor) -> Tensor:
        def heads(rows: Tensor) -> Tensor:
            return rows.unflatten(-1, (2, 4)).transpose(1, 2)

        mixed = attend(heads(self.query(x)), heads(self.key(memory)), heads(self.value(memory)), fused)
        return self.out(mixed).tanh().mean(1)

    return Net(forward, query=linear(6, 8), key=linear(5, 8), value=linear(5, 8), out=linear(8, 3))


@pytest.mark.parametrize("fused", [True, False], ids=["sdpa", "eager"])
def test_separate_projections_and_cross_attention(fused: bool):
    model, x = separate_attention(fused), (torch.randn(5, 4, 6), torch.randn(5, 7, 5))
    found = fl.neural_features(model, x)
    assert [layer.role for layer in found.values()] == ["q", "k", "v", None]
    for name, layer in found.items():
        assert_features(layer, features(model, x, f"{name}.weight"))


def test_keys_and_values_fused():
    def forward(self: Net, x: Tensor) -> Tensor:
        key, value = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        query = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return self.out(attend(query, key, value)).mean(1)

    model, x = Net(forward, q=linear(6, 8, False), kv=linear(6, 16), out=linear(8, 3)), torch.randn(5, 7, 6)
    found = fl.neural_features(model, x)
    assert {name: layer.role for name, layer in found.items()} == {"q": "q", "kv.k": "k", "kv.v": "v", "out": None}
    for name, units in (("kv.k", range(8)), ("kv.v", range(8, 16))):
        assert_features(found[name], features(model, x, "kv.weight", units=list(units)))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_self_attention(batch_first: bool, need_weights: bool):
    def forward(self: Net, x: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        mixed = self.attention(x, x, x, need_weights=need_weights)[0]
        return self.head(mixed.tanh().mean(1 if batch_first else 0))

    attention = nn.MultiheadAttention(6, 2, batch_first=batch_first)
    model, x = Net(forward, attention=attention, head=linear(6, 3)), torch.randn(5, 5, 6)
    found = fl.neural_features(model, x)
    assert list(found) == ["attention.q", "attention.k", "attention.v", "attention.out_proj", "head"]
    for part, role in enumerate("qkv"):
        units = head_units("(3, heads, d)", 2, 3, part)
        assert_features(found[f"attention.{role}"], features(model, x, "attention.in_proj_weight", units=units))
    assert_features(found["attention.out_proj"], features(model, x, "attention.out_proj.weight"))


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_cross_attention(batch_first: bool):
    """Queries and memory of unequal length: the packed weight is applied in two pieces, q and (k, v)."""

    def forward(self: Net, x: Tensor, memory: Tensor) -> Tensor:
        x, memory = (part if batch_first else part.transpose(0, 1) for part in (x, memory))
        return self.attention(x, memory, memory, need_weights=False)[0].tanh().mean(1 if batch_first else 0)

    model = Net(forward, attention=nn.MultiheadAttention(6, 2, batch_first=batch_first))
    x = (torch.randn(5, 4, 6), torch.randn(5, 7, 6))
    found = fl.neural_features(model, x)
    assert found.keys() == {"attention.q", "attention.k", "attention.v", "attention.out_proj"}
    weight = "attention.in_proj_weight"
    assert_features(found["attention.q"], features(model, x, weight, calls=[0]))
    assert_features(found["attention.k"], features(model, x, weight, calls=[1], units=list(range(6))))
    assert_features(found["attention.v"], features(model, x, weight, calls=[1], units=list(range(6, 12))))


def test_multihead_attention_with_unequal_widths():
    def forward(self: Net, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(x, key, value)[0].tanh().mean(1)

    model = Net(forward, attention=nn.MultiheadAttention(6, 2, kdim=5, vdim=4, batch_first=True))
    x = (torch.randn(5, 4, 6), torch.randn(5, 7, 5), torch.randn(5, 7, 4))
    found = fl.neural_features(model, x)
    for role in "qkv":
        assert_features(found[f"attention.{role}"], features(model, x, f"attention.{role}_proj_weight"))


@pytest.mark.parametrize("case", ["mask that needs a gradient", "keys shared by all heads"])
def test_fused_projections_where_torch_takes_the_plain_path(case: str):
    def forward(self: Net, x: Tensor, mask: Tensor) -> Tensor:
        shared = case == "keys shared by all heads"
        parts = self.qkv(x).split([8, 4, 4] if shared else [8, 8, 8], -1)
        query, key, value = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=None if shared else mask[:, None])
        return self.out(mixed.transpose(1, 2).flatten(2)).mean(1)

    width = 16 if case == "keys shared by all heads" else 24
    model = Net(forward, qkv=linear(6, width), out=linear(8, 3))
    assert [*fl.neural_features(model, (torch.randn(5, 7, 6), torch.randn(5, 7, 7)))] == [
        "qkv.q",
        "qkv.k",
        "qkv.v",
        "out",
    ]


def test_a_softmax_between_plain_layers_is_no_attention():
    layers = [linear(4, 5, False), nn.ReLU(), linear(5, 6, False), nn.Softmax(1), linear(6, 2, False)]
    assert [layer.role for layer in fl.neural_features(nn.Sequential(*layers), torch.randn(7, 4)).values()] == [
        None
    ] * 3


def test_a_fused_projection_with_dead_units_is_the_same_in_every_chunk():
    def forward(self: Net, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).relu().unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(attend(query, key, value)).mean(1)

    model, x = Net(forward, qkv=linear(6, 24), out=linear(8, 3)), torch.randn(40, 4, 6)
    nn.init.constant_(model.qkv.bias, -1.0)
    assert list(fl.neural_features(model, x)) == ["qkv.q", "qkv.k", "qkv.v", "out"]


# ---------------------------------------------------------------------------------------------------------------------
# names
# ---------------------------------------------------------------------------------------------------------------------


def weight_chain() -> tuple[nn.Module, Tensor]:
    def forward(self: Net, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x

    shapes = [(4, 6), (6, 5), (5, 2)]
    return Net(forward, weights=nn.ParameterList([parameter(*shape) for shape in shapes])), torch.randn(7, 4)


def test_numbers_in_names_are_those_of_the_parameters():
    model, x = weight_chain()
    found = fl.neural_features(model, x)
    for number, weight in enumerate(model.weights):
        assert torch.equal(found[f"weights.{number}"].weight, weight.detach().T)


def test_two_weights_with_equal_values_are_two():
    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.A) @ self.B + torch.tanh(x.flip(1) @ self.C) @ self.D

    model = Net(forward, A=parameter(4, 5), B=parameter(5, 2), C=parameter(4, 5), D=parameter(5, 2))
    with torch.no_grad():
        model.C.copy_(model.A)
    assert len(fl.neural_features(model, torch.randn(7, 4))) == 4


def test_weights_that_began_equal_can_be_compared_with_where_they_began():
    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.A) @ self.B + torch.tanh(x.flip(1) @ self.C) @ self.D

    model = Net(forward, A=parameter(4, 5), B=parameter(5, 2), C=parameter(4, 5), D=parameter(5, 2))
    start = {
        name: torch.zeros_like(value) if name in "AC" else value.clone() for name, value in model.state_dict().items()
    }
    assert all(
        layer.weight_change >= 0 for layer in fl.neural_features(model, torch.randn(7, 4), initial=start).values()
    )


def test_no_layer_takes_the_name_of_another():
    class Chain(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(linear(4, 5), nn.Tanh(), linear(5, 3))
            self.A, self.B = parameter(3, 3), parameter(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(super().forward(x) @ self.A) @ self.B

    assert len(fl.neural_features(Chain(), torch.randn(7, 4))) == 4


def test_layers_by_globs():
    model, x, _ = mlp()
    assert list(fl.neural_features(model, x, layers="2")) == ["2"]
    assert list(fl.neural_features(model, x, layers=["4", "0"])) == ["0", "4"]
    model, x = fused_attention("(3, heads, d)", True), torch.randn(5, 7, 6)
    assert list(fl.neural_features(model, x, layers="qkv")) == ["qkv.q", "qkv.k", "qkv.v"]
    assert list(fl.neural_features(model, x, layers="*.k")) == ["qkv.k"]
    chosen = fl.neural_features(model, x, layers=["*.k", "out"])
    assert_equal(chosen["qkv.k"].agop, fl.neural_features(model, x)["qkv.k"].agop)


def test_layers_of_a_tied_module_have_its_first_name():
    shared = linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), linear(4, 2))
    found, x = fl.neural_features(model, torch.randn(3, 4)), torch.randn(7, 4)
    assert list(found) == ["0", "4"]
    assert_features(fl.neural_features(model, x)["0"], features(model, x, "0.weight"))


# ---------------------------------------------------------------------------------------------------------------------
# what is left out
# ---------------------------------------------------------------------------------------------------------------------


def test_embedding_tables_and_tied_heads_are_left_out_and_named():
    def forward(self: Net, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.table(ids)))).mean(1)

    table, head = nn.Embedding(6, 4), linear(4, 6, False)
    head.weight = table.weight
    found = fl.neural_features(Net(forward, table=table, body=linear(4, 4), head=head), torch.randint(6, (5, 3)))
    assert list(found) == ["body"]
    assert found.left_out == {"table.weight": "its rows are looked up, as in an embedding table"}
    assert "left out: table.weight: its rows are looked up" in str(found)


def test_what_goes_to_the_fallback_is_left_out_and_named():
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x.flip(0))).flip(0))

    model = Net(forward, body=linear(4, 6), head=linear(6, 2))
    found = fl.neural_features(model, torch.randn(5, 4))
    assert list(found) == ["head"]
    assert found.left_out.keys() == {"body.weight"}
    with pytest.raises(UnsupportedModelError, match=r"body\.weight is not a linear map"):
        fl.neural_features(model, torch.randn(5, 4), layers="body")


def test_one_unreadable_weight_does_not_hide_the_others_of_its_module():
    def forward(self: Net, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.A) @ self.B + F.bilinear(x, x, self.C)

    model = Net(forward, A=parameter(4, 5), B=parameter(5, 2), C=parameter(2, 4, 4))
    assert len(fl.neural_features(model, torch.randn(7, 4))) == 2


def expanded_weight() -> tuple[nn.Module, Tensor]:
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(torch.bmm(x, self.inner.weight.expand(len(x), -1, -1)).tanh().mean(1))

    inner = nn.Module()
    inner.weight = parameter(4, 5)
    return Net(forward, inner=inner, head=linear(5, 2)), torch.randn(5, 3, 4)


def position_table() -> tuple[nn.Module, Tensor]:
    def forward(self: Net, ids: Tensor) -> Tensor:
        hidden = self.token(ids) + self.inner(torch.arange(ids.shape[1]))
        return self.head(hidden.tanh().mean(1))

    return Net(forward, token=nn.Embedding(6, 4), inner=nn.Embedding(3, 4), head=linear(4, 2)), torch.randint(6, (5, 3))


def norm_over_two_axes() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential()
    model.add_module("inner", nn.LayerNorm((3, 4)))
    model.add_module("flat", nn.Flatten())
    model.add_module("head", linear(12, 2))
    return model, torch.randn(5, 3, 4)


@pytest.mark.parametrize("build", [expanded_weight, position_table, norm_over_two_axes])
def test_every_matrix_that_is_used_is_in_the_result_or_named(build: Callable[[], tuple[nn.Module, Tensor]]):
    model, x = build()
    found = fl.neural_features(model, x)
    assert "inner" in found or "inner.weight" in found.left_out


def test_a_weight_is_measured_at_all_its_uses_or_left_out():
    def forward(self: Net, x: Tensor) -> Tensor:
        return self.head(self.body(x) + F.linear(x.flip(1), self.body.weight * self.a_scale.weight))

    scale = nn.Module()
    scale.weight = parameter(3, 4)
    model, x = Net(forward, body=linear(4, 3), a_scale=scale, head=linear(3, 2)), torch.randn(7, 4)
    found = fl.neural_features(model, x)
    assert list(found) == ["head"]
    assert found.left_out.keys() == {"body.weight", "a_scale.weight"}


def test_no_layers_at_all_is_an_error_with_reasons():
    def forward(self: Net, ids: Tensor) -> Tensor:
        return self.table(ids).mean(1)

    with pytest.raises(UnsupportedModelError, match=r"no trainable weights that multiply.*embedding table"):
        fl.neural_features(Net(forward, table=nn.Embedding(6, 4)), torch.randint(6, (5, 3)))


# ---------------------------------------------------------------------------------------------------------------------
# LayerFeatures: correlations and ratios
# ---------------------------------------------------------------------------------------------------------------------


def reference_case() -> LayerFeatures:
    """003-A."""
    weight, start = torch.tensor([[1.0, 2], [0, 1], [-1, 0.5]]), torch.tensor([[0.5, 2], [0, 0], [-1, 1]])
    rows, rows0 = torch.tensor([[1.0, 0, 2], [0, -1, 1]]), torch.tensor([[1.0, 0, 1], [0, 0, 1]])
    return LayerFeatures(weight, rows.T @ rows / 2, start, (rows - rows0).T @ (rows - rows0) / 2)


def test_reference_case_a():
    case = reference_case()
    assert torch.equal(case.nfm, torch.tensor([[2, 1.5], [1.5, 5.25]]))
    assert torch.equal(case.agop, torch.tensor([[1, -1.25], [-1.25, 4.625]]))
    expected = {
        "uncentered": 0.742769848168,
        "centered": 0.970168702862,
        "double_centered": 0.980580675691,
        "ptk_centered": 0.606339062591,
        "centered_share": 0.091539528433,
        "double_centered_share": 0.378787878788,
        "weight_change": 0.454858826147,
    }
    for name, value in expected.items():
        assert getattr(case, name) == pytest.approx(value, abs=1e-12)
    assert case.correlations("pearson").uncentered == pytest.approx(0.965966652827, abs=1e-12)
    assert case.undefined == {}


def random_case(units: int, inputs: int, rows: int) -> LayerFeatures:
    weight, start = torch.randn(units, inputs), torch.randn(units, inputs)
    now, then = torch.randn(rows, units), torch.randn(rows, units)
    return LayerFeatures(weight, now.T @ now / rows, start, (now - then).T @ (now - then) / rows)


@pytest.mark.parametrize("sizes", [(5, 3, 11), (3, 8, 2), (1, 4, 5), (6, 6, 1)])
@pytest.mark.parametrize("kind", ["cosine", "pearson"])
def test_correlations_are_those_of_the_formed_matrices(sizes: tuple[int, int, int], kind: str):
    case = random_case(*sizes)
    weight, start, K, change = case.weight, case.initial_weight, case.ptk_covariance, case.ptk_change
    assert start is not None
    assert change is not None
    shift, found = weight - start, case.correlations(kind)
    assert_equal(case.centered_nfm, shift.T @ shift)
    assert_equal(case.centered_agop, shift.T @ K @ shift)
    for name, W, middle in (
        ("uncentered", weight, K),
        ("centered", shift, K),
        ("double_centered", shift, change),
        ("ptk_centered", start, change),
    ):
        expected = float(fl.metrics.correlation(W.T @ W, W.T @ middle @ W, kind))
        assert getattr(found, name) == pytest.approx(expected, abs=1e-11)
        assert -1 <= expected <= 1 + 1e-12
    trace = float(torch.trace(shift.T @ shift @ shift.T @ K @ shift))
    whole = float(torch.trace(weight.T @ weight @ weight.T @ K @ weight))
    double = float(torch.trace(shift.T @ shift @ shift.T @ change @ shift))
    assert case.centered_share == pytest.approx(trace / whole, rel=1e-11)
    assert case.double_centered_share == pytest.approx(double / trace, rel=1e-11)


@pytest.mark.parametrize("weight_scale", [1e-60, 1.0, 1e60])
@pytest.mark.parametrize("gradient_scale", [1e-60, 1e60])
def test_scales_drop_out_of_correlations(weight_scale: float, gradient_scale: float):
    case = reference_case()
    assert case.initial_weight is not None
    assert case.ptk_change is not None
    scaled = LayerFeatures(
        weight_scale * case.weight,
        gradient_scale * case.ptk_covariance,
        weight_scale * case.initial_weight,
        gradient_scale * case.ptk_change,
    )
    for kind in ("cosine", "pearson"):
        for name, value in vars(case.correlations(kind)).items():
            assert getattr(scaled.correlations(kind), name) == pytest.approx(value, abs=1e-11)
    for name in ("centered_share", "double_centered_share", "weight_change"):
        assert getattr(scaled, name) == pytest.approx(getattr(case, name), rel=1e-11)


# K, rounded to double, does not know the value any better: 1e-16 of it is seen by weights 1 / spread as large, squared.
@pytest.mark.parametrize(("spread", "rounding"), [(1e-2, 1e-12), (1e-4, 1e-8)])
def test_cosine_of_a_layer_whose_gradients_avoid_its_large_component(spread: float, rounding: float):
    """Gradients of a layer norm's input sum to zero, and so miss what all rows of W have in common."""
    away = torch.eye(6) - 1 / 6
    rows = torch.randn(9, 6) @ away
    case = LayerFeatures(torch.ones(6, 1) * torch.randn(1, 5) + spread * torch.randn(6, 5), rows.T @ rows / 9)
    shift = away @ case.weight  # W^T K W without its cancelling part
    expected = float(fl.metrics.correlation(case.nfm, shift.T @ case.ptk_covariance @ shift))
    assert case.uncentered == pytest.approx(expected, abs=rounding)


def test_pearson_of_nearly_constant_matrices():
    case = LayerFeatures(1 + 1e-5 * torch.randn(3, 4), torch.eye(3) + 0.1)
    expected = float(fl.metrics.correlation(case.nfm, case.agop, "pearson"))
    assert case.correlations("pearson").uncentered == pytest.approx(expected, abs=1e-8)


def test_unknown_kinds_are_refused():
    with pytest.raises(InputValueError, match="'spearman', expected 'cosine' or 'pearson'"):
        reference_case().correlations("spearman")  # type: ignore[arg-type]


def test_what_is_undefined_is_nan_with_a_reason():
    case = LayerFeatures(torch.randn(3, 2), torch.eye(3))
    for name in (
        "centered",
        "double_centered",
        "ptk_centered",
        "centered_share",
        "double_centered_share",
        "weight_change",
    ):
        assert math.isnan(getattr(case, name))
        assert "no initial=" in case.undefined[name]
    assert not math.isnan(case.uncentered)
    assert "uncentered" not in case.undefined
    with pytest.raises(InputValueError, match="no initial= was given"):
        _ = case.centered_nfm
    with pytest.raises(InputValueError, match="no initial= was given"):
        _ = case.centered_agop


def test_nothing_has_moved_yet():
    model, x, _ = mlp()
    found = fl.neural_features(model, x, initial=copy.deepcopy(model.state_dict()))
    for layer in found.values():
        assert layer.weight_change == 0.0
        assert layer.centered_share == 0.0
        assert float(layer.ptk_change.abs().max()) == 0.0  # the same samples, the same directions
        assert all(math.isnan(getattr(layer, name)) for name in ("centered", "double_centered", "ptk_centered"))
        assert "not moved" in layer.undefined["centered"]
        assert "not changed" in layer.undefined["ptk_centered"]
    assert math.isnan(found.mean("centered"))


def test_gradients_that_vanish_leave_nan_with_a_reason():
    model = nn.Sequential(linear(4, 5), nn.Tanh(), linear(5, 2))
    nn.init.zeros_(model[2].weight)
    found = fl.neural_features(model, torch.randn(6, 4))
    assert math.isnan(found["0"].uncentered)
    assert "zero" in found["0"].undefined["uncentered"]
    assert math.isnan(found["2"].uncentered)  # W = 0


# ---------------------------------------------------------------------------------------------------------------------
# initial=
# ---------------------------------------------------------------------------------------------------------------------


def trained(steps: int = 3, rate: float = 0.3) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    return trained_on(torch.randn(9, 3), steps, rate)


def trained_on(y: Tensor, steps: int, rate: float) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    model, x, _ = mlp()
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, x, start


def test_everything_that_compares_with_initialization():
    model, x, start = trained()
    begun = copy.deepcopy(model)
    begun.load_state_dict(start)
    found = fl.neural_features(model, x, initial=start)
    for name in ("0", "2", "4"):
        now, then = (features(which, x, f"{name}.weight") for which in (model, begun))
        change = now.deltas - then.deltas
        Kb = torch.einsum("pcrk,pcrl->kl", change, change) / len(now.rows)
        layer = found[name]
        assert torch.equal(layer.initial_weight, then.weight)
        if name != "4":
            assert_equal(layer.ptk_change, Kb)
            expected = LayerFeatures(now.weight, now.K, then.weight, Kb)
            for kind in ("cosine", "pearson"):
                for key, value in vars(expected.correlations(kind)).items():
                    assert getattr(layer.correlations(kind), key) == pytest.approx(value, abs=1e-9)
        shift = now.weight - then.weight
        assert_equal(layer.centered_nfm, shift.T @ shift)
        assert_equal(layer.centered_agop, shift.T @ now.K @ shift)
        assert layer.weight_change == pytest.approx(float(shift.norm() / now.weight.norm()), rel=1e-12)
    assert float(found["4"].ptk_change.abs().max()) == 0.0  # df/dh of the last layer is always the identity


@pytest.mark.parametrize("rate", [0.5, 1e-5])
def test_c_nfc_after_one_step_is_equation_6(rate: float):
    """Exact for any step with K at the start (003 Prop. 3); for small ones with K after the step, as measured."""
    y = torch.randn(9, 3)
    model, x, start = trained_on(y, 1, rate)
    begun = copy.deepcopy(model)
    begun.load_state_dict(start)
    residual = fl.theory.early.loss_derivative(begun(x).detach(), y, "mean-over-outputs")
    measured, before = fl.neural_features(model, x, initial=start), fl.neural_features(begun, x)
    for name, rows in (("0", x), ("2", torch.relu(begun[0](x)).detach())):
        kernel = fl.quantities.ptk(begun, x, layer=name, outputs="full")
        layer = measured[name]
        for kind in ("cosine", "pearson"):
            expected = float(fl.theory.early.derivative_correlation(rows, residual, kernel, kind))
            exact = LayerFeatures(layer.weight, before[name].ptk_covariance, layer.initial_weight).correlations(kind)
            assert exact.centered == pytest.approx(expected, abs=1e-9)
            found = layer.correlations(kind).centered
            if rate < 1e-3:
                assert found == pytest.approx(expected, abs=1e-4)
            else:
                assert abs(found - expected) > 1e-5


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "_orig_mod.module."])
def test_prefixes_of_compiled_and_parallel_models(prefix: str):
    model, x, start = trained()
    expected = fl.neural_features(model, x, initial=start)
    found = fl.neural_features(model, x, initial={prefix + name: value for name, value in start.items()})
    assert torch.equal(found["0"].ptk_change, expected["0"].ptk_change)


def test_prefixes_of_a_compiled_model_in_a_parallel_one():
    model, x, start = trained()
    fl.neural_features(model, x, initial={"module._orig_mod." + name: value for name, value in start.items()})


def test_a_child_may_be_called_module():
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(linear(4, 5), nn.ReLU(), linear(5, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    model = Wrapper()
    fl.neural_features(model, torch.randn(5, 4), initial=copy.deepcopy(model.state_dict()))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_a_wrapped_model_with_its_own_state_dict(wrap: Callable[[nn.Module], nn.Module]):
    model, x, start = trained()
    expected = fl.neural_features(model, x, initial=start)
    wrapped = wrap(model)
    names = list(wrapped.state_dict())
    found = fl.neural_features(wrapped, x, initial=dict(zip(names, start.values(), strict=True)))
    assert [layer.centered for layer in found.values()] == [layer.centered for layer in expected.values()]


def test_wrong_initial_states_are_refused():
    model, x, start = trained()
    with pytest.raises(InputTypeError, match=r"initial is Sequential, expected the state_dict"):
        fl.neural_features(model, x, initial=model)  # type: ignore[arg-type]
    with pytest.raises(InputValueError, match=r"(?s)initial does not fit.*4\.bias.*cloned before training"):
        fl.neural_features(model, x, initial={name: value for name, value in start.items() if name != "4.bias"})
    with pytest.raises(InputValueError, match="initial does not fit"):
        fl.neural_features(model, x, initial={**start, "extra": torch.zeros(3)})
    with pytest.raises(InputValueError, match="initial does not fit"):
        fl.neural_features(model, x, initial={**start, "0.weight": torch.zeros(7, 5)})
    with pytest.raises(InputValueError, match="initial does not fit"):
        fl.neural_features(model, x, initial={})


def test_buffers_at_initialization_count():
    """Gradients at the start are those of the network as it stood, its running statistics included."""
    model = nn.Sequential(linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), linear(5, 2))
    start, x = copy.deepcopy(model.state_dict()), torch.randn(9, 4)
    begun = copy.deepcopy(model)
    for _ in range(3):
        model(torch.randn(9, 4) * 3 + 1)
    assert not torch.equal(model[1].running_mean, begun[1].running_mean)
    now, then = (features(which, x, "0.weight").deltas for which in (model, begun))
    change = torch.einsum("pcrk,pcrl->kl", now - then, now - then) / 9
    assert_equal(fl.neural_features(model, x, initial=start)["0"].ptk_change, change)


def test_parametrized_weights_are_compared_by_value():
    model, x, _ = weight_norm()
    start = copy.deepcopy(model.state_dict())
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape))
    layer = fl.neural_features(model, x, initial=start)["0"]
    assert_equal(layer.initial_weight, before)
    assert_equal(layer.weight, model[0].weight.detach())


def test_a_model_that_reaches_its_weights_through_a_closure_is_refused_or_right():
    scale = parameter(5)
    model = Net(
        lambda self, x: self.head(torch.tanh(self.body(x)) * scale), body=linear(4, 5), head=linear(5, 2), scale=scale
    )
    start, x = copy.deepcopy(model.state_dict()), torch.randn(7, 4)
    then = features(model, x, "body.weight").deltas
    with torch.no_grad():
        scale.mul_(3.0)
    now = features(model, x, "body.weight").deltas
    change = torch.einsum("pcrk,pcrl->kl", now - then, now - then) / 7
    try:
        found = fl.neural_features(model, x, initial=start)["body"].ptk_change
    except UnsupportedModelError:
        return
    assert_equal(found, change)


# ---------------------------------------------------------------------------------------------------------------------
# readouts, probes
# ---------------------------------------------------------------------------------------------------------------------


def test_readouts_are_marked_and_left_out_of_means():
    model, x, _ = mlp()
    for outputs in (None, fl.Directions(3), fl.Directions(40, torch.Generator().manual_seed(5))):
        found = fl.neural_features(model, x, outputs=outputs)
        assert [layer.is_readout for layer in found.values()] == [False, False, True]
        assert found.mean() == pytest.approx((found["0"].uncentered + found["2"].uncentered) / 2)
    assert fl.neural_features(model, x)["4"].uncentered == pytest.approx(1.0, abs=1e-12)
    assert "readout" in str(found).splitlines()[3]
    scaled = fl.neural_features(model, x, readout=lambda out: -2.5 * out)
    assert scaled["4"].is_readout


def test_a_layer_as_wide_as_the_output_is_no_readout():
    model = nn.Sequential(linear(4, 3), nn.Tanh(), linear(3, 3), nn.Tanh(), linear(3, 3))
    assert [layer.is_readout for layer in fl.neural_features(model, torch.randn(7, 4)).values()] == [False, False, True]
    layers = fl.neural_features(nn.Sequential(model, nn.LogSoftmax(1)), torch.randn(7, 4))
    assert not any(layer.is_readout for layer in layers.values())


def test_a_hidden_layer_of_one_unit_is_no_readout():
    model = nn.Sequential(linear(4, 1), nn.Tanh(), linear(1, 1))
    assert [layer.is_readout for layer in fl.neural_features(model, torch.randn(7, 4)).values()] == [False, True]


def test_means_skip_what_is_undefined():
    layers = {
        "a": reference_case(),
        "b": LayerFeatures(torch.eye(2), torch.eye(2)),
        "c": LayerFeatures(torch.eye(2), torch.eye(2), is_readout=True),
    }
    found = NeuralFeatures(layers, {})
    assert found.mean("centered") == pytest.approx(0.970168702862)
    assert found.mean("uncentered") == pytest.approx((0.742769848168 + 1) / 2)


def test_probes_are_unbiased_and_the_same_at_both_ends():
    model, x, start = trained()
    exact = fl.neural_features(model, x, initial=start)
    draws = [
        fl.neural_features(model, x, initial=start, outputs=fl.Directions(2, torch.Generator().manual_seed(seed)))
        for seed in range(40)
    ]
    for name in ("0", "2"):
        for quantity in ("ptk_covariance", "ptk_change"):
            values = torch.stack([getattr(draw[name], quantity) for draw in draws])
            error = values.std(0) / math.sqrt(len(draws))
            assert float(error.max()) > 0
            deviation = (values.mean(0) - getattr(exact[name], quantity)).abs()
            assert bool((deviation <= 4.5 * error + 1e-12).all())
    unmoved = fl.neural_features(model, x, initial=copy.deepcopy(model.state_dict()), outputs=fl.Directions(2))
    assert float(unmoved["0"].ptk_change.abs().max()) == 0.0


def test_probes_without_a_generator_are_the_same_at_every_call():
    model, x, _ = mlp()
    first, second = (fl.neural_features(model, x, outputs=fl.Directions(2)) for _ in range(2))
    assert torch.equal(first["0"].ptk_covariance, second["0"].ptk_covariance)


# ---------------------------------------------------------------------------------------------------------------------
# chunks, memory, leaving no trace
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [None, 1, fl.Directions(3)])
def test_chunks_do_not_matter(outputs: Any, monkeypatch: pytest.MonkeyPatch):
    model, x, start = trained()
    x = torch.randn(23, 4)
    expected = fl.neural_features(model, x, initial=start, outputs=outputs)
    sizes = recorded_chunks(monkeypatch)
    found = fl.neural_features(model, x, initial=start, outputs=outputs, memory="40KB")
    assert len(sizes) > 6
    assert sizes[-1] != sizes[0]  # the last chunk is another size
    for name, layer in found.items():
        assert layer.rows == expected[name].rows == 23
        assert layer.is_readout == expected[name].is_readout
        for quantity in ("ptk_covariance", "ptk_change", "initial_weight"):
            assert float((getattr(layer, quantity) - getattr(expected[name], quantity)).abs().max()) < 1e-13
        for quantity, error in layer.errors.items():
            assert error == pytest.approx(expected[name].errors[quantity], rel=1e-6, abs=1e-12, nan_ok=True)


def recorded_chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    original = Measurement.chunk

    def chunk(self: Measurement, probe: Any, begin: int, end: int) -> Any:
        sizes.append(end - begin)
        return original(self, probe, begin, end)

    monkeypatch.setattr(Measurement, "chunk", chunk)
    return sizes


def test_a_single_sample():
    model, x, layers = tokens()
    for name, weight in layers.items():
        assert_features(fl.neural_features(model, x[:1])[name], features(model, x[:1], weight))


def test_memory_does_not_grow_with_the_number_of_samples(monkeypatch: pytest.MonkeyPatch):
    model, _, _ = convolution_2d()
    sizes = recorded_chunks(monkeypatch)
    fl.neural_features(model, torch.randn(20, 4, 5, 7), memory="400KB")
    largest = max(sizes)
    sizes.clear()
    fl.neural_features(model, torch.randn(160, 4, 5, 7), memory="400KB")
    assert max(sizes) == largest
    assert sum(sizes) == 160


def test_layers_that_do_not_fit_are_refused_before_they_are_measured():
    model = nn.Sequential(linear(4, 300), nn.ReLU(), linear(300, 2))
    with pytest.raises(MemoryBudgetError, match=r"for 0 with 300 units, expected at most .*choose layers="):
        fl.neural_features(model, torch.randn(5, 4), memory="500KB")
    assert list(fl.neural_features(model, torch.randn(5, 4), memory="500KB", layers="2")) == ["2"]


def test_measuring_changes_nothing():
    layers = [linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(inplace=True), linear(6, 3)]
    model = nn.Sequential(*layers)
    start, x = copy.deepcopy(model.state_dict()), torch.randn(9, 4)
    F.mse_loss(model(x), torch.randn(9, 3)).backward()
    model[4].weight.requires_grad_(True)
    model[1].eval()
    state = copy.deepcopy(model.state_dict())
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    flags = [part.training for part in model.modules()]
    random, samples, given = torch.get_rng_state(), x.clone(), copy.deepcopy(start)
    fl.neural_features(model, x, initial=start, outputs=fl.Directions(2))
    with pytest.raises(InputValueError):
        fl.neural_features(model, x, outputs=7)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, samples)
    assert not x.requires_grad
    assert x.grad is None
    assert [part.training for part in model.modules()] == flags
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    for name, value in start.items():
        assert torch.equal(value, given[name])
    for parameter_, before in zip(model.parameters(), grads, strict=True):
        assert torch.equal(parameter_.grad, before)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_under_any_grad_mode(context: Callable[[], Any]):
    model, x, layers = mlp()
    expected = features(model, x, layers["0"]).K
    with context():
        assert_equal(fl.neural_features(model, x.clone())["0"].ptk_covariance, expected)


# ---------------------------------------------------------------------------------------------------------------------
# arguments
# ---------------------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused():
    model, x, _ = mlp()
    with pytest.raises(InputValueError, match="outputs=3, expected an output between 0 and 2"):
        fl.neural_features(model, x, outputs=3)
    with pytest.raises(InputTypeError, match="outputs='sum', expected None"):
        fl.neural_features(model, x, outputs="sum")  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="outputs=True"):
        fl.neural_features(model, x, outputs=True)
    with pytest.raises(InputValueError, match="layers='body' matches no layer, expected some of 0, 2, 4"):
        fl.neural_features(model, x, layers="body")
    with pytest.raises(InputTypeError, match="dtype is"):
        fl.neural_features(model, x, dtype=torch.float16)
    with pytest.raises(InputValueError, match="memory='much'"):
        fl.neural_features(model, x, memory="much")
    with pytest.raises(InputTypeError, match="model is"):
        fl.neural_features(lambda x: x, x)  # type: ignore[arg-type]
    with pytest.raises(InputValueError, match="no trainable parameters"):
        fl.neural_features(model.requires_grad_(False), x)


def test_the_mean_of_an_unknown_quantity_is_refused():
    model, x, _ = mlp()
    with pytest.raises(fl.FeatlearnError):
        fl.neural_features(model, x).mean("correlation")


def test_printed_it_is_a_table():
    model, x, start = trained()
    lines = str(fl.neural_features(model, x, initial=start)).splitlines()
    assert lines[0].split() == ["layer", "shape", "UC-NFC", "C-NFC", "C/UC", "|W-W0|/|W|"]
    assert len(lines) == 4
    assert lines[1].split()[:4] == ["0", "7", "x", "4"]
    assert "(root)" in str(fl.neural_features(linear(4, 2), x))


def test_printed_it_says_why_a_number_is_nan():
    model, x, start = trained()
    (said,) = str(fl.neural_features(model, x)).splitlines()[4:]
    assert said.startswith("nan: C-NFC, C/UC, |W-W0|/|W|: no initial= was given")
    with torch.no_grad():
        model[2].weight.copy_(start["2.weight"])
    names = list(fl.neural_features(model, x))
    (said,) = str(fl.neural_features(model, x, initial=start)).splitlines()[4:]
    assert said == f"nan: C-NFC of {names[1]}: the weights have not moved from where they began"


@pytest.mark.parametrize("units", [7, 8, 29])
def test_wide_layers_of_few_inputs_need_no_root_of_a_wide_matrix(units: int, monkeypatch: pytest.MonkeyPatch):
    """Against the matrices over inputs themselves; from twice as many units on, roots are of 4 x 4 matrices."""
    generator = torch.Generator().manual_seed(units)
    W, W0, J, J0 = (torch.randn(*shape, generator=generator) for shape in [(units, 4)] * 2 + [(5, units)] * 2)
    K, Kb = J.T @ J / 5, (J - J0).T @ (J - J0) / 5
    sizes = set()
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (sizes.add(len(matrix)), eigh(matrix))[1])
    found = LayerFeatures(W, K, W0, Kb)
    Wb = W - W0
    pairs = {"uncentered": (W, K), "centered": (Wb, K), "double_centered": (Wb, Kb), "ptk_centered": (W0, Kb)}
    for name, (weight, spread) in pairs.items():
        expected = fl.metrics.correlation(weight.T @ weight, weight.T @ spread @ weight)
        assert getattr(found, name) == pytest.approx(float(expected), rel=1e-10)
    share = torch.trace(Wb.T @ Wb @ Wb.T @ K @ Wb) / torch.trace(W.T @ W @ W.T @ K @ W)
    assert found.centered_share == pytest.approx(float(share), rel=1e-10)
    assert sizes == {units if units < 8 else 4}


def test_an_initial_state_that_moved_along_is_refused():
    model, x = linear(4, 3), torch.randn(7, 4)
    with pytest.raises(InputValueError, match="initial shares its memory with the model"):
        fl.neural_features(model, x, initial=model.state_dict())
