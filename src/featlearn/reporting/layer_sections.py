"""Sections by layer: how much each learned, neural features, alignment of consecutive layers, norms.

Layers of deep networks are shown by block, with their own numbers folded.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence

from featlearn.reporting.content_blocks import NEUTRAL, Cell, Chart, ChartLine, Grid, Number, Section, thin
from featlearn.reporting.curve_sections import Points, named_layers, shares
from featlearn.reporting.groups import RunGroup, band, finite
from featlearn.reporting.markup import Html, tag, text, written

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


def features(groups: Sequence[RunGroup]) -> Section:
    """Return the neural feature correlations over training."""
    charts, missing = list[Chart](), list[str]()
    for kind in ("uncentered", "centered"):
        lines, left = _by_layer(groups, re.compile(rf"features/(?P<layer>(?!mean/).+)/{kind}"))
        if lines:
            title = "Neural feature correlation" + (", of the change of the weights" if kind == "centered" else "")
            charts.append(Chart(f"features-{kind}", title, lines, "cosine of NFM and AGOP", note=left))
    if not charts:
        missing.append('neural features were not recorded; ask fl.watch for quantities=["features", ...]')
    return Section("features", "Features by layer", _FEATURES, charts, missing)


def layers(groups: Sequence[RunGroup]) -> Section:
    """Return how much each layer learned; layer alignment, norms and distances of weights."""
    table = _table(groups)
    charts: list[Chart | Grid] = [] if table is None else [table]
    missing = []
    lines, left = _by_layer(groups, re.compile(r"layers/(?P<layer>.+--.+)/alignment"))
    if lines:
        title, unit = "Alignment of layers that follow each other", "ζ = |U W| / |U| |W|"
        charts.append(Chart("layers", title, [*lines, *_random(groups)], unit, note=left))
    else:
        missing.append('alignment of layers was not recorded; ask fl.watch for quantities=["layers", ...]')
    norms, left = _by_layer(groups, re.compile(r"weights/(?P<layer>.+)/norm"), combine=_first_shares)
    if norms:
        charts.append(Chart("norms", "Norms of the weights", norms, "|W|, share of the first", y_axis="log", note=left))
    distances, left = _by_layer(groups, re.compile(r"weights/(?P<layer>.+)/distance"))
    if distances:
        charts.append(Chart("weights", "How far weights moved", distances, "|W − W₀| / |W₀|", note=left))
    if not norms and not distances:
        missing.append('norms of the weights were not recorded; ask fl.watch for quantities=["weights", ...]')
    parts, left = _by_layer(groups, re.compile(r"ntk/layers/(?P<layer>.+)/share"), combine=_total)
    if parts:
        charts.append(Chart("shares", "Which layers make the kernel", parts, "share of the kernel", note=left))
    return Section("layers", "Layers", _LAYERS + network(groups), charts, missing)


def network(groups: Sequence[RunGroup]) -> Html:
    """Return the network of one run as boxes in forward order: color for what each learned, width for its share."""
    group = groups[0]
    real = named_layers(groups)
    blocks = _blocks(_in_order(dict.fromkeys(recorded_layers(group), ""), real), real)
    shares = {block: _total_share(group, members) for block, members in blocks.items()}
    if not group.alone or len(blocks) < 2 or not any(shares.values()):
        return Html("")
    learned = {block: max(effect(group, layer) for layer in members) for block, members in blocks.items()}
    widest, boxes = max(shares.values()), list[Html]()
    for row, (block, share) in enumerate(shares.items()):
        y, width = 26 * row, max(62 * share / widest, 0.6)
        shown = block if len(block) <= 24 else f"…{block[-23:]}"
        color = f"box learned-{min(int(5 * min(learned[block], 1.0)), 4)}"
        boxes += [
            tag("text", text(shown), x="24%", y=y + 15, text_anchor="end"),
            tag("rect", x=f"{56 - width / 2:.2f}%", y=y + 2, width=f"{width:.2f}%", height=18, rx=3, class_=color),
            tag("text", text(f"{100 * share:.0f}%"), x="89%", y=y + 15),
        ]
    words = "; ".join(f"{block}: {100 * share:.0f}% of the kernel" for block, share in shares.items())
    drawing = tag("svg", *boxes, height=26 * len(blocks), class_="network", role="img", aria_label=f"Layers: {words}")
    scale = [
        tag("svg", tag("rect", width=18, height=12, class_=f"box learned-{i}"), width=18, height=12) for i in range(5)
    ]
    key = tag("p", "Input at the top. Width: share of the kernel. Color: learned, from nothing ", *scale, " to all.")
    return tag("figure", tag("h3", "The network"), drawing, key)


def _total_share(group: RunGroup, layers: Sequence[str]) -> float:
    return _block_value(SUMMED, [max(_COLUMNS[SUMMED](group, layer), 0.0) for layer in layers]) or 0.0


# ---- charts


Combine = Callable[[Sequence[Points]], Sequence[Points]]
"""From the curves of the layers of a block to those whose mean and band are drawn."""


def _first_shares(curves: Sequence[Points]) -> Sequence[Points]:
    """Divide each curve by its first value."""
    return [(steps, shares(values)) for steps, values in curves]


def _total(curves: Sequence[Points]) -> Sequence[Points]:
    """Sum the curves at the steps that all of them have."""
    known = [dict(zip(*curve, strict=True)) for curve in curves]
    steps = [step for step in curves[0][0] if all(step in curve for curve in known)]
    return [(steps, [sum(curve[step] for curve in known) for step in steps])] if steps else []


def _by_layer(
    groups: Sequence[RunGroup], pattern: re.Pattern[str], combine: Combine = lambda curves: curves
) -> tuple[list[ChartLine], str]:
    """Return one line per layer or block, and a remark about what is left out.

    For one run a color is a layer. For several a color is a run, and a line style a layer. Those that changed most are
    shown.
    """
    real = named_layers(groups)
    recorded: dict[str, str] = {}
    for group in groups:
        recorded |= {match["layer"]: name for name in sorted(group.names) if (match := pattern.fullmatch(name))}
    blocks = _blocks(_in_order(recorded, real), real)
    order, most = list(blocks), MOST if groups[0].alone else MOST_OF_SEVERAL
    changes = {block: max(_change(groups, recorded[layer]) for layer in members) for block, members in blocks.items()}
    shown = sorted(sorted(order, key=lambda block: -changes[block])[:most], key=order.index)
    lines = [
        line
        for group in groups
        for i, block in enumerate(shown)
        if (line := _line(group, block, [recorded[layer] for layer in blocks[block]], i, combine)) is not None
    ]
    return lines, _remark(blocks, len(shown), len(recorded), summed=combine is _total)


def _line(group: RunGroup, block: str, names: Sequence[str], place: int, combine: Combine) -> ChartLine | None:
    """Return the mean over the curves of a block, with a band from the smallest to the largest."""
    curves: list[Points] = []
    for one in group.sound or group.findings:
        of_run = [curve for name in names if (curve := finite(one.run, name)) is not None]
        curves += combine(of_run) if of_run else []
    if not curves:
        return None
    color, dash = (place, 0) if group.alone else (group.color, place)
    broken = not group.sound
    until = min(float(one.run_data.steps) for one in group.findings) if broken else math.inf
    if len(curves) == 1:
        x, mean = thin(*curves[0], group.points)
        return ChartLine(group.named(block), x, mean, color, dash, group=group.color, kind=block, until=until)
    x, mean, low, high = band(curves, group.points)
    return ChartLine(group.named(block), x, mean, color, dash, low, high, group.color, block, until)


def _remark(blocks: Mapping[str, Sequence[str]], shown: int, layers: int, *, summed: bool) -> str:
    grouped = len(blocks) < layers
    what = "blocks" if grouped else "layers"
    mean = "A line is the mean over the layers of a block, its band the smallest and the largest."
    remarks = [] if not grouped else ["A line is the sum over the layers of a block."] if summed else [mean]
    if len(blocks) > shown:
        remarks.append(f"The {shown} {what} that changed most; {len(blocks) - shown} others are in the run.")
    return " ".join(remarks)


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


# ---- the table


Column = Callable[[RunGroup, str], float]
SUMMED = "share of the kernel"
"""The column that is summed over the layers of a block; the others are averaged."""


def _value(name: str) -> Column:
    """Return a column of what the diagnosis knows of a layer."""
    return lambda group, layer: float(getattr(group.diagnosis.layers.get(layer), name, math.nan))


def _learned(group: RunGroup, layer: str) -> float:
    """Return how much training made of a layer's agreement with its gradients; nan for an output layer."""
    learning = group.diagnosis.layers.get(layer)
    return math.nan if learning is None or learning.readout else learning.centered_share


