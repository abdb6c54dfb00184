"""The first screen of a report on one run: what happened, whether it helped, pictures of it, and what to do next."""

import itertools
import math
import re

from featlearn.diagnosis import Diagnosis
from featlearn.diagnosis.advice import next_step
from featlearn.diagnosis.evidence import GAP
from featlearn.diagnosis.words import percent
from featlearn.reporting.gauges import SHRANK, gauges
from featlearn.reporting.groups import RunGroup, finite
from featlearn.reporting.markup import Html, tag, text
from featlearn.reporting.pictures import neighbor_pictures, pattern_pictures, recorded_pictures
from featlearn.reporting.run_facts import entry
from featlearn.reporting.verdict import sentence

LONG = 60
"""Characters of a headline from which it is set smaller."""
TERMS = {
    "linear model around the starting point": "The best straight-line approximation of this network around its first "
    "weights. It can use only the features that random weights happen to give.",
    "kernel method on the initial features": "Regression with the tangent kernel of the untrained network: what it "
    "could learn without changing its features.",
    "kernel methods": "Regression with the tangent kernel: what a network learns without changing its features.",
    "chance": "The accuracy of always naming the most frequent class.",
    "constant prediction": "Always answering with the mean, or with the most frequent class.",
    "kernel": "A number for each pair of samples: how much training on one changes the output for the other.",
    "gap": "The share of what the network learned that a linear model around its first weights misses: 0 is lazy.",
    "features": "What the hidden layers respond to. Lazy training leaves them as they were at the start.",
}
"""Term -> its definition, the longer terms first."""


def defined(sentences: str) -> Html:
    """Return text in which the first occurrence of each known term opens its definition in place."""
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, TERMS)) + r")\b")
    parts, end, seen = list[str](), 0, set[str]()
    for match in pattern.finditer(sentences):
        if match[0] in seen:
            continue
        seen.add(match[0])
        parts += [
            text(sentences[end : match.start()]),
            tag("span", text(match[0]), role="button", tabindex=0, class_="term", aria_expanded="false"),
            tag("span", text(f" ({TERMS[match[0]]})"), class_="meaning", hidden=True),
        ]
        end = match.end()
    return Html("".join([*parts, text(sentences[end:])]))


def facts(group: RunGroup) -> str:
    """Return model, optimizer, steps, and accuracy against chance in one line."""
    run, useful = group.first.run, group.diagnosis.useful
    model, size, optimizer = entry(run, "model"), entry(run, "model", "trainable"), entry(run, "optimizer", "class")
    parts = []
    if model:
        shown = f", {_short(size)} parameters" if isinstance(size, int) else ""
        parts.append(f"{str(entry(run, 'model', 'class') or 'model').rpartition('.')[2][:60]}{shown}")
    parts += [str(optimizer)[:40]] if optimizer is not None else []
    parts.append(f"{group.first.run_data.steps} steps")
    if math.isfinite(useful.network) and useful.unit in ("misclassified", "labels"):
        parts.append(f"test accuracy {1 - useful.network:.2f} (chance {1 - useful.constant:.2f})")
    elif math.isfinite(useful.network):
        parts.append(f"test error {useful.network:.2f} of the variance (constant prediction {useful.constant:.2f})")
    return " · ".join(parts)


def _short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.2g}{unit}" if count < 10 * size else f"{count / size:.0f}{unit}"
    return str(count)


def headline(diagnosis: Diagnosis) -> Html:
    """Return what happened, with the regime in its color."""
    plain = diagnosis.headline[:1].upper() + diagnosis.headline[1:]
    match = re.search(_COLORED[diagnosis.regime], plain, re.IGNORECASE) if diagnosis.regime in _COLORED else None
    if match is None:
        return text(plain)
    tone = "rich" if "rich" in diagnosis.regime else "lazy" if diagnosis.regime == "lazy" else "between"
    marked = tag("span", text(match[0]), class_=tone)
    return Html(text(plain[: match.start()]) + marked + text(plain[match.end() :]))


