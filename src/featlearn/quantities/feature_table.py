"""Neural features as a text table, with the reasons of what is undefined."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from featlearn.quantities.layer_features import LayerFeatures

COLUMNS = {"UC-NFC": "uncentered", "C-NFC": "centered", "C/UC": "centered_share", "|W-W0|/|W|": "weight_change"}
"""Head -> quantity."""


def feature_table(layers: "Mapping[str, LayerFeatures]", left_out: Mapping[str, str]) -> str:
    """One row to a layer; below it why a number is nan, and the weights that are left out."""
    width = max([5, *map(len, layers)])
    cell = 15 if any(layer.deviations is not None for layer in layers.values()) else 7
    *heads, last = COLUMNS
    lines = [f"{'layer':{width}}  {'shape':>13}  {'  '.join(f'{head:>{cell}}' for head in heads)}  {last:>10}"]
    for name, layer in layers.items():
        shape = " x ".join(map(str, layer.weight.shape))
        numbers = "  ".join(f"{_cell(layer, COLUMNS[head]):>{cell}}" for head in heads)
        note = "  readout" if layer.is_readout else ""
        lines.append(f"{name or '(root)':{width}}  {shape:>13}  {numbers}  {layer.weight_change:10.3f}{note}")
    lines += _reasons(layers)
    return "\n".join([*lines, *(f"left out: {name}: {reason}" for name, reason in left_out.items())])


def _cell(layer: "LayerFeatures", quantity: str) -> str:
    """A number, with its error where it is an estimate."""
    value = getattr(layer, quantity)
    if layer.deviations is None or value != value:
        return f"{value:.3f}"
    return f"{value:.3f} ± {layer.errors[quantity]:.3f}"


def _reasons(layers: "Mapping[str, LayerFeatures]") -> list[str]:
    """A line for each reason, with the columns and layers that are nan for it."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, layer in layers.items():
        reasons = layer.undefined
        for reason in dict.fromkeys(reasons[quantity] for quantity in COLUMNS.values() if quantity in reasons):
            heads = (head for head, quantity in COLUMNS.items() if reasons.get(quantity) == reason)
            found.setdefault((reason, *heads), []).append(name or "(root)")
    where = {key: "" if len(names) == len(layers) else f" of {', '.join(names)}" for key, names in found.items()}
    return [f"nan: {', '.join(key[1:])}{place}: {key[0]}" for key, place in where.items()]