def _scalar(name: str, at: int) -> Column:
    """Return a column of a recorded scalar: its mean over runs at the start (0) or the end (-1)."""

    def read(group: RunGroup, layer: str) -> float:
        return _mean([c[1][at] for run in group.runs if (c := finite(run, f"features/{layer}/{name}")) is not None])

    return read


_COLUMNS: Mapping[str, Column] = {
    "learned": _learned,
    "weights moved, |W − W₀| / |W₀|": _value("distance"),
    "its input moved": _scalar("moved", -1),
    SUMMED: _value("kernel_share"),
    "rise of its kernel's alignment": _value("alignment"),
    "neural feature correlation at the start": _scalar("uncentered", 0),
    "at the end": _scalar("uncentered", -1),
    "of the change": _value("correlation"),
}


def effect(group: RunGroup, layer: str) -> float:
    """Return how much a layer learned: the share of its agreement with gradients that training made; 0 if unknown."""
    share = _learned(group, layer)
    return share if math.isfinite(share) else 0.0


def _table(groups: Sequence[RunGroup]) -> Grid | None:
    """Return a row per layer, or per block for many layers, those that learned most first."""
    recorded = [layer for group in groups for layer in recorded_layers(group)]
    real = named_layers(groups)
    blocks = _blocks(_in_order(dict.fromkeys(recorded, ""), real), real)
    if not blocks:
        return None
    grouped = len(blocks) < len(set(recorded))
    columns = {
        name: read
        for name, read in _COLUMNS.items()
        if any(math.isfinite(read(group, layer)) for group in groups for layer in recorded)
    }
    body, colors = list[list[Cell]](), []
    parts: dict[str, list[list[Cell]]] = {}
    for group in groups:
        run = [] if group.alone else [group.label]
        for block, members in sorted(blocks.items(), key=lambda item: -_mean([effect(group, one) for one in item[1]])):
            cells = [[read(group, layer) for read in columns.values()] for layer in members]
            title = f"{block} ({len(members)} layers)" if len(members) > 1 else block
            combined = zip(columns, zip(*cells, strict=True), strict=True)
            body.append([*run, title, *(_cell(_block_value(name, column)) for name, column in combined)])
            colors.append(group.color)
            if grouped and len(members) > 1:
                rows: list[list[Cell]] = [
                    [*run, _real(layer, real), *map(_cell, row)] for layer, row in zip(members, cells, strict=True)
                ]
                parts.setdefault(title, []).extend(rows)
    head = [*([] if groups[0].alone else ["run"]), "block" if grouped else "layer", *columns]
    note = _LEARNED + (_OF_BLOCKS if grouped else "")
    shown = () if groups[0].alone else colors
    return Grid("layer-learning", "How much each layer learned", head, body, note, shown, list(parts.items()))


def recorded_layers(group: RunGroup) -> list[str]:
    """Return the layers of which weights or neural features were recorded."""
    pattern = re.compile(r"features/(?P<layer>(?!mean/).+)/uncentered")
    featured = [match["layer"] for name in sorted(group.names) if (match := pattern.fullmatch(name))]
    return list(dict.fromkeys([*group.diagnosis.layers, *featured]))


def _block_value(name: str, values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) if name == SUMMED and known else _mean(known)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _cell(value: float) -> Cell:
    return Number(written(value, 3), value) if math.isfinite(value) else "–"


_LEARNED = (
    "Learned: the part of the agreement between the weights of a layer and its gradients that training made. "
    "It is not defined for an output layer."
)
_OF_BLOCKS = (
    " Means over the layers of each block, and sums of their shares of the kernel. The layers are folded below."
)

_FEATURES = """<p>What a layer takes from its input, the neural feature matrix
<math><msup><mi>W</mi><mi>T</mi></msup><mi>W</mi></math>, against what the network is sensitive to there, the average
gradient outer product: their correlation grows where features are learned. Centered, both are taken with the change of
the weights since the start.</p>"""

_LAYERS = """<p>Weights that follow each other align, grow, or both; how far each went from where it began says where
learning happened.</p>"""
