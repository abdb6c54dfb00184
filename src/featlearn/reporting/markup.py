"""HTML from data of runs. All strings are escaped here; no other module builds HTML from data."""

import base64
import html
import json
import math
from typing import Any, NewType

import numpy

Html = NewType("Html", str)
"""Escaped text, safe to insert into a page."""

_VOID = {"img", "input", "link", "meta"}


def text(value: object) -> Html:
    """Escape a string, for text and for quoted attributes."""
    # control characters are not allowed in HTML, not even as references
    plain = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in str(value))
    return Html(html.escape(plain, quote=True))


def tag(name: str, /, *content: str, **attributes: object) -> Html:
    """An element. Content must be HTML; attributes are escaped, and `_` in their names becomes `-`.

    True gives an attribute without value; None and False omit it.
    """
    given = "".join(
        f" {key.strip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{given}>" if name in _VOID else f"<{name}{given}>{''.join(content)}</{name}>")


def join_parts(*parts: str) -> Html:
    """Join the parts that are not empty."""
    return Html("\n".join(part for part in parts if part))


def data(value: Any) -> Html:
    """JSON that is safe inside a script element: without <, & and line separators."""
    plain = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    for sign in "<>&'":
        plain = plain.replace(sign, f"\\u{ord(sign):04x}")
    return Html(plain)


def number(value: float) -> float | None:
    """A number in full; None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def written(value: float, digits: int = 4) -> str:
    """Return a number with so many significant digits, without an exponent for large ones."""
    if not math.isfinite(value):
        return "–"
    if 1000 <= abs(value) < 1e15:
        return f"{value:.0f}"
    return f"{value:g}" if float(value).is_integer() else f"{value:.{digits}g}"


def floats(values: numpy.ndarray) -> dict[str, str]:
    """An array in full, row by row, as base64 of its little-endian bytes, under the number of bits of an element."""
    kind = "<f8" if values.dtype == numpy.float64 else "<f4"
    return {"64" if kind == "<f8" else "32": base64.b64encode(values.astype(kind).tobytes()).decode("ascii")}
