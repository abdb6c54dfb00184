"""The networks of the papers: sizes, weights, both parametrizations, and kernels on each of them."""

import math
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.models import CNN, GPT, MLP, VGG11, ResNet18, WideResNet
from tests.references.jacobian import dense_jacobian


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def images(samples: int, channels: int, side: int, seed: int = 5) -> Tensor:
    return torch.randn(samples, channels, side, side, generator=seeded(seed), dtype=torch.float64)


def tokens(samples: int, length: int, seed: int = 5) -> Tensor:
    return torch.randint(7, (samples, length), generator=seeded(seed))


ROWS = torch.randn(4, 5, generator=seeded(5), dtype=torch.float64)
TINY: dict[str, tuple[Callable[..., nn.Module], Tensor]] = {
    "mlp": (lambda **options: MLP(5, 3, width=(6, 4), **options), ROWS),
    "scalar mlp": (lambda **options: MLP(5, None, width=4, **options), ROWS),
    "cnn": (lambda **options: CNN(2, 3, width=4, kernel_size=3, **options), images(3, 2, 5)),
    "wide": (lambda **options: WideResNet(0.125, 2, outputs=2, **options), images(3, 3, 8)),
    "residual": (lambda **options: ResNet18(2, width=2, **options), images(3, 3, 8)),
    "residual, groups": (lambda **options: ResNet18(2, width=2, norm="group", **options), images(3, 3, 8)),
    "residual, none": (lambda **options: ResNet18(None, width=2, norm="none", **options), images(3, 3, 8)),
    "vgg": (lambda **options: VGG11(2, width=2, head=5, **options), images(2, 3, 32)),
    "gpt": (lambda **options: GPT(7, context=6, blocks=2, heads=2, width=8, **options), tokens(3, 5)),
    "gpt, not tied": (
        lambda **options: GPT(7, context=6, blocks=1, heads=2, width=8, tied=False, **options),
        tokens(3, 5),
    ),
}
EACH = pytest.mark.parametrize("name", TINY)


def settings(name: str) -> dict[str, Callable[[Tensor], Tensor]]:
    return {"readout": fl.readouts.last_token} if name.startswith("gpt") else {}


@EACH
@pytest.mark.parametrize("parametrization", ["standard", "ntk"])
def test_kernels_are_those_of_the_dense_jacobian(name: str, parametrization: str):
    build, x = TINY[name]
    model = build(parametrization=parametrization, generator=seeded(1))
    kernel = fl.ntk(model, x, outputs="sum", **settings(name))
    jacobian = torch.cat([*dense_jacobian(model, x, **settings(name)).values()], -1)
    torch.testing.assert_close(kernel, torch.einsum("pcn,qcn->pq", jacobian, jacobian), rtol=1e-9, atol=1e-12)
    assert fl.plan(model, x, **settings(name)).fallbacks == {}


@EACH
def test_both_parametrizations_are_the_same_function(name: str):
    build, x = TINY[name]
    models = {kind: build(parametrization=kind, generator=seeded(1)) for kind in ("standard", "ntk")}
    standard, scaled = models["standard"].eval(), models["ntk"].eval()
    torch.testing.assert_close(standard(x), scaled(x), rtol=1e-10, atol=1e-12)
    kernels = {kind: fl.ntk(model, x, by="layer", **settings(name)) for kind, model in models.items()}
    layers = dict(scaled.named_modules())
    seen = 0
    for layer, kernel in kernels["standard"].items():
        multiplier = getattr(layers[layer], "multiplier", 1.0)
        seen += multiplier != 1.0
        torch.testing.assert_close(kernels["ntk"][layer], multiplier**2 * kernel, rtol=1e-9, atol=1e-12)
        if hasattr(layers[layer], "multiplier"):
            ratio = standard.get_submodule(layer).weight / scaled.get_submodule(layer).weight
            torch.testing.assert_close(ratio, torch.full_like(ratio, multiplier))
    assert seen


@EACH
def test_the_generator_decides_and_the_global_one_is_left_alone(name: str):
    build, _ = TINY[name]
    before = torch.get_rng_state()
    first, same, other = (build(generator=seeded(seed)).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], same[key]) for key in first)
    weights = [key for key in first if first[key].dim() > 1]
    assert weights
    assert not any(torch.equal(first[key], other[key]) for key in weights)
    torch.manual_seed(8)
    one = build().state_dict()
    torch.manual_seed(8)
    assert torch.equal(one[weights[0]], build().state_dict()[weights[0]])


@EACH
def test_biases_are_there_when_asked_for_and_zero(name: str):
    build, x = TINY[name]
    plain = [key for key, _ in build().named_parameters() if key.endswith("bias") and "norm" not in key]
    assert plain == []
    biased = build(bias=True, generator=seeded(1)).eval()
    biases = [value for key, value in biased.named_parameters() if key.endswith("bias") and "norm" not in key]
    assert biases
    assert all(not bias.any() for bias in biases)
    torch.testing.assert_close(biased(x), build(generator=seeded(1)).eval()(x))


