"""The pictures of a first screen: nearest neighbors, and what the network looks at, at the start and at the end."""

import base64
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy

from featlearn.diagnosis.findings import Findings
from featlearn.reporting.groups import RunGroup
from featlearn.reporting.markup import Html, tag, text, written

SHOWN, NEIGHBORS, TEXT_NEIGHBORS, PATTERNS = 3, 5, 3, 4
"""Samples that are shown, neighbors of each as images and as texts, and patterns."""
COLUMNS, TOKENS = 5, 6
"""Columns of a table, and tokens of an embedding, that are shown."""
LONGEST = 18
"""Characters from the end of a sequence that are shown."""
LARGEST = 64
"""Largest number of samples, and of pixels along an axis, that are read from a run."""
BLUE_TO_RED = ("2166ac", "67a9cf", "d1e5f0", "f7f7f7", "fddbc7", "ef8a62", "b2182b")
"""Colors of a pattern, from its lowest to its highest value; the middle is zero."""

Arrays = Mapping[str, numpy.ndarray]


def recorded_pictures(findings: Findings) -> tuple[Arrays, Arrays]:
    """Return the arrays for pictures of the start and of the end; empty without them."""
    run = findings.run
    steps = list(run.arrays.get("pictures", ()))
    first, last = (
        {} if not steps else run.array("pictures", step) for step in (min(steps, default=0), max(steps, default=0))
    )
    return first, last if len(steps) > 1 else {}


# ---- nearest neighbors


def neighbor_pictures(group: RunGroup, first: Arrays, last: Arrays) -> Html:
    """Return the samples whose neighbors changed most, with their neighbors by the first and by the last kernel."""
    findings = group.first
    ends = _ends(findings)
    kernels = [kernel for step in ends if (kernel := normalized_kernel(findings, step)) is not None]
    places = first.get("samples")
    if len(kernels) != 2 or len(kernels[0]) != len(kernels[1]) or places is None or places.dtype.kind not in "iu":
        return Html("")
    count = len(kernels[0])
    if places.ndim != 1 or not NEIGHBORS < len(places) <= LARGEST or places.min() < 0 or places.max() >= count:
        return Html("")
    drawing = _drawing(findings, first, last, places)
    if drawing is None:
        return Html("")
    draw, shown, meaning = drawing
    near = [_nearest(kernel[numpy.ix_(places, places)]) for kernel in kernels]
    classes = class_of(findings, count)
    own = None if classes is None else classes[places]
    unchanged = numpy.array([len(set(a) & set(b)) for a, b in zip(*near, strict=True)], dtype=float)
    same = [numpy.zeros(len(places)) if own is None else (own[n] == own[:, None]).mean(1) for n in near]
    order = numpy.argsort(unchanged - 0.9 * (same[1] - same[0]), kind="stable")[:SHOWN]
    rows = [
        tag(
            "div",
            tag("div", draw(i, "sample", False), class_="self"),
            *(
                tag(
                    "div",
                    *(draw(j, "neighbor", own is not None and own[i] == own[j]) for j in neighbors[i][:shown]),
                    class_="near",
                    aria_label=when,
                    role="group",
                )
                for when, neighbors in zip(("at the start", "at the end"), near, strict=True)
            ),
            class_="neighbors of-texts" if meaning else "neighbors",
        )
        for i in order
    ]
    sides = "left: at the start, right: at the end" if meaning else "above: at the start, below: at the end"
    note = f"{meaning}The {len(order)} samples whose neighbors changed most; {sides}."
    if own is not None:
        shares = [round(100 * float(part.mean())) for part in same]
        note += f" Framed: the same class, {shares[0]}% of all neighbors at the start, {shares[1]}% at the end."
    else:
        note += _target_differences(findings, places, near)
    return tag("section", tag("h3", "Nearest neighbors"), *rows, tag("p", text(note), class_="note"))


def _ends(findings: Findings) -> Sequence[int]:
    """Return the first and the last step of a kernel of trained weights; empty without two."""
    data = findings.run_data
    steps = [step for step in data.array_steps("kernel") if step >= data.unfrozen]
    return (steps[0], steps[-1]) if len(steps) > 1 else ()


def _target_differences(findings: Findings, places: numpy.ndarray, near: Sequence[numpy.ndarray]) -> str:
    """Return how far targets of neighbors are apart, at the start and at the end; empty without one number each."""
    y = _single_targets(findings)
    if y is None or places.max() >= len(y) or not (spread := float(numpy.abs(y[:, None] - y).mean())) > 0:
        return ""
    own = y[places]
    shares = [round(100 * float(numpy.abs(own[n] - own[:, None]).mean()) / spread) for n in near]
    return f" Targets of neighbors differ by {shares[0]}% → {shares[1]}% of what those of any two samples do."


def _single_targets(findings: Findings) -> numpy.ndarray | None:
    """Return targets (P,) of a network with one output; None without them."""
    y = findings.run_data.targets
    return None if y is None or y.shape[1] != 1 else y.double().numpy()[:, 0]


Draw = Callable[[int, str, bool], Html]


