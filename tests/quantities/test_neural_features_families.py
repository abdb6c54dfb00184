"""fl.neural_features on the zoo and on families of transformers, against derivatives taken one by one."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import UnsupportedModelError
from featlearn.quantities.layer_features import LayerFeatures, NeuralFeatures
from tests.references.features import Features, features
from tests.references.jacobian import dense_jacobian
from tests.zoo.awkward import CASES
from tests.zoo.case import Case, default_dtype
from tests.zoo.families import CASES as FAMILIES

BY_NAME = {case.name: case for case in (*CASES, *FAMILIES)}


@pytest.fixture(autouse=True)
def in_double() -> Any:
    with default_dtype(torch.float64):
        yield


def assert_features(found: LayerFeatures, expected: Features, tolerance: float) -> None:
    assert found.weight.shape == expected.weight.shape
    assert float((found.weight - expected.weight).abs().max()) <= tolerance
    for one, other in ((found.ptk_covariance, expected.K), (found.agop, expected.G)):
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max()) + 1e-30


# ---------------------------------------------------------------------------------------------------------------------
# families: which slices of a fused weight are queries, keys and values is written down here from the models' sources
# ---------------------------------------------------------------------------------------------------------------------


def in_turn(*sizes: int) -> dict[str, list[int]]:
    """All queries, then all keys, then all values."""
    starts = [sum(sizes[:number]) for number in range(3)]
    return {role: list(range(start, start + size)) for role, start, size in zip("qkv", starts, sizes, strict=True)}


def by_heads(heads: int, width: int) -> dict[str, list[int]]:
    """Query, key and value of the first head, then of the second."""
    return {
        role: [(head * 3 + part) * width + place for head in range(heads) for place in range(width)]
        for part, role in enumerate("qkv")
    }


FUSED: list[Any] = [
    ("gpt2", "transformer.h.{}.attn.c_attn", in_turn(8, 8, 8)),
    ("gpt2_eager", "transformer.h.{}.attn.c_attn", in_turn(8, 8, 8)),
    ("bloom", "transformer.h.{}.self_attention.query_key_value", by_heads(2, 4)),
    ("gpt_neox", "gpt_neox.layers.{}.attention.query_key_value", by_heads(2, 4)),
    ("gpt_bigcode", "transformer.h.{}.attn.c_attn", in_turn(8, 4, 4)),
    ("phi3", "model.layers.{}.self_attn.qkv_proj", in_turn(8, 4, 4)),
    ("modernbert", "layers.{}.attn.Wqkv", in_turn(8, 8, 8)),
    pytest.param("falcon", "transformer.h.{}.self_attention.query_key_value", in_turn(8, 4, 4)),
]


@pytest.mark.parametrize(("name", "layer", "parts"), FUSED)
def test_fused_projections_of_transformers(name: str, layer: str, parts: Mapping[str, Sequence[int]]):
    pytest.importorskip("transformers")
    case = BY_NAME[name]
    model, x, _, readout = case.build()
    found = fl.neural_features(model, x, readout=readout)
    tolerance = 10 * case.tolerance
    for block in range(2):
        whole = layer.format(block)
        for role, units in parts.items():
            part = found[f"{whole}.{role}"]
            assert part.role == role
            assert_features(part, features(model, x, f"{whole}.weight", readout=readout, units=units), tolerance)


SEPARATE: list[Any] = [
    ("bert", "encoder.layer.{}.attention.self.", ("query", "key", "value")),
    ("bert_eager", "encoder.layer.{}.attention.self.", ("query", "key", "value")),
    ("vit", "layers.{}.attention.", ("q_proj", "k_proj", "v_proj")),
    ("vit_eager", "layers.{}.attention.", ("q_proj", "k_proj", "v_proj")),
    ("llama", "model.layers.{}.self_attn.", ("q_proj", "k_proj", "v_proj")),
    ("llama_eager", "model.layers.{}.self_attn.", ("q_proj", "k_proj", "v_proj")),
    pytest.param("t5_encoder", "encoder.block.{}.layer.0.SelfAttention.", ("q", "k", "v")),
    pytest.param("beit", "beit.layers.{}.attention.", ("q_proj", "k_proj", "v_proj")),
]


@pytest.mark.parametrize(("name", "prefix", "layers"), SEPARATE)
def test_separate_projections_of_transformers(name: str, prefix: str, layers: Sequence[str]):
    pytest.importorskip("transformers")
    case = BY_NAME[name]
    model, x, _, readout = case.build()
    found = fl.neural_features(model, x, readout=readout)
    for block in range(2):
        for layer, role in zip(layers, "qkv", strict=True):
            full = prefix.format(block) + layer
            expected = features(model, x, f"{full}.weight", readout=readout)
            assert_features(found[full], expected, 10 * case.tolerance)
            assert found[full].role == role


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_what_feeds_a_router_is_no_query(name: str):
    pytest.importorskip("transformers")
    model, x, _, readout = BY_NAME[name].build()
    found = fl.neural_features(model, x, readout=readout)
    assert [layer for layer, one in found.items() if one.role and not layer.endswith(f"{one.role}_proj")] == []


def encoder_decoder() -> tuple[nn.Module, Any, Callable[..., Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=11,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=1,
        num_heads=2,
        use_cache=False,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    x = {"input_ids": torch.randint(3, 11, (3, 5)), "decoder_input_ids": torch.randint(3, 11, (3, 4))}
    return model, x, lambda output: output.logits[:, -1, :3]


def test_an_encoder_with_a_decoder():
    model, x, readout = encoder_decoder()
    found = fl.neural_features(model, x, readout=readout)
    for layer, rows in (
        ("encoder.block.0.layer.0.SelfAttention.k", 15),
        ("decoder.block.0.layer.0.SelfAttention.q", 12),
        ("decoder.block.0.layer.1.EncDecAttention.q", 12),
        ("decoder.block.0.layer.1.EncDecAttention.k", 15),
        ("decoder.block.0.layer.1.EncDecAttention.v", 15),
        ("decoder.block.0.layer.2.DenseReluDense.wo", 12),
    ):
        assert found[layer].rows == rows
        assert_features(found[layer], features(model, x, f"{layer}.weight", readout=readout), 1e-5)
    assert found.left_out["shared.weight"] == "its rows are looked up, as in an embedding table"


# ---------------------------------------------------------------------------------------------------------------------
# the zoo
# ---------------------------------------------------------------------------------------------------------------------

# The reference replaces torch's functions, which compiled, traced, checkpointed and transformed code does not see, or
# counts calls that carry no gradient.
UNSEEN = {
    "compiled_submodule",
    "compiled_model",
    "checkpoint_non_reentrant",
    "vmap_over_samples",
    "ensemble_by_vmap",
    "jacobian_inside_forward",
    "traced_submodule",
    "fixed_point_iteration",
    "output_is_an_input_gradient",
    "weight_times_itself",
}


@cache
def measured(case: Case) -> tuple[nn.Module, Any, Any, NeuralFeatures]:
    if "transformers" in case.flags:
        pytest.importorskip("transformers")
    model, x, _, readout = case.build()
    try:
        return model, x, readout, fl.neural_features(model, x, readout=readout)
    except UnsupportedModelError as error:
        pytest.skip(f"refused: {error}")


def module_of(parameter: str) -> str:
    home = parameter.rpartition(".")[0]
    return home.rpartition(".parametrizations")[0] or home.removesuffix("parametrizations.weight")


def cases(all_cases: Sequence[Case], *marks: Any) -> list[Any]:
    return [pytest.param(case, id=case.name, marks=marks) for case in all_cases]


@pytest.mark.parametrize("case", cases(CASES) + cases(FAMILIES, pytest.mark.slow))
def test_every_matrix_is_in_the_result_or_named(case: Case):
    model, x, readout, found = measured(case)
    jacobian = dense_jacobian(model, x, readout)
    known = {name for layer in found.values() for name in layer.parameters} | found.left_out.keys()
    lost = [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad
        and sum(size > 1 for size in weight.shape) > 1
        and float(jacobian[name].abs().max()) > 0
        and name not in known
    ]
    assert lost == []


@pytest.mark.parametrize("case", cases(CASES) + cases(FAMILIES, pytest.mark.slow))
def test_every_weight_that_the_reference_sees_agrees_with_it(case: Case):
    model, x, readout, found = measured(case)
    for layer in found.values():
        K = layer.ptk_covariance
        assert float((K - K.T).abs().max()) <= 1e-6 * float(K.abs().max())
        assert float(torch.linalg.eigvalsh(K)[0]) >= -1e-6 * float(K.abs().max())
        assert not layer.uncentered > 1 + 1e-9
    for name, weight in model.named_parameters():
        layer = module_of(name)
        if not weight.requires_grad or weight.dim() < 2 or layer not in found or case.name in UNSEEN:
            continue
        try:
            expected = features(model, x, name, readout=readout)
        except AssertionError:  # an op that the reference does not look at
            continue
        assert_features(found[layer], expected, 100 * case.tolerance)
