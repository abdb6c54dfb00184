"""Sections by layer: how much each learned, neural features, alignment of consecutive layers, norms.

Layers of deep networks are shown by block, with their own numbers folded.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence

from featlearn.diagnosis.layers import LayerLearning
from featlearn.record import Run
from featlearn.reporting.content_blocks import NEUTRAL, Cell, Chart, ChartLine, Grid, Number, Section
from featlearn.reporting.curve_sections import Points, named_layers, shares
from featlearn.reporting.groups import RunGroup, band, finite

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


MOST_OF_SEVERAL = 4
"""Largest number of layers in a chart of several runs, where layers are line styles."""

_KINDS = {
    "uncentered": "uncentered",
    "centered": "centered",
    "double_centered": "double-centered",
    "ptk_centered": "PTK-centered",
    "centered_share": "centered share",
    "weight_change": "weight change",
}


def features(groups: Sequence[RunGroup]) -> Section:
    """Neural feature correlations over training, and their final values in a table."""
    pattern = re.compile(r"features/(?P<layer>(?!mean/).+)/(?P<kind>\w+)")
    charts: list[Chart | Grid] = []
    missing = []
    for kind in ("uncentered", "centered"):
        lines, left = _by_layer(groups, re.compile(rf"features/(?P<layer>(?!mean/).+)/{kind}"))
        if lines:
            title = f"Neural feature correlation, {_KINDS[kind]}"
            charts.append(Chart(f"features-{kind}", title, lines, "cosine of NFM and AGOP", note=left))
    found = {match["layer"]: "" for group in groups for n in sorted(group.names) if (match := pattern.fullmatch(n))}
    if found:
        columns = {
            words: lambda group, layer, k=kind: _last(group, f"features/{layer}/{k}") for kind, words in _KINDS.items()
        }
        charts.append(_table("features-final", "Neural features at the end", groups, list(found), columns))
    else:
        missing.append('neural features were not recorded; ask fl.watch for quantities=["features", ...]')
    return Section("features", "Features by layer", _FEATURES, charts, missing)


def layers(groups: Sequence[RunGroup]) -> Section:
    """How much each layer learned; layer alignment, norms and distances of weights."""
    charts: list[Chart | Grid] = []
    missing = []
    known = list(dict.fromkeys(layer for group in groups for layer in group.diagnosis.layers))
    if known:
        columns = {words: lambda group, layer, n=name: _learned(group, layer, n) for name, words in _LEARNED.items()}
        charts.append(_table("layer-learning", "How much each layer learned", groups, known, columns))
    lines, left = _by_layer(groups, re.compile(r"layers/(?P<layer>.+--.+)/alignment"))
    if lines:
        charts.append(
            Chart(
                "layers",
                "Alignment of layers that follow each other",
                [*lines, *_random(groups)],
                "ζ = |U W| / |U| |W|",
                note=left,
            )
        )
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


_LEARNED = {
    "distance": "weights moved",
    "correlation": "neural feature correlation, change",
    "kernel_share": "share of the kernel",
    "alignment": "alignment of its kernel, change",
}


# ---- charts


def _by_layer(
    groups: Sequence[RunGroup], pattern: re.Pattern[str], of_first: bool = False
) -> tuple[list[ChartLine], str]:
    """One line per layer or block, and a remark about what is left out.

    For one run a color is a layer; for several a color is a run, and a line style a layer. Those that changed most
    are shown.
    """
    real = named_layers(groups)
    found: dict[str, str] = {}
    for group in groups:
        found |= {match["layer"]: name for name in sorted(group.names) if (match := pattern.fullmatch(name))}
    blocks = _blocks(_in_order(found, real), real)
    order, most = list(blocks), MOST if groups[0].alone else MOST_OF_SEVERAL
    changes = {block: max(_change(groups, found[layer]) for layer in members) for block, members in blocks.items()}
    kept = sorted(sorted(order, key=lambda block: -changes[block])[:most], key=order.index)
    lines = [
        line
        for group in groups
        for i, block in enumerate(kept)
        if (line := _line(group, block, [found[layer] for layer in blocks[block]], i, of_first)) is not None
    ]
    return lines, _remark(blocks, len(kept), len(found))


def _line(group: RunGroup, block: str, names: Sequence[str], place: int, of_first: bool) -> ChartLine | None:
    """The mean over the layers of a block, with a band from the smallest to the largest."""
    style = {"color": place} if group.alone else {"dash": place}
    curves = [
        curve
        for name in names
        for one in group.sound or group.findings
        if (curve := _read(one.run, name, of_first)) is not None
    ]
    if len(names) == 1 or not curves:
        return group.line(lambda one: _read(one.run, names[0], of_first), block, **style)
    x, mean, low, high = band(curves, group.points)
    label = group.named(block)
    return ChartLine(
        label, x, mean, style.get("color", group.color), style.get("dash", 0), low, high, group.color, block
    )


def _read(run: Run, name: str, of_first: bool) -> Points | None:
    curve = finite(run, name)
    return curve if curve is None or not of_first else (curve[0], shares(curve[1]))


def _remark(blocks: Mapping[str, Sequence[str]], kept: int, layers: int) -> str:
    grouped = len(blocks) < layers
    what = "blocks" if grouped else "layers"
    said = ["A line is the mean over the layers of a block, its band the smallest and the largest."] if grouped else []
    if len(blocks) > kept:
        said.append(f"The {kept} {what} that changed most; {len(blocks) - kept} others are in the run.")
    return " ".join(said)


def _blocks(layers: Sequence[str], real: Mapping[str, str]) -> dict[str, list[str]]:
    """Block -> recorded names of its layers, both in the order of the network."""
    return layer_blocks({layer: [real.get(part, part) for part in layer.split("--")] for layer in layers})


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
        for run_data, curve in shown
        if curve is not None
    ]
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
    return [ChartLine("random weights", [0.0, end], [value, value], NEUTRAL, dash=3)]


# ---- tables


def _table(
    key: str,
    title: str,
    groups: Sequence[RunGroup],
    layers: Sequence[str],
    columns: Mapping[str, Callable[[RunGroup, str], float]],
) -> Grid:
    """A row per layer; for many layers one per block, with means, and the layers of each block folded."""
    real = named_layers(groups)
    blocks = _blocks(_in_order(dict.fromkeys(layers, ""), real), real)
    grouped = len(blocks) < len(layers)
    body, colors = list[list[Cell]](), []
    parts: dict[str, list[list[Cell]]] = {}
    for group in groups:
        run = [] if group.alone else [group.label]
        for block, members in blocks.items():
            cells = [[read(group, layer) for read in columns.values()] for layer in members]
            counted = f"{block} ({len(members)} layers)" if len(members) > 1 else block
            body.append([*run, counted, *(_cell(_mean(column)) for column in zip(*cells, strict=True))])
            colors.append(group.color)
            if grouped and len(members) > 1:
                rows: list[list[Cell]] = [
                    [*run, _real(layer, real), *map(_cell, row)] for layer, row in zip(members, cells, strict=True)
                ]
                parts.setdefault(counted, []).extend(rows)
    head = [*([] if groups[0].alone else ["run"]), "block" if grouped else "layer", *columns]
    note = "Means over the layers of each block; the layers themselves are folded below." if grouped else ""
    return Grid(key, title, head, body, note, () if groups[0].alone else colors, list(parts.items()))


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _cell(value: float) -> Cell:
    return Number(f"{value:.3g}", value) if math.isfinite(value) else "–"


def _last(group: RunGroup, name: str) -> float:
    return _mean([curve[1][-1] for run in group.runs if (curve := finite(run, name)) is not None])


def _learned(group: RunGroup, layer: str, name: str) -> float:
    found: LayerLearning | None = group.diagnosis.layers.get(layer)
    return math.nan if found is None else float(getattr(found, name))


_FEATURES = """<p>What a layer takes from its input, the neural feature matrix
<math><msup><mi>W</mi><mi>T</mi></msup><mi>W</mi></math>, against what the network is sensitive to there, the average
gradient outer product: their correlation grows where features are learned. Centered, both are taken with the change of
the weights since the start, in which the first step is already visible.</p>"""

_LAYERS = """<p>Weights that follow each other align, grow, or both; how far each went from where it began says where
learning happened.</p>"""
