"""Terminal plots over the logarithm of the step."""

import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import NamedTuple

BLOCKS = " ▁▂▃▄▅▆▇█"
PLAIN = " ..::+*##"
"""Nine heights for terminals without block characters."""
COLUMNS = 100
"""Largest width of a line, as in `str(diagnosis)`."""


class Panel(NamedTuple):
    """A quantity of one or several runs."""

    title: str
    runs: Sequence[tuple[Sequence[float], Sequence[float]]]
    """(steps, values) per run"""
    least: float = 0.0
    """smallest range of the axis, so that small changes look small"""


def plot(curves: Sequence[Panel], *, width: int = 56, height: int = 3, blocks: bool | None = None) -> str:
    """Draw bar charts of means over runs, with a panel per quantity and a common axis of steps.

    Charts are `width` columns wide, or fewer to keep lines within `COLUMNS`. The vertical axis is linear from the
    smallest to the largest value, or spans `least`. The first and last values are printed at the right, with their
    spread over runs. Step 0 is drawn at step 1. nan and infinity are omitted.
    """
    glyphs = BLOCKS if (_has_blocks() if blocks is None else blocks) else PLAIN
    shown = [
        c._replace(runs=finite) for c in curves if (finite := [_finite(*run) for run in c.runs if _finite(*run)[0]])
    ]
    if not shown:
        return "(nothing to plot)"
    margin = max(len(curve.title) for curve in shown) + 2
    width = max(2, min(width, COLUMNS - margin - 2 - max(len(_ends(curve.runs)) for curve in shown)))
    last = max(max(steps) for curve in shown for steps, _ in curve.runs)
    grid = [last ** (i / (width - 1)) for i in range(width)] if last > 1 else [1.0]
    lines: list[str] = []
    for curve in shown:
        means = [sum(_at(step, *run) for run in curve.runs) / len(curve.runs) for step in grid]
        rows = _bars(means, height, glyphs, curve.least)
        labels = ["", *[""] * (height - 2), _ends(curve.runs)] if height > 1 else [_ends(curve.runs)]
        for i, row in enumerate(rows):
            title = curve.title if i == height - 1 else ""
            lines.append(f"{title.ljust(margin)}{row}  {labels[i]}".rstrip())
        lines.append("")
    return "\n".join([*lines[:-1], " " * margin + _axis(grid)])


def _bars(values: Sequence[float], height: int, glyphs: str, least: float) -> list[str]:
    """Return rows from the top; the lowest value remains visible."""
    low, levels = min(values), len(glyphs) - 1
    span = max(max(values) - low, least)
    heights = [1 + round((height * levels - 1) * ((v - low) / span if span > 0 else 0.0)) for v in values]
    return ["".join(glyphs[min(levels, max(0, h - levels * row))] for h in heights) for row in reversed(range(height))]


def _axis(grid: Sequence[float]) -> str:
    """Label powers of ten below their columns."""
    text = [" "] * (len(grid) + 8)
    if len(grid) == 1:
        return "step 1"
    for power in range(int(math.log10(grid[-1])) + 1):
        column = round((len(grid) - 1) * power / math.log10(grid[-1]))
        label = str(10**power) if power else "step 1"
        if all(letter == " " for letter in text[max(0, column - 1) : column + len(label)]):
            text[column : column + len(label)] = label
    return "".join(text).rstrip()


def _ends(runs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> str:
    return f"{_spread([values[0] for _, values in runs])} to {_spread([values[-1] for _, values in runs])}"


def _spread(values: Sequence[float]) -> str:
    mean = f"{fmean(values):.3g}"
    return mean if len(values) == 1 else f"{mean} ± {stdev(values):.2g}"


def _at(step: float, steps: Sequence[float], values: Sequence[float]) -> float:
    """Interpolate the value at a step in log(step), constant beyond the ends."""
    for (s0, v0), (s1, v1) in pairwise(zip(steps, values, strict=True)):
        if s0 <= step <= s1:
            return v0 if s1 == s0 else v0 + (v1 - v0) * math.log(step / s0) / math.log(s1 / s0)
    return values[0] if step < steps[0] else values[-1]


def _finite(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    pairs = [(max(1.0, float(s)), float(v)) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    return [s for s, _ in pairs], [v for _, v in pairs]


def _has_blocks() -> bool:
    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