def _drawing(findings: Findings, first: Arrays, last: Arrays, places: numpy.ndarray) -> tuple[Draw, int, str] | None:
    """Return how a sample is drawn, how many neighbors of it, and what texts hold; None if arrays do not fit."""
    images = first.get("thumbnails")
    if images is not None and _is_image(images, len(places)):
        pictures = [png(image) for image in images]
        return lambda i, what, same: _thumbnail(pictures[i], what, same), NEIGHBORS, ""
    table = first.get("tokens", first.get("rows"))
    if table is None or table.ndim != 2 or len(table) != len(places) or table.dtype.kind not in "iuf":
        return None
    if table.dtype.kind == "f":
        words, meaning = _rows(findings, table, places, last.get("columns"))
    else:
        words, meaning = [spelled(findings, row) for row in table], "The end of each sequence. "
    return lambda i, what, same: _code(words[i], same), TEXT_NEIGHBORS, meaning


def _rows(
    findings: Findings, table: numpy.ndarray, places: numpy.ndarray, heaviest: numpy.ndarray | None
) -> tuple[list[str], str]:
    """Return target and heaviest columns of each row of a table, and which columns they are."""
    columns = [] if heaviest is None else [int(c) for c in heaviest.reshape(-1).tolist() if 0 <= c < table.shape[1]]
    columns = (columns or list(range(table.shape[1])))[:SHOWN]
    y = _single_targets(findings)
    known = y is not None and places.max() < len(y)
    targets = [f"{y[place]:.2g}: " if known else "" for place in places]  # type: ignore[index]
    words = [
        target + " ".join(f"{row[column]:.2g}" for column in columns)
        for target, row in zip(targets, table, strict=True)
    ]
    numbers = f"columns {', '.join(map(str, columns))}"
    return words, f"Each row: {'its target, then ' if known else ''}{numbers}. "


def _code(words: str, same: bool) -> Html:
    return tag("code", text(words[-LONGEST:]), class_="words same" if same else "words", title=words)


def _is_image(images: numpy.ndarray, count: int) -> bool:
    shape = images.shape
    fits = images.dtype == numpy.uint8 and len(shape) in (3, 4) and shape[0] == count
    return fits and max(shape[1:3]) <= LARGEST and min(shape) > 0 and (len(shape) == 3 or shape[3] == 3)


def _thumbnail(picture: str, what: str, same: bool) -> Html:
    name = f"{what}{', same class' if same else ''}"
    return tag("img", src=picture, alt=name, class_="same" if same else "other")


def spelled(one: Findings, tokens: Iterable[Any]) -> str:
    """Return tokens as text by the vocabulary in the settings of the run, else as numbers."""
    settings = one.run.config.get("settings")
    words = settings.get("vocabulary") if isinstance(settings, Mapping) else None
    if not isinstance(words, list | str):
        return " ".join(str(int(token)) for token in tokens)
    known = [str(words[int(token)])[:40] if 0 <= int(token) < len(words) else "?" for token in tokens]
    return "".join(known).replace("\n", "⏎")


def _nearest(kernel: numpy.ndarray) -> numpy.ndarray:
    apart = kernel.astype(float).copy()
    numpy.fill_diagonal(apart, -math.inf)
    nearest: numpy.ndarray = numpy.argsort(-apart, axis=1, kind="stable")[:, :NEIGHBORS]
    return nearest


def normalized_kernel(one: Findings, step: int) -> numpy.ndarray | None:
    """Return the cosines of centered gradients, from a recorded kernel (P, P); None if there is none."""
    kernel = one.run_data.array("kernel", step, "mean")
    if kernel is None or kernel.dim() != 2 or kernel.shape[0] != kernel.shape[1]:
        return None
    return cosines(kernel.double().numpy())


def cosines(kernel: numpy.ndarray) -> numpy.ndarray:
    """Return the cosines of the gradients of samples, less the mean gradient."""
    centered = kernel - kernel.mean(0) - kernel.mean(1)[:, None] + kernel.mean()
    sizes = numpy.sqrt(numpy.maximum(centered.diagonal(), 0))
    scale = numpy.where(sizes > 1e-7 * max(float(sizes.max(initial=0.0)), 1e-300), sizes, math.inf)
    found: numpy.ndarray = numpy.clip(centered / scale / scale[:, None], -1, 1)
    return found


def class_of(one: Findings, samples: int) -> numpy.ndarray | None:
    """Return the class of each sample; None if the targets are no classes."""
    y, probe = one.run_data.targets, one.run.config.get("probe")
    if y is None or len(y) != samples or y.shape[1] < 2:
        return None
    if isinstance(probe, Mapping) and probe.get("classification") is False:
        return None
    classes: numpy.ndarray = y.numpy().argmax(1)
    return classes


def class_names(one: Findings) -> Sequence[Any]:
    """Return the names of classes in the settings of the run; empty without them."""
    settings = one.run.config.get("settings")
    names = settings.get("classes") if isinstance(settings, Mapping) else None
    return names if isinstance(names, list) else ()


# ---- what the network looks at


