"""The numbers behind a verdict on their scales: ticks, thresholds, the value with its error."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from featlearn.diagnosis import Diagnosis
from featlearn.diagnosis.evidence import GAP, GREW, TURNED, Threshold
from featlearn.linalg.estimate import Estimate
from featlearn.reporting.content_blocks import Cell, Number
from featlearn.reporting.markup import Html, tag, text, written

BAR = 2.0
"""Standard errors either way that an error bar shows: the margin by which a number must pass a threshold."""


@dataclass(frozen=True)
class Scale:
    """The axis of a gauge, from lazy on the left to rich on the right."""

    begin: float
    end: float
    ticks: Sequence[float]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at the beginning to 1 at the end; values outside are at the nearer end."""
        if self.logarithmic:
            found = math.log(max(value, 1e-300) / self.begin) / math.log(self.end / self.begin)
        else:
            found = (value - self.begin) / (self.end - self.begin)
        return min(max(found, 0.0), 1.0)

    def outside(self, value: float) -> int:
        """-1 before the beginning, 1 after the end, else 0."""
        return -1 if value < self.begin else int(value > self.end)


@dataclass(frozen=True)
class Marker:
    """A value on a gauge."""

    label: str
    value: float
    error: float = math.nan
    """standard error; nan if unknown"""
    shape: Literal["needle", "ring", "diamond", "bar"] = "needle"

    @property
    def words(self) -> str:
        """The value with its error."""
        return with_error(self.value, self.error)


@dataclass(frozen=True)
class Gauge:
    """One or several values on a scale."""

    title: str
    about: str
    scale: Scale
    markers: Sequence[Marker]
    """the first is the one that is judged"""
    threshold: Threshold | None = None
    zones: Sequence[str] = ()
    """names of the parts of the scale, from left to right: two, or three with one between the thresholds"""
    short: str = ""
    """Title among the numbers of the first screen."""

    @property
    def key(self) -> str:
        """Its anchor in a page."""
        return "gauge-" + "-".join(re.findall(r"[a-z]+", self.title.lower()))

    @property
    def verdict(self) -> str:
        """The zone in which the whole error bar lies; the one between, or none, if it lies in no single one."""
        if self.threshold is None:
            return ""
        one = self.markers[0]
        margin = BAR * one.error if math.isfinite(one.error) else 0.0
        if one.value + margin < self.threshold.low:
            return self.zones[0]
        if one.value - margin > self.threshold.high:
            return self.zones[-1]
        return self.zones[1] if len(self.zones) == 3 else "cannot tell"


def with_error(value: float, error: float) -> str:
    """Return a value and its standard error, both to two digits of the error; the value alone without an error."""
    if not math.isfinite(error) or error <= 0 or not math.isfinite(value):
        return written(value, 3)
    digits = max(1 - math.floor(math.log10(error)), 0)
    return f"{written(value, 3)} ± {error:.1g}" if digits > 6 else f"{value:.{digits}f} ± {error:.{digits}f}"


def estimate_cell(found: Estimate) -> Cell:
    """An estimate for a table."""
    value, error = float(found), float(found.stderr)
    return Number(with_error(value, error), value, error) if math.isfinite(value) else "–"


# ---- the gauges of a diagnosis


