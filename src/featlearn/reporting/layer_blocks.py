"""Layers of deep networks grouped into blocks by their names: blocks.0, layer1, encoder.layers.3."""

import re
from collections.abc import Mapping, Sequence

MOST = 8
"""Largest number of layers that are shown one by one."""


def layer_blocks(layers: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Block -> its layers; every layer by itself if there are few, or no blocks among their names.

    A name is cut after its first numbered part: blocks.0.attn.qkv -> blocks.0, layer1.0.conv1 -> layer1. A pair of
    layers belongs to the pair of their blocks, or to the one block that holds both.

    Args:
        layers: key -> names in the model, one for a layer and two for a pair. Orders are kept.
    """
    alone = _grouped({key: list(names) for key, names in layers.items()})
    if len(layers) <= MOST:
        return alone
    found = _grouped({key: list(dict.fromkeys(map(_block, names))) for key, names in layers.items()})
    return found if len(found) < len(alone) else alone


def _grouped(names: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, parts in names.items():
        found.setdefault(" → ".join(parts), []).append(key)
    return found


def _block(layer: str) -> str:
    parts = layer.split(".")
    for end, part in enumerate(parts[:-1], 1):
        if re.search(r"\d$", part):
            return ".".join(parts[:end])
    return layer