# the infinitely wide limit


REFERENCE = {1: 0.9423311144, 2: 1.3514795611, 3: 1.7378446792}  # theory sheet 2.27: S = 1, 0.5, weight variance 2


@pytest.mark.parametrize("hidden_layers", REFERENCE)
def test_wide_networks_have_the_kernel_of_infinite_ones(hidden_layers: int):
    x = torch.tensor([[1.0, 0.0], [0.5, math.sqrt(0.75)]])  # 2 x . x' / d = 1 and 0.5
    limit = fl.theory.infinite_width.ntk(x, hidden_layers=hidden_layers)
    assert float(limit[0, 1]) == pytest.approx(REFERENCE[hidden_layers], abs=1e-9)
    kernels = torch.stack(
        [
            fl.ntk(MLP(2, None, width=700, hidden_layers=hidden_layers, parametrization="ntk", generator=seeded(s)), x)
            for s in range(10)
        ]
    )
    error = kernels.std(0) / math.sqrt(10)
    assert error.max() < 0.04 * limit.max()  # small enough to tell a wrong factor
    assert ((kernels.mean(0) - limit).abs() < 3.5 * error).all()


def test_wide_linear_networks_have_the_kernel_of_infinite_ones():
    x = torch.randn(3, 4, generator=seeded(2))
    limit = fl.theory.infinite_width.ntk(x, hidden_layers=2, activation="linear", weight_variance=1.0)
    torch.testing.assert_close(limit, 3 * x @ x.T / 4)  # each of three layers once
    model = MLP(4, 6, width=1500, activation="linear", parametrization="ntk", generator=seeded(0))
    assert (fl.ntk(model, x) - limit).norm() / limit.norm() < 0.05


def test_in_the_standard_parametrization_the_kernel_grows_with_the_width():
    x = torch.randn(3, 4, generator=seeded(2))
    sizes = [float(fl.ntk(MLP(4, None, width=width, generator=seeded(0)), x).trace()) for width in (100, 400)]
    assert sizes[1] / sizes[0] == pytest.approx(4.0, rel=0.3)


# weights


def weights(**options: object) -> Tensor:
    return MLP(200, 1, width=300, hidden_layers=1, generator=seeded(0), **options).hidden[0].weight.detach()


def test_weights_have_the_variance_asked_for():
    assert float(weights().std()) == pytest.approx(math.sqrt(2 / 200), rel=0.02)
    assert float(weights(activation="tanh").std()) == pytest.approx(math.sqrt(1 / 200), rel=0.02)
    assert float(weights(weight_variance=0.09).std()) == pytest.approx(0.3 / math.sqrt(200), rel=0.02)
    assert float(weights(parametrization="ntk").std()) == pytest.approx(1.0, rel=0.02)
    model = MLP(200, 300, width=400, weight_variance=(1.0, 2.0, 3.0), generator=seeded(0))
    layers = [*model.hidden, model.readout]
    found = [float(layer.weight.detach().var()) * layer.in_features for layer in layers]
    assert found == pytest.approx([1.0, 2.0, 3.0], rel=0.02)


def test_uniform_weights_of_a_third_are_the_default_of_torch():
    own = weights(distribution="uniform", weight_variance=1 / 3)
    torch.manual_seed(0)
    default = nn.Linear(200, 300, bias=False).weight.detach()
    bound = 1 / math.sqrt(200)
    for each in (own, default):
        assert float(each.abs().max()) == pytest.approx(bound, rel=1e-3)
        assert float(each.abs().max()) <= bound
        assert float(each.std()) == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert float(weights(distribution="uniform", parametrization="ntk").std()) == pytest.approx(1.0, rel=0.01)


def test_the_variance_of_a_convolution_counts_its_patch():
    model = CNN(8, 4, width=40, kernel_size=5, weight_variance=(1.0, 2.0, 3.0), generator=seeded(0))
    assert [float(layer.weight.detach().var()) * layer.weight[0].numel() for layer in model.hidden] == pytest.approx(
        [1, 2], rel=0.05
    )
    wide = WideResNet(1, 1, weight_variance=(36.0, 0.09, 1.0), generator=seeded(0))
    assert float(wide.first.weight.detach().var()) * 27 == pytest.approx(36.0, rel=0.15)
    for name, layer in wide.named_modules():
        if name.startswith("groups") and isinstance(layer, nn.Conv2d):
            assert float(layer.weight.detach().var()) * layer.weight[0].numel() == pytest.approx(0.09, rel=0.15)