def pattern_pictures(group: RunGroup, first: Arrays, last: Arrays) -> Html:
    """Return what the network is most sensitive to, at the start and at the end."""
    parts = [part for when, arrays in (("start", first), ("end", last)) if (part := _patterns(when, arrays))]
    parts = [part for part in (*parts, _nearest_tokens(group.first, first, last)) if part]
    return tag("section", tag("h3", "What it looks at"), *parts) if parts else Html("")


def _patterns(when: str, arrays: Arrays) -> Html:
    shares, patterns = arrays.get("shares"), arrays.get("patterns")
    if patterns is not None and shares is not None and _is_pattern(patterns) and shares.shape == (len(patterns),):
        if not float(shares.sum()) > 0:
            return tag("p", text(f"{when}: its output does not depend on the input yet."), class_="note")
        images = [
            tag("img", src=png(colored(one)), alt=f"pattern {i + 1}") for i, one in enumerate(patterns[:PATTERNS])
        ]
        said = f"{when}: {len(images)} patterns make {_percent(shares[:PATTERNS].sum())} of its sensitivity"
        more = " (eigenvectors of the average gradient outer product)." if when == "end" else "."
        return tag("div", tag("div", *images, class_="patterns"), tag("p", text(said + more), class_="note"))
    columns, weights = arrays.get("columns"), arrays.get("column_shares")
    if columns is None or weights is None or columns.ndim != 1 or columns.shape != weights.shape:
        return Html("")
    pairs = list(zip(columns.tolist(), weights.tolist(), strict=True))[:COLUMNS]
    widest = max((share for _, share in pairs), default=0.0)
    if not widest > 0:
        return Html("")
    bars = [
        tag("text", text(f"#{column}"), x="14%", y=18 * row + 12, text_anchor="end")
        + tag("rect", x="17%", y=18 * row + 2, width=f"{60 * share / widest:.2f}%", height=12)
        + tag("text", text(_percent(share)), x=f"{19 + 60 * share / widest:.2f}%", y=18 * row + 12)
        for row, (column, share) in enumerate(pairs)
    ]
    label = ", ".join(f"column {column}: {_percent(share)}" for column, share in pairs)
    drawn = tag("svg", *bars, height=18 * len(pairs), class_="columns", role="img", aria_label=label)
    return tag("div", tag("p", text(f"{when}: share of its sensitivity, by column"), class_="note"), drawn)


def _nearest_tokens(findings: Findings, first: Arrays, last: Arrays) -> Html:
    """Return the tokens whose nearest ones in the embedding changed most, with those of the start and of the end."""
    words, before, after = first.get("words"), first.get("nearest"), last.get("nearest")
    if words is None or before is None or after is None or before.ndim != 2 or before.shape != after.shape:
        return Html("")
    if words.shape != before.shape[:1] or not numpy.array_equal(words, last.get("words", words[:0])):
        return Html("")
    changed = numpy.array([len(set(new) - set(old)) for old, new in zip(before, after, strict=True)])
    rows = [
        tag(
            "tr", *(tag("td", tag("code", text(_listed(findings, part)))) for part in ([words[i]], before[i], after[i]))
        )
        for i in numpy.argsort(-changed, kind="stable")[:TOKENS]
    ]
    head = tag("tr", *(tag("th", text(name), scope="col") for name in ("token", "start", "end")))
    note = "Nearest tokens in the embedding, of the frequent tokens whose neighbors changed most."
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="tokens")
    return Html(table + tag("p", text(note), class_="note"))


def _listed(findings: Findings, tokens: Iterable[Any]) -> str:
    return " ".join(spelled(findings, [token]).replace(" ", "␣") for token in tokens)


def _is_pattern(patterns: numpy.ndarray) -> bool:
    shape = patterns.shape
    whole = patterns.dtype.kind == "f" and len(shape) == 4 and shape[1] in (1, 3) and min(shape) > 0
    return bool(whole and max(shape[2:]) <= LARGEST and numpy.isfinite(patterns).all())


def _percent(share: float) -> str:
    return f"{written(100 * float(share), 2)}%"


def colored(pattern: numpy.ndarray) -> numpy.ndarray:
    """Return bytes (height, width, 3) of a pattern (channels, height, width): blue below zero, red above."""
    largest = float(numpy.abs(pattern).max()) or 1.0
    if len(pattern) == 3:
        return numpy.asarray((pattern.transpose(1, 2, 0) / largest + 1) * 127.5).round().astype(numpy.uint8)
    stops = numpy.array([list(bytes.fromhex(color)) for color in BLUE_TO_RED], dtype=float)
    place = (pattern[0] / largest + 1) / 2 * (len(stops) - 1)
    parts = [numpy.interp(place, numpy.arange(len(stops)), stops[:, c]) for c in range(3)]
    return numpy.stack(parts, -1).round().astype(numpy.uint8)


def png(image: numpy.ndarray) -> str:
    """Return bytes (height, width), or (height, width, 3), as the address of a PNG image."""
    height, width = image.shape[:2]
    rows = numpy.ascontiguousarray(image).reshape(height, -1)
    lines = numpy.concatenate([numpy.zeros((height, 1), numpy.uint8), rows], axis=1)  # no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if image.ndim == 2 else 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    chunks = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode("ascii")
