"""Layers grouped into blocks by their names."""

import itertools

import pytest

from featlearn.reporting.layer_sections import MOST, layer_blocks


def single(names: list[str]) -> dict[str, list[str]]:
    return {name: [name] for name in names}


TRANSFORMER = [f"blocks.{i}.{part}" for i in range(3) for part in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")]
RESNET = [
    "conv1",
    *(f"layer{i}.{j}.conv{k}" for i in (1, 2) for j in (0, 1) for k in (1, 2)),
    "layer2.0.downsample.0",
    "fc",
]
GPT = ["transformer.wte", *(f"transformer.h.{i}.{part}" for i in range(4) for part in ("attn.c_attn", "mlp.c_fc"))]


@pytest.mark.parametrize(
    ("names", "blocks"),
    [
        (TRANSFORMER, {f"blocks.{i}": 4 for i in range(3)}),
        (RESNET, {"conv1": 1, "layer1": 4, "layer2": 5, "fc": 1}),
        (GPT, {"transformer.wte": 1} | {f"transformer.h.{i}": 2 for i in range(4)}),
        ([f"net.{i}" for i in range(0, 30, 2)], {f"net.{i}": 1 for i in range(0, 30, 2)}),
        (TRANSFORMER[:MOST], dict.fromkeys(TRANSFORMER[:MOST], 1)),
    ],
)
def test_names_are_cut_after_their_first_number(names: list[str], blocks: dict[str, int]):
    found = layer_blocks(single(names))
    assert {block: len(members) for block, members in found.items()} == blocks
    assert list(found) == list(blocks)
    assert sorted(member for members in found.values() for member in members) == sorted(names)


def test_pairs_belong_to_their_block_or_to_the_pair_of_blocks():
    pairs = {f"{a}--{b}": [a, b] for a, b in itertools.pairwise(TRANSFORMER)}
    found = layer_blocks(pairs)
    assert {block: len(members) for block, members in found.items()} == {
        "blocks.0": 3,
        "blocks.0 → blocks.1": 1,
        "blocks.1": 3,
        "blocks.1 → blocks.2": 1,
        "blocks.2": 3,
    }


def test_names_with_the_sign_of_pairs_stay_as_they_are():
    assert layer_blocks({"a": ["x--y"], "b--c": ["b", "c"]}) == {"x--y": ["a"], "b → c": ["b--c"]}