def test_scaling_the_weights_scales_the_output():
    model = MLP(5, 3, width=6, hidden_layers=2, parametrization="ntk", generator=seeded(0))
    x = torch.randn(4, 5, generator=seeded(1))
    before = model(x).detach()
    torch.testing.assert_close(fl.steer.scale_init(model, 0.5)(x), before / 8)


# the functions, written out


FUNCTIONS: dict[str, Callable[[float], float]] = {
    "linear": lambda h: h,
    "relu": lambda h: max(h, 0.0),
    "leaky_relu": lambda h: h if h > 0 else 0.01 * h,
    "tanh": math.tanh,
    "sigmoid": lambda h: 1 / (1 + math.exp(-h)),
    "swish": lambda h: h / (1 + math.exp(-h)),
    "quadratic": lambda h: h**2,
    "gelu": lambda h: h * (1 + math.erf(h / math.sqrt(2))) / 2,
}


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_an_mlp_is_sums_and_activations(activation: str):
    model = MLP(3, 2, width=(4, 5), activation=activation, parametrization="ntk", generator=seeded(0))
    x = torch.randn(2, 3, generator=seeded(1))
    layers = [layer.weight.tolist() for layer in (*model.hidden, model.readout)]
    variance = 2.0 if activation in ("relu", "leaky_relu") else 1.0
    for sample, output in zip(x.tolist(), model(x).tolist(), strict=True):
        h = sample
        for position, matrix in enumerate(layers):
            scale = math.sqrt(variance / len(h))
            h = [scale * sum(w * v for w, v in zip(row, h, strict=True)) for row in matrix]
            h = h if position == 2 else [FUNCTIONS[activation](each) for each in h]
        assert output == pytest.approx(h, rel=1e-10)


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_networks_can_be_sent_to_other_processes(activation: str):
    model = MLP(3, 2, width=4, activation=activation, parametrization="ntk", generator=seeded(0))
    x = torch.randn(2, 3, generator=seeded(1))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_a_cnn_is_sums_over_patches():
    model = CNN(2, 2, width=3, kernel_size=3, parametrization="ntk", generator=seeded(0))
    x = images(2, 2, 4)
    h = x
    for layer in model.hidden:
        patches = nn.functional.unfold(h, 3, padding=1)  # (P, channels 9, positions)
        scale = math.sqrt(2 / (h.shape[1] * 9))
        h = (scale * torch.einsum("od,pdt->pot", layer.weight.flatten(1), patches)).relu().view(2, 3, 4, 4)
    expected = math.sqrt(2 / 3) * h.flatten(2).mean(2) @ model.readout.weight.T
    torch.testing.assert_close(model(x), expected)


def test_a_wide_residual_network_written_out():
    model = WideResNet(0.125, 1, generator=seeded(0))
    x = images(2, 3, 8)
    conv = nn.functional.conv2d
    h = conv(x, model.first.weight, padding=1)
    for position, group in enumerate(model.groups):
        (block,) = group
        first, second = (layer.weight for layer in block.main)
        stride = 2 if position else 1
        inner = conv(h.relu(), first, padding=1, stride=stride)
        h = conv(inner.relu(), second, padding=1) + conv(h, block.shortcut.weight, padding=1, stride=stride)
    assert h.shape == (2, 8, 2, 2)
    torch.testing.assert_close(model(x), (h.mean((2, 3)) @ model.readout.weight.T)[:, 0])


def test_gpt_looks_back_only():
    model = GPT(7, context=6, blocks=2, heads=2, width=8, deviation=0.5, generator=seeded(0))
    x = tokens(3, 6)
    changed = x.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 7
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] - after[:, 4:]).abs().amax((0, 2)).min() > 1e-3


def test_attention_written_out():
    model = GPT(7, context=6, blocks=1, heads=2, width=8, deviation=0.5, generator=seeded(0))
    attention = model.blocks[0].attention
    h = torch.randn(2, 5, 8, generator=seeded(1))
    expected = torch.zeros(2, 5, 8)
    for sample in range(2):
        for head in range(2):
            part = slice(4 * head, 4 * head + 4)
            query, key, value = (
                h[sample] @ layer.weight[part].T for layer in (attention.query, attention.key, attention.value)
            )
            for place in range(5):
                scores = torch.softmax(key[: place + 1] @ query[place] / math.sqrt(4), 0)
                expected[sample, place, part] = scores @ value[: place + 1]
    torch.testing.assert_close(attention(h), expected @ attention.output.weight.T)


# sizes


