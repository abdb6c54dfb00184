"""The verdict as HTML: for each run all statements with number, threshold and source."""

import math
from collections.abc import Sequence
from itertools import groupby

from featlearn.diagnosis import Diagnosis, Evidence
from featlearn.diagnosis.evidence import GAP, SPEED, TURNED, Threshold
from featlearn.reporting.groups import RunGroup
from featlearn.reporting.markup import Html, tag, text

_TONES = {"lazy": "lazy", "rich": "rich"} | dict.fromkeys(("yes", "no", "cannot tell", "thin"), "unknown")


def verdict(groups: Sequence[RunGroup]) -> Html:
    """The first section of the page."""
    return tag(
        "section",
        tag("h2", "Verdict", id="verdict-title"),
        *(_card(group) for group in groups),
        id="verdict",
        aria_labelledby="verdict-title",
        tabindex=-1,
    )


def sentence(diagnosis: Diagnosis) -> str:
    """The headline of a diagnosis as a sentence."""
    return diagnosis.headline[:1].upper() + diagnosis.headline[1:]


def _card(group: RunGroup) -> Html:
    found = group.diagnosis
    opening, stop, rest = sentence(found).partition(". ")
    topics = [(topic, list(items)) for topic, items in groupby(found.evidence, lambda item: item.topic)]
    sources = list(dict.fromkeys(item.source for item in found.evidence if item.source and item.threshold))
    anchor = f"source-{group.color}"
    runs = f"{len(found.runs)} runs: {', '.join(found.runs)}" if len(found.runs) > 1 else ""
    listed = [tag("li", text(source), id=f"{anchor}-{i}") for i, source in enumerate(sources, 1)]
    return tag(
        "article",
        tag("h3", text(group.label)),
        tag("p", text(runs), class_="note") if runs else "",
        tag("p", tag("span", text(opening), class_=f"chip {_tone(found.regime)}"), text(f"{rest}" if stop else ""),
            class_="said"),
        _gauges(found),
        tag("div", *(_topic(topic, items, sources, anchor) for topic, items in topics), class_="topics"),
        tag("h4", "Where the thresholds come from") if listed else "",
        tag("ol", *listed, class_="sources") if listed else "",
        class_=f"card {_tone(found.regime)}",
    )  # fmt: skip


def _topic(topic: str, items: Sequence[Evidence], sources: Sequence[str], anchor: str) -> Html:
    statements = [_statement(item, sources, anchor) for item in items]
    return tag("div", tag("h4", text(topic[:1].upper() + topic[1:])), tag("ul", *statements))


def _statement(item: Evidence, sources: Sequence[str], anchor: str) -> Html:
    """The statement, then its threshold with a link to the source."""
    told = item.verdict if item.verdict in _TONES or item.verdict == "between" else ""
    chip = tag("span", text(told), class_=f"chip {_tone(told)}") if told else ""
    threshold = ""
    if item.threshold:
        place = sources.index(item.source) + 1 if item.source in sources else 0
        link = tag("sup", tag("a", f"[{place}]", href=f"#{anchor}-{place}", aria_label=f"source {place}"))
        threshold = tag("small", text(f"threshold: {item.threshold}"), link if place else "")
    return tag("li", chip, text(item.says), threshold)


def _tone(verdict: str) -> str:
    return _TONES.get(verdict, "between")


# ---- the three numbers that vote


def _gauges(found: Diagnosis) -> Html:
    """Gauges from lazy to rich: distance of the kernel, speed of the loss, rise of alignment."""
    drawn = [
        _gauge("Linearisation gap", float(found.numbers["gap"]), GAP, True),
        _gauge("The kernel turned by", float(found.numbers["turning"]), TURNED, True),
        _gauge("Frozen kernel slower by", float(found.numbers["speedup"]), SPEED, True, " times"),
    ]
    return tag("div", *drawn, class_="gauges")


def _gauge(label: str, value: float, threshold: Threshold, logarithmic: bool, unit: str = "") -> Html:
    if not math.isfinite(value):
        return tag("div", tag("p", text(f"{label}: "), tag("strong", "cannot tell")), class_="gauge")
    low, high = threshold.low, threshold.high
    begin, end = (low / 30, high * 30) if logarithmic else (-high, 4 * high)

    def place(at: float) -> float:
        if logarithmic:
            share = math.log(max(at, 1e-300) / begin) / math.log(end / begin)
        else:
            share = (at - begin) / (end - begin)
        return round(200 * min(max(share, 0.0), 1.0), 1)

    zones = [("lazy", 0.0, place(low)), ("between", place(low), place(high)), ("rich", place(high), 200.0)]
    needle = min(max(place(value), 4.0), 196.0)
    drawing = tag(
        "svg",
        *(tag("rect", x=a, y=10, width=round(b - a, 1), height=8, class_=f"zone-{name}") for name, a, b in zones),
        tag("path", d=f"M{needle} 20l-4 -14h8z", class_="needle"),
        viewBox="0 0 200 24", preserveAspectRatio="none", aria_hidden="true",
    )  # fmt: skip
    ends = tag("div", tag("span", "lazy"), tag("span", "rich"), class_="ends", aria_hidden="true")
    said = tag("p", text(f"{label}: "), tag("strong", text(f"{value:.3g}{unit}")))
    return tag("div", said, drawing, ends, class_="gauge")
