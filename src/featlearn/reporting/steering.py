"""What would make a run richer or lazier, as HTML."""

import math
from typing import Literal

from featlearn.diagnosis import Diagnosis
from featlearn.reporting.markup import Html, tag, text
from featlearn.steer.advice import Advice, Change, advise


def steering(found: Diagnosis, lost: bool, heading: Literal["h3", "h5"]) -> Html:
    """Both directions under their headings: one way each, the others folded.

    `lost`: training broke down before anything was learned.
    """
    if lost:
        return tag(
            "p", "Training broke down before anything can be told: lower the learning rate first.", class_="note"
        )
    return tag("div", *(_direction(advise(found, toward), heading) for toward in _WAYS), class_="ways")


_WAYS: tuple[Literal["rich", "lazy"], ...] = ("rich", "lazy")


def _direction(advice: Advice, heading: str) -> Html:
    title = tag(heading, "Richer" if advice.toward == "rich" else "Lazier")
    if not advice.changes:
        return tag("div", title, tag("p", text(f"It is {advice.toward} already: {advice.note}")), class_="way")
    first, *others = advice.changes
    guess = "" if advice.regime != "cannot tell" else " This is a guess: it is not known where the run stands."
    ways = [tag("li", _call(change), _why(change)) for change in others]
    return tag(
        "div",
        title,
        tag("p", text(_sentence(first) + guess)),
        tag("pre", tag("code", text(first.call))),
        tag(
            "details",
            tag("summary", text(f"What to expect, and {_count(len(others))}")),
            _why(first),
            tag("p", tag("strong", "Or, instead of it:")) if others else "",
            tag("ul", *ways) if others else "",
        ),
        class_="way",
    )


def _count(others: int) -> str:
    return "why" if not others else "another way" if others == 1 else f"{others} other ways"


def _sentence(change: Change) -> str:
    what = change.what[:1].upper() + change.what[1:]
    return f"{what}{_rate(change)}."


def _rate(change: Change) -> str:
    return "" if math.isnan(change.rate_factor) else f", and multiply the learning rate by {change.rate_factor:.3g}"


def _call(change: Change) -> Html:
    return Html(text(f"{change.what}{_rate(change)}: ") + tag("code", text(change.call)))


def _why(change: Change) -> Html:
    return tag("p", text(f"Expect: {change.expect}. Because: {change.because}."), class_="note")