_COLORED = {
    "rich": "learned features",
    "lazy then rich": "learned features",
    "lazy": "lazy",
    "mixed": "mixed|between lazy and learning features|curved in its parameters|few features",
}


def answer(group: RunGroup, name: str | None) -> Html:
    """Return headline and sentence. `name`: element of the headline; None where the page's heading has it."""
    said = tag("div", defined(sentence(group.diagnosis)), class_="lead")
    title = tag(name, headline(group.diagnosis), class_="headline") if name else ""
    return Html(title + said)


def pictures(group: RunGroup, kernels: Html) -> Html:
    """Return kernels, nearest neighbors and what the network looks at; and what was not recorded."""
    first, last = recorded_pictures(group.first)
    parts = [kernels, neighbor_pictures(group, first, last), pattern_pictures(group, first, last)]
    missing = ""
    if not first:
        missing = "Pictures of samples were not recorded: they come from fl.watch with pictures=True."
    elif not parts[1]:
        missing = "Neighbors are not shown: kernels of the start and of the end, or the samples, are missing."
    note = tag("p", text(missing), class_="note") if missing else ""
    return Html(tag("div", *(part for part in parts if part), class_="pictures") + note)


# ---- time


def time_strip(group: RunGroup) -> Html:
    """Return a strip from lazy to rich over the steps, with half of the loss and the test accuracy on it."""
    gap, times = group.first.gap.over_steps, group.diagnosis.times
    if gap is None or len(gap.steps) < 2 or gap.steps[-1] < 1:
        return Html("")
    steps, values, end = gap.steps.tolist(), gap.values.tolist(), float(gap.steps[-1])
    zones = ["low" if v < GAP.low else "high" if v > GAP.high else "between" for v in values]
    words = {"low": "lazy: a linear copy would do", "between": "", "high": "rich: features change"}
    unmeasured = _unmeasured(steps, zones)
    shapes = [
        part for a, b in unmeasured for part in _zone("unknown", a, b, end, f"not measured between {a:.0f} and {b:.0f}")
    ]
    begin = 0.0
    for i, zone in enumerate(zones):
        if i + 1 < len(zones) and zones[i + 1] == zone:
            continue
        shapes += _zone(zone, begin, steps[i], end, words[zone])
        begin = steps[i + 1] if i + 1 < len(steps) else end
    half = times.get("loss_half", math.nan)
    if math.isfinite(half) and half <= end:
        at = _place(half, end)
        anchor = "start" if at < 20 else "end" if at > 80 else "middle"
        shapes.append(tag("line", x1=f"{at:.2f}%", x2=f"{at:.2f}%", y1=14, y2=48, class_="limit"))
        words_of = text(f"step {half:.0f}: half of the loss")
        shapes.append(
            tag("text", words_of, x=f"{max(at, 4.0) if at < 20 else min(at, 90.0):.2f}%", y=61, text_anchor=anchor)
        )
    shapes.append(tag("line", x1="0%", x2="0%", y1=14, y2=48, class_="now", data_end=end))
    ends = (("start", "0%", "0"), ("end", "100%", f"{end:.0f} steps"))
    ends_drawn = [tag("text", text(word), x=x, y=61, text_anchor=anchor) for anchor, x, word in ends]
    accuracy = _accuracy_line(group, end)
    axis = "steps, logarithmic axis" + ("; thin line: test accuracy, 0 to 1" if accuracy else "")
    return tag(
        "section",
        tag("div", tag("h3", "When"), tag("p", axis, class_="note"), class_="when"),
        tag(
            "svg",
            *shapes,
            accuracy,
            *ends_drawn,
            height=64,
            class_="strip",
            role="img",
            aria_label=_in_words(steps, zones, unmeasured),
        ),
    )


def _unmeasured(steps: list[float], zones: list[str]) -> list[tuple[float, float]]:
    """Return pairs of measured steps in different zones with steps between them."""
    pairs = zip(itertools.pairwise(steps), itertools.pairwise(zones), strict=True)
    return [(a, b) for (a, b), (before, after) in pairs if before != after and b - a > 1]