def test_parameter_counts():
    assert parameters(MLP(784, 10)) == 784 * 500 + 500 * 500 + 500 * 10
    assert parameters(MLP(784, None, width=(3, 4), bias=True)) == 784 * 3 + 3 + 3 * 4 + 4 + 4 + 1
    assert parameters(MLP(784, 10, hidden_layers=0)) == 7840
    assert parameters(CNN()) == 49 * 3 * 33 + 49 * 33 * 33 + 33 * 10
    blocks = 9 * (16 * 48 + 48 * 48 + 16 * 48 + 2 * 48 * 48)
    blocks += 9 * (48 * 96 + 96 * 96 + 48 * 96 + 2 * 96 * 96) + 9 * (96 * 192 + 192 * 192 + 96 * 192 + 2 * 192 * 192)
    assert parameters(WideResNet(3, 2)) == 27 * 16 + blocks + 192
    assert parameters(ResNet18()) == 11_173_962 - 10  # as published, less the bias of the readout
    assert parameters(VGG11(head=None, bias=True)) == 9_220_480 + 5130  # convolutions as published, readout
    assert parameters(GPT()) == 24960 + 98304 + 3 * (12 * 384**2 + 2 * 384) + 384


def test_convolutions_of_a_wide_residual_network():
    """6 b + 1 on the main path (002 App. J), and three shortcuts."""
    for b in (1, 3):
        layers = [name for name, layer in WideResNet(0.125, b).named_modules() if isinstance(layer, nn.Conv2d)]
        assert len([name for name in layers if "shortcut" not in name]) == 6 * b + 1
        assert len([name for name in layers if "shortcut" in name]) == 3


@pytest.mark.parametrize("outputs", [None, 1, 3])
def test_shapes_of_outputs(outputs: int | None):
    shape = (2,) if outputs is None else (2, outputs)
    assert MLP(12, outputs, width=3)(images(2, 3, 2)).shape == shape
    assert CNN(3, outputs, width=3)(images(2, 3, 9)).shape == shape
    assert WideResNet(0.125, 1, outputs=outputs)(images(2, 3, 8)).shape == shape
    assert ResNet18(outputs, width=2)(images(2, 3, 8)).shape == shape
    assert VGG11(outputs, width=2, head=None)(images(2, 3, 33)).shape == shape
    assert GPT(7, context=6, heads=2, width=4)(tokens(2, 6)).shape == (2, 6, 7)


def test_layers_are_found_by_the_measurements():
    x = torch.randn(4, 5, generator=seeded(1))
    model = MLP(5, 3, width=6, parametrization="ntk", generator=seeded(0))
    assert [*fl.layer_alignment(model, x)] == [("hidden.0", "hidden.1"), ("hidden.1", "readout")]
    features = fl.neural_features(
        GPT(7, context=6, blocks=1, heads=2, width=8), tokens(3, 5), readout=fl.readouts.last_token
    )
    assert {f"blocks.0.attention.{part}" for part in ("query", "key", "value")} <= set(features)


def test_a_network_steers_and_saves(tmp_path):
    model = MLP(5, None, width=6, generator=seeded(0))
    x = torch.randn(4, 5, generator=seeded(1))
    scaled = fl.steer.scale_output(model, 1 / 3)
    assert scaled(x).abs().max() < 1e-12
    parametrized, groups = fl.steer.parametrize(MLP(5, 2, width=6, hidden_layers=1), "mean_field", lr=0.1)
    assert parametrized(x).shape == (4, 2)
    assert [group["name"] for group in groups] == ["hidden.0", "readout"]
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = MLP(5, None, width=6, generator=seeded(1))
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MLP(5, 2, activation="reul"), "activation='reul', expected one of linear, relu"),
        (lambda: MLP(5, 2, parametrization="mup"), "parametrization='mup', expected one of standard, ntk"),
        (lambda: MLP(5, 2, distribution="cauchy"), "distribution='cauchy'"),
        (lambda: MLP(5, 2, width=(3, 4), hidden_layers=3), "2 widths and hidden_layers=3"),
        (lambda: MLP(5, 2, width=0), "width=0"),
        (lambda: MLP(5, 0), "outputs=0"),
        (lambda: MLP(5.5, 2), "inputs=5.5"),
        (lambda: MLP(5, 2, weight_variance=(1.0, 2.0)), "a number, or three"),
        (lambda: MLP(5, 2, weight_variance=-1.0), "weight_variance=-1.0"),
        (lambda: MLP(5, 2, generator=3), "generator is int"),
        (lambda: CNN(kernel_size=4), "kernel_size=4, expected an odd number"),
        (lambda: WideResNet(0.01, 1), "k=0.01"),
        (lambda: WideResNet(1, 0), "b=0"),
        (lambda: ResNet18(norm="layer"), "norm='layer'"),
        (lambda: VGG11(width=2)(images(1, 3, 16)), "expected images of at least 32 x 32"),
        (lambda: GPT(heads=5), "expected a width divisible by heads"),
        (lambda: GPT(7, context=3, heads=1, width=4)(tokens(1, 4)), "with T <= 3"),
    ],
)
def test_wrong_settings_are_refused(call, words: str):
    with pytest.raises(fl.FeatlearnError, match=words):
        call()
