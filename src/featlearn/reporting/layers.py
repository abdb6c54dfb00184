"""Sections by layer: neural features, alignment of consecutive layers, norms."""

import math
import re
from collections.abc import Mapping, Sequence

from featlearn.diagnosis.findings import Findings
from featlearn.reporting.content_blocks import Chart, ChartLine, Grid, Section
from featlearn.reporting.curves import Points, named_layers, present, shares
from featlearn.reporting.groups import RunGroup, finite

MOST = 8
"""Largest number of lines per run in a chart; more cannot be distinguished."""

_KINDS = {
    "uncentered": "uncentred",
    "centered": "centred",
    "double_centered": "double-centred",
    "ptk_centered": "PTK-centred",
    "centered_share": "centred share",
    "weight_change": "weight change",
}


def features(groups: Sequence[RunGroup]) -> Section:
    """Neural feature correlations over training, and their final values in a table."""
    pattern = re.compile(r"features/(?P<layer>.+)/(?P<kind>\w+)")
    charts: list[Chart | Grid] = []
    missing = []
    for kind in ("uncentered", "centered"):
        lines, left = _by_layer(groups, re.compile(rf"features/(?P<layer>(?!mean/).+)/{kind}"))
        if lines:
            title = f"Neural feature correlation, {_KINDS[kind]}"
            charts.append(Chart(f"features-{kind}", title, lines, "cosine of NFM and AGOP", note=left))
    known = {name for group in groups for name in group.names if pattern.fullmatch(name)}
    if known:
        charts.append(_final(groups, pattern, known))
    else:
        missing.append('neural features were not recorded; ask fl.watch for quantities=["features", ...]')
    return Section("features", "Features by layer", _FEATURES, charts, missing)


def layers(groups: Sequence[RunGroup]) -> Section:
    """Layer alignment, norms and distances of weights."""
    charts, missing = [], []
    lines, left = _by_layer(groups, re.compile(r"layers/(?P<layer>.+--.+)/alignment"))
    if lines:
        charts.append(Chart("layers", "Alignment of layers that follow each other", [*lines, *_random(groups)],
                            "ζ = |U W| / |U| |W|", note=left))  # fmt: skip
    else:
        missing.append('alignment of layers was not recorded; ask fl.watch for quantities=["layers", ...]')
    norms, left = _by_layer(groups, re.compile(r"weights/(?P<layer>.+)/norm"), of_first=True)
    if norms:
        charts.append(Chart("norms", "Norms of the weights", norms, "|W|, share of the first", y_axis="log", note=left))
    distances, left = _by_layer(groups, re.compile(r"weights/(?P<layer>.+)/distance"))
    if distances:
        charts.append(Chart("weights", "How far weights went", distances, "|W − W₀| / |W₀|", note=left))
    if not norms and not distances:
        missing.append('norms of the weights were not recorded; ask fl.watch for quantities=["weights", ...]')
    parts, left = _by_layer(groups, re.compile(r"ntk/layers/(?P<layer>.+)/share"))
    if parts:
        charts.append(Chart("shares", "Which layers make the kernel", parts, "share of the kernel", note=left))
    return Section("layers", "Layers", _LAYERS, charts, missing)


def _by_layer(
    groups: Sequence[RunGroup], pattern: re.Pattern[str], of_first: bool = False
) -> tuple[list[ChartLine], str]:
    """One line per layer, with a colour per layer and a dash per run; and a remark about omitted layers.

    The layers that changed most are shown.
    """
    real = named_layers(groups)
    found: dict[str, str] = {}
    for group in groups:
        found |= {match["layer"]: name for name in sorted(group.names) if (match := pattern.fullmatch(name))}
    order = _in_order(found, real)
    kept = sorted(sorted(order, key=lambda layer: -_change(groups, found[layer]))[:MOST], key=order.index)

    def read(name: str, one: Findings) -> Points | None:
        curve = finite(one.run, name)
        return curve if curve is None or not of_first else (curve[0], shares(curve[1]))

    lines = present(
        group.line(lambda one, n=found[layer]: read(n, one), _real(layer, real), color=color, dash=dash)  # type: ignore[misc]
        for dash, group in enumerate(groups)
        for color, layer in enumerate(kept)
    )
    left = len(order) - len(kept)
    return lines, f"The {len(kept)} layers that changed most; {left} others are in the run." if left else ""


def _in_order(found: Mapping[str, str], real: Mapping[str, str]) -> list[str]:
    """Layers in the order of the network, if the run has it."""
    places = {layer: place for place, layer in enumerate(real)}
    return sorted(found, key=lambda layer: (places.get(layer.split("--")[0], len(places)), layer))


def _real(layer: str, real: Mapping[str, str]) -> str:
    return " → ".join(real.get(part, part) for part in layer.split("--"))


def _change(groups: Sequence[RunGroup], name: str) -> float:
    """The range of the values before a divergence."""
    shown = [(group.first.run_data, finite(group.first.run, name)) for group in groups]
    curves = [
        [value for step, value in zip(*curve, strict=True) if run_data.diverged is None or step <= run_data.steps]
        for run_data, curve in shown if curve is not None
    ]  # fmt: skip
    return max((max(values) - min(values) for values in curves if values), default=-math.inf)


def _random(groups: Sequence[RunGroup]) -> list[ChartLine]:
    """The value of random weights, if it is the same for all pairs."""
    names = {name for group in groups for name in group.names if re.fullmatch(r"layers/.+--.+/random", name)}
    curves = [curve for group in groups for name in sorted(names) if (curve := finite(group.first.run, name))]
    values = {round(v, 6) for _, ys in curves for v in ys}
    if len(values) != 1:
        return []
    end = max(x[-1] for x, _ in curves)
    value = values.pop()
    return [ChartLine("random weights", [0.0, end], [value, value], MOST - 1, dash=3)]


def _final(groups: Sequence[RunGroup], pattern: re.Pattern[str], known: set[str]) -> Grid:
    real = named_layers(groups)
    found = {match["layer"]: "" for name in sorted(known) if (match := pattern.fullmatch(name))}
    rows = []
    for group in groups:
        for layer in _in_order({name: "" for name in found if name != "mean"}, real):
            cells = [_last(group, f"features/{layer}/{kind}") for kind in _KINDS]
            rows.append([*([] if group.alone else [group.label]), _real(layer, real), *cells])
    head = [*([] if groups[0].alone else ["run"]), "layer", *_KINDS.values()]
    return Grid("features-final", "Neural features at the end", head, rows)


def _last(group: RunGroup, name: str) -> str:
    values = [curve[1][-1] for run in group.runs if (curve := finite(run, name)) is not None]
    return f"{sum(values) / len(values):.3g}" if values else "–"


_FEATURES = """<p>What a layer takes from its input, the neural feature matrix
<math><msup><mi>W</mi><mi>T</mi></msup><mi>W</mi></math>, against what the network is sensitive to there, the average
gradient outer product: their correlation grows where features are learned. Centred, both are taken with the change of
the weights since the start, in which the first step is already visible.</p>"""

_LAYERS = """<p>Weights that follow each other align, grow, or both; how far each went from where it began says where
learning happened.</p>"""