def _zone(name: str, first: float, last: float, end: float, words: str) -> list[Html]:
    """Return a part of the strip, at least 1% wide, with its words above it, or inside if unmeasured."""
    right = _place(last, end)
    left = max(min(_place(first, end), right - 1), 0.0)
    width = max(right - left, 1.0)
    rect = tag("rect", x=f"{left:.2f}%", width=f"{width:.2f}%", y=18, height=26, class_=f"zone-{name}")
    x, y = (left + 1, 35) if name == "unknown" else (left, 13)
    label = [tag("text", text(words), x=f"{x:.2f}%", y=y)] if width > 24 and words else []
    return [rect, *label]


def _place(step: float, end: float) -> float:
    """Return the percentage of the width at a step, on a logarithmic axis that shows step 0."""
    return 100 * math.log1p(step) / math.log1p(end)


def _accuracy_line(group: RunGroup, end: float) -> Html:
    curve = finite(group.first.run, "test/accuracy")
    if curve is None or len(curve[0]) < 2:
        return Html("")
    points = " ".join(f"{_place(min(s, end), end):.2f},{44 - 26 * v:.2f}" for s, v in zip(*curve, strict=True))
    line = tag("polyline", points=points, class_="accuracy", vector_effect="non-scaling-stroke")
    return tag("svg", line, viewBox="0 0 100 48", preserveAspectRatio="none", x=0, y=0, width="100%", height=48)


def _in_words(steps: list[float], zones: list[str], unmeasured: list[tuple[float, float]]) -> str:
    names = {"low": "lazy", "between": "between", "high": "rich"}
    changes = [
        f"{names[z]} at step {s:.0f}"
        for i, (s, z) in enumerate(zip(steps, zones, strict=True))
        if not i or zones[i - 1] != z
    ]
    gaps = "".join(f" Not measured between {a:.0f} and {b:.0f}." for a, b in unmeasured)
    return f"The linearization gap over training: {', then '.join(changes)}.{gaps}"


# ---- what to do


def next_box(group: RunGroup) -> Html:
    """Return one next step, with a command to copy if there is one."""
    before, mark, rest = next_step(group.diagnosis).partition("`")
    command = rest.partition("`")[0] if mark else ""
    said = before.rstrip().removesuffix(":")
    parts = [tag("p", tag("strong", "Next: "), text(said + ("." if command and not said.endswith(".") else "")))]
    if command:
        button = tag("button", "Copy command", type="button", data_copy=command)
        parts.append(tag("p", tag("code", text(command)), button, class_="command"))
    return tag("div", *parts, class_="next")


def chips(group: RunGroup) -> Html:
    """Return the numbers, each a link to its gauge."""
    diagnosis = group.diagnosis
    items = []
    for one in gauges(diagnosis):
        shown = ", ".join(f"{marker.label} {marker.words}".strip() for marker in one.markers[:3])
        items.append((one.key, one.short, percent(one.markers[0].value) if one.short == SHRANK else shown))
    opinions = diagnosis.opinions.values()
    expected = {"mixed": "between", "lazy then rich": "rich"}.get(diagnosis.regime, diagnosis.regime)
    others = [f"{opinion.name} says {opinion.says}" for opinion in opinions if opinion.says != expected]
    if others:
        title = "other metrics:" if diagnosis.regime == "cannot tell" else "metrics that disagree:"
        items.append(("opinions", title, ", ".join(others)))
    elif opinions:
        items.append(("opinions", "other metrics that agree", f"all {len(opinions)}"))
    links = [tag("a", text(f"{name} "), tag("strong", text(shown)), href=f"#{key}") for key, name, shown in items]
    return tag("nav", *links, class_="numbers", aria_label="Numbers")


def banner(name: str, group: RunGroup) -> Html:
    """Return the name of the run with its facts, and the headline of its page."""
    line = tag("p", tag("strong", text(name)), tag("span", text(facts(group))), class_="kicker")
    size = "long" if len(group.diagnosis.headline) > LONG else None
    return Html(line + tag("h1", headline(group.diagnosis), class_=size))