SHRANK = "kernel shrank to"
"""Short title of the growth of a kernel below one, which is written as a percentage."""
_UNIT = Scale(0.0, 1.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
_ELSEWHERE = "above one, the linear copy went elsewhere"


def _shares(value: float) -> Scale:
    """Return the scale of a share, which ends at the value where that is larger than one."""
    if not value > 1:
        return _UNIT
    return Scale(0.0, value, (0.0, 1.0, value)) if value < 3 else Scale(0.01, value, (0.01, 1.0, value), True)


def gauges(found: Diagnosis) -> list[Gauge]:
    """Return the numbers that are known, the one that decides first."""
    gap = found.numbers["gap"]
    made = [
        _estimate_gauge(
            "Linearization gap",
            "share of the change of the outputs that a linear copy of the start misses"
            + (f": {_ELSEWHERE}" if float(gap) > 1 else ""),
            gap,
            _shares(float(gap)),
            GAP,
            ("lazy", "between", "rich"),
            "linear copy misses",
        ),
        _estimate_gauge(
            "Rotation of the kernel",
            "1 − cosine of the centered first and last kernel",
            found.turning,
            Scale(1e-3, 1.0, (1e-3, 1e-2, 1.0), True),
            TURNED,
            ("kept its shape", "between", "rotated"),
            "kernel rotated",
        ),
        _estimate_gauge(
            "Growth of the kernel",
            "norm of the last kernel over that of the first",
            found.growth,
            Scale(0.1, 1e3, (0.1, 1.0, 10.0, 100.0, 1e3), True),
            GREW,
            ("kept its size", "grew"),
            "kernel grew, times" if float(found.growth) >= 1 else SHRANK,
        ),
        _usefulness(found),
    ]
    return [one for one in made if one is not None]


def unknown_numbers(found: Diagnosis) -> list[str]:
    """The numbers that are not known, with the reason."""
    reasons = {
        "the linearization gap": (float(found.numbers["gap"]), found.gap.reason),
        "how far the kernel rotated": (float(found.turning), "the first kernel and a later one are needed"),
        "whether that helped": (found.useful.network, found.useful.reason),
    }
    return [
        f"{name}{f', as {why}' if why else ''}" for name, (value, why) in reasons.items() if not math.isfinite(value)
    ]


def _estimate_gauge(
    title: str, about: str, value: Estimate, scale: Scale, threshold: Threshold, zones: Sequence[str], short: str
) -> Gauge | None:
    if not math.isfinite(float(value)):
        return None
    return Gauge(title, about, scale, [Marker("", float(value), float(value.stderr))], threshold, zones, short)


def _usefulness(found: Diagnosis) -> Gauge | None:
    """Return the test errors of the network, of both kernels and of a constant prediction."""
    useful = found.useful
    if not math.isfinite(useful.network):
        return None
    counted = {"misclassified": "test points misclassified", "labels": "test labels that are wrong"}
    markers = [
        Marker("the network", useful.network, useful.learned_error),
        Marker("kernel of the start", useful.first, shape="ring"),
        Marker("kernel of the end", useful.later, shape="diamond"),
        Marker("chance" if useful.unit in counted else "constant prediction", useful.constant, shape="bar"),
    ]
    markers = [one for one in markers if math.isfinite(one.value)]
    largest = max(one.value for one in markers)
    end = next((end for end in (0.1, 0.2, 0.5, 1.0) if 0.9 * end > largest), max(largest, 1.0))
    about = f"share of the {counted.get(useful.unit, 'test variance that is missed')}. {found.why_helped}"
    scale = Scale(0.0, end, [end * i / 4 for i in range(5)])
    return Gauge("Did it help?", about, scale, markers, short="test error:")


# ---- as HTML


def gauge(one: Gauge, *, anchored: bool = False) -> Html:
    """Return a gauge with its value in words, and an anchor if asked for; the drawing repeats the words."""
    first = one.markers[0]
    verdict = tag("span", text(one.verdict), class_="told") if one.verdict else ""
    value = tag("p", tag("strong", text(first.words)), verdict, class_="value") if one.threshold is not None else ""
    keys = [
        tag("span", _key(each), text(f"{each.label} {each.words}"))
        for each in (one.markers if len(one.markers) > 1 else ())
    ]
    return tag(
        "div",
        tag("p", text(one.title), class_="title"),
        value or tag("p", *keys, class_="keys"),
        tag(
            "svg",
            *_band(one),
            *(_drawn(one.scale, each) for each in reversed(one.markers)),
            height=56,
            aria_hidden="true",
        ),
        tag("p", text(one.about), tag("span", text(_limits(one)), class_="unseen"), class_="note"),
        class_="gauge",
        id=one.key if anchored else None,
        tabindex=-1 if anchored else None,
    )


def _limits(one: Gauge) -> str:
    """The thresholds in words, for those who do not see the drawing."""
    if one.threshold is None:
        return ""
    return f". {one.zones[0]} below {one.threshold.low:g}, {one.zones[-1]} above {one.threshold.high:g}"


_SHAPES = {
    "needle": "M0 23l-6 -11h12z",
    "ring": "M-5 28a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
    "diamond": "M0 22l5 6l-5 6l-5 -6z",
    "bar": "M-1.5 21h3v15h-3z",
}
_LEFT, _RIGHT = "M-6 17l11 -6v12z", "M6 17l-11 -6v12z"


def _key(one: Marker) -> Html:
    shape = {
        "needle": "M6 11l-5 -9h10z",
        "ring": "M2 6a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        "diamond": "M6 1l4 5l-4 5l-4 -5z",
        "bar": "M4.5 0h3v12h-3z",
    }
    return tag("svg", tag("path", d=shape[one.shape], class_=one.shape), width=12, height=12, aria_hidden="true")


def _at(share: float) -> str:
    """Percent of the width; ends keep room for labels."""
    return f"{4 + 92 * share:.2f}%"


def _band(one: Gauge) -> list[Html]:
    """Zones with their names, ticks, thresholds."""
    scale, limits = one.scale, [] if one.threshold is None else sorted({one.threshold.low, one.threshold.high})
    edges = [0.0, *map(scale.share, limits), 1.0]
    levels = ["low", "high"] if len(edges) == 3 else ["low", "between", "high"] if len(edges) == 4 else ["plain"]
    parts = []
    for i, level in enumerate(levels):
        begin, end = edges[i], edges[i + 1]
        parts.append(
            tag("rect", x=_at(begin), y=25, width=f"{92 * (end - begin):.2f}%", height=7, class_=f"zone-{level}")
        )
        if one.zones and end - begin > 0.12:
            parts.append(tag("text", text(one.zones[i]), x=_at((begin + end) / 2), y=9, text_anchor="middle"))
    ticks = [
        tick for tick in scale.ticks if all(abs(scale.share(tick) - scale.share(limit)) > 0.13 for limit in limits)
    ]
    for tick in ticks:
        parts.append(tag("line", x1=_at(scale.share(tick)), x2=_at(scale.share(tick)), y1=32, y2=37, class_="tick"))
        parts.append(_label(scale, tick, "tick"))
    near = len(limits) == 2 and scale.share(limits[1]) - scale.share(limits[0]) < 0.09
    for limit, anchor in zip(limits, ("end", "start") if near else ("middle", "middle"), strict=False):
        parts.append(tag("line", x1=_at(scale.share(limit)), x2=_at(scale.share(limit)), y1=12, y2=38, class_="limit"))
        parts.append(_label(scale, limit, "limit", anchor))
    return parts


def _label(scale: Scale, value: float, kind: str, anchor: str = "middle") -> Html:
    return tag("text", text(written(value, 3)), x=_at(scale.share(value)), y=50, text_anchor=anchor, class_=kind)


def _drawn(scale: Scale, one: Marker) -> Html:
    """A marker with its error bar; an arrow at the end for a value outside of the scale."""
    parts = []
    if one.shape == "needle" and math.isfinite(one.error) and one.error > 0:
        low, high = (_at(scale.share(one.value + sign * BAR * one.error)) for sign in (-1, 1))
        parts.append(tag("line", x1=low, x2=high, y1=17, y2=17, class_="error"))
        parts += [tag("line", x1=end, x2=end, y1=13, y2=21, class_="error") for end in (low, high)]
    shape = _SHAPES[one.shape]
    beyond = scale.outside(one.value)
    if beyond and one.shape == "needle":
        shape = _RIGHT if beyond > 0 else _LEFT
    here = tag("svg", tag("path", d=shape, class_=one.shape), x=_at(scale.share(one.value)), overflow="visible")
    return Html("".join([*parts, here]))
