"""Numbers in words for the sentences of a diagnosis."""

import math
from collections.abc import Sequence

from featlearn.diagnosis.evidence import Sample

LISTED = 6
"""Largest number of layers named in a sentence."""


def percent(share: float) -> str:
    """Return a share as a percentage with two significant digits."""
    if not math.isfinite(share):
        return "an unknown share"
    if 0 <= share < 0.001:
        return "less than 0.1%"
    return f"{100 * share:.1f}%" if abs(share) < 0.0995 else f"{100 * share:.0f}%"


def plain_number(value: float) -> str:
    """Return a number with two significant digits, without an exponent where that is short."""
    if 100 <= abs(value) < 1e5:
        return f"{round(value, 1 - math.floor(math.log10(abs(value)))):.0f}"
    return f"{value:.2g}"


def percent_with_error(number: Sample) -> str:
    """Return a share and its standard error as percentages."""
    error = number.error
    if not math.isfinite(error) or error < 0.001 or number.mean < 0.001:
        return percent(number.mean)
    return f"{percent(number.mean)} (±{percent(error)})"


def points(change: float) -> str:
    """Return a difference of two shares in percentage points."""
    return f"{100 * abs(change):.0f} percentage points" if abs(change) >= 0.0095 else "less than a percentage point"


def dead_network(layers: Sequence[str]) -> str:
    """Return the sentence on a dead network, without its period; `layers` get no gradient."""
    text = "the network is dead: its outputs are the same for all samples"
    return f"{text}, and no gradient reaches {name_layers(layers)}" if layers else text


def name_layers(layers: Sequence[str]) -> str:
    """Return layers in words: "layer 0", or "layers 0 and 2"."""
    return f"{'layers' if len(layers) > 1 else 'layer'} {list_layers(layers)}"


def list_layers(layers: Sequence[str], most: int = LISTED) -> str:
    """Return layer names as a list in words, `most` of them at most."""
    shown = list(layers[:most])
    if len(layers) > most:
        return f"{', '.join(shown)}, and {len(layers) - most} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else ""
