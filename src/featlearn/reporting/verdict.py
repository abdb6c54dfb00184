"""The verdict on a run as HTML: regime and sentence, the numbers on gauges, and all statements, folded by topic."""

from collections.abc import Sequence

from featlearn.diagnosis import Diagnosis, Evidence
from featlearn.reporting.content_blocks import in_full
from featlearn.reporting.gauges import gauge, gauges, unknown_numbers
from featlearn.reporting.groups import RunGroup
from featlearn.reporting.markup import Html, tag, text
from featlearn.reporting.rendering import data_cell

_TONES = {"lazy": "lazy", "rich": "rich"} | dict.fromkeys(("yes", "no", "cannot tell", "thin"), "unknown")
_BARS = (
    "A bar is two standard errors either way; a number counts only where its bar lies on one side of a threshold "
    "(the heavy ticks). An arrow at the end of a scale: the value lies outside."
)


def sentence(diagnosis: Diagnosis) -> str:
    """Return the number behind a headline, and whether learning helped, in sentences."""
    helped = "" if diagnosis.so_far or not diagnosis.explanation else f"Did it help? {diagnosis.why_helped}"
    return " ".join(filter(None, (diagnosis.explanation, helped)))


def chip(regime: str) -> Html:
    """A regime, or what a statement speaks for."""
    return tag("span", text(regime), class_=f"chip {_tone(regime)}")


def numbers(found: Diagnosis, *, anchored: bool) -> Html:
    """Return the gauges, with anchors for links, and which numbers are not known."""
    drawn = [gauge(one, anchored=anchored) for one in gauges(found)]
    absent = unknown_numbers(found)
    return Html(
        "".join(
            [
                tag("div", *drawn, class_="gauges") if drawn else "",
                tag("p", text(_BARS), class_="note") if drawn else "",
                tag("p", text(f"Not known: {'; '.join(absent)}."), class_="note") if absent else "",
            ]
        )
    )


def opinions(found: Diagnosis, *, anchored: bool) -> Html:
    """Return what other metrics of richness say, as a small table; empty if none was recorded."""
    rows = [
        tag(
            "tr",
            tag("th", text(one.name), tag("small", text(one.about)), scope="row"),
            data_cell(in_full(one.value)),
            tag("td", chip(one.says)),
        )
        for one in found.opinions.values()
    ]
    if not rows:
        return Html("")
    agree = sum(one.says == found.regime for one in found.opinions.values())
    head = tag("tr", *(tag("th", text(name), scope="col") for name in ("metric", "value", "says")))
    caption = f"Second opinions: {agree} of {len(rows)} say {found.regime}"
    if found.regime not in ("lazy", "rich"):
        caption = "Second opinions, each by itself"
    return tag(
        "div",
        tag("table", tag("caption", text(caption)), tag("thead", head), tag("tbody", *rows)),
        class_="scroll opinions",
        id="opinions" if anchored else None,
        tabindex=0,
        role="region",
        aria_label=caption,
    )


def statements(group: RunGroup) -> Html:
    """All statements with number, threshold and source, folded by topic."""
    found, topics = group.diagnosis, dict[str, list[Evidence]]()
    for item in found.evidence:
        topics.setdefault(item.topic, []).append(item)
    sources = list(dict.fromkeys(item.source for item in found.evidence if item.source and item.threshold))
    anchor = f"source-{group.color}"
    folded = [_topic(topic, items, sources, anchor) for topic, items in topics.items()]
    if sources:
        listed = [tag("li", text(source), id=f"{anchor}-{i}") for i, source in enumerate(sources, 1)]
        folded.append(
            tag("details", tag("summary", "Where the thresholds come from"), tag("ol", *listed, class_="sources"))
        )
    heading = tag("h3" if group.alone else "h4", "Every statement, by topic")
    return tag("div", heading, *folded, class_="topics") if folded else Html("")


def _topic(topic: str, items: Sequence[Evidence], sources: Sequence[str], anchor: str) -> Html:
    told = [item.verdict for item in items if item.verdict in _TONES or item.verdict == "between"]
    said = tag("span", text(", ".join(dict.fromkeys(told))), class_="told") if told else ""
    count = f" ({len(items)})" if len(items) > 1 else ""
    title = f"{topic[:1].upper()}{topic[1:]}{count}"
    listed = [_statement(item, sources, anchor) for item in items]
    return tag("details", tag("summary", text(title), said), tag("ul", *listed))


def _statement(item: Evidence, sources: Sequence[str], anchor: str) -> Html:
    """The statement, then its threshold with a link to the source."""
    told = item.verdict if item.verdict in _TONES or item.verdict == "between" else ""
    threshold = ""
    if item.threshold:
        place = sources.index(item.source) + 1 if item.source in sources else 0
        link = tag("sup", tag("a", f"[{place}]", href=f"#{anchor}-{place}", aria_label=f"source {place}"))
        threshold = tag("small", text(f"threshold: {item.threshold}"), link if place else "")
    return tag("li", chip(told) if told else "", text(item.says), threshold)


def _tone(verdict: str) -> str:
    return _TONES.get(verdict, "between")
