"""The pictures of a first screen: nearest neighbors, and what the network looks at, at the start and at the end."""

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy

from featlearn.diagnosis.findings import Findings
from featlearn.reporting.groups import RunGroup
from featlearn.reporting.markup import Html, tag, text, written

SHOWN, NEIGHBORS, PATTERNS = 3, 5, 4
"""Samples that are shown, with so many neighbors each; and patterns."""
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


def neighbor_pictures(group: RunGroup, arrays: Arrays) -> Html:
    """Return the samples whose neighbors changed most, with their neighbors by the first and by the last kernel."""
    one = group.first
    kernels = [normalized_kernel(one, step) for step in _ends(one.run_data.kernel_steps)]
    shown = _samples(one, arrays, kernels)
    if shown is None:
        return Html("")
    places, draw = shown
    near = [_nearest(kernel[numpy.ix_(places, places)]) for kernel in kernels]  # type: ignore[index]
    classes = class_of(one, len(kernels[0]))  # type: ignore[arg-type]
    own = None if classes is None else classes[places]
    kept = numpy.array([len(set(a) & set(b)) for a, b in zip(*near, strict=True)], dtype=float)
    same = [numpy.zeros(len(places)) if own is None else (own[n] == own[:, None]).mean(1) for n in near]
    order = numpy.argsort(kept - 0.9 * (same[1] - same[0]), kind="stable")[:SHOWN]
    rows = [
        tag(
            "div",
            tag("div", draw(i, "sample"), class_="self"),
            *(
                tag(
                    "div",
                    *(draw(j, "neighbor", own is not None and own[i] == own[j]) for j in neighbors[i]),
                    class_="near",
                    aria_label=when,
                    role="group",
                )
                for when, neighbors in zip(("at the start", "at the end"), near, strict=True)
            ),
            class_="neighbors",
        )
        for i in order
    ]
    note = f"The {len(order)} samples whose neighbors changed most: at the start above, at the end below."
    if own is not None:
        shares = [round(100 * float(part.mean())) for part in same]
        note += f" The same class is framed; of all {len(places)}: {shares[0]}% at the start, {shares[1]}% at the end."
    return tag("section", tag("h3", "Nearest neighbors"), *rows, tag("p", text(note), class_="note"))


def _ends(steps: Sequence[int]) -> Sequence[int]:
    return (steps[0], steps[-1]) if len(steps) > 1 else ()


def _samples(one: Findings, arrays: Arrays, kernels: Sequence[numpy.ndarray | None]) -> Any:
    """Return the places of the samples in the kernel, and how each is drawn; None if they do not fit together."""
    places = arrays.get("samples")
    if len(kernels) < 2 or any(kernel is None for kernel in kernels) or places is None or places.dtype.kind not in "iu":
        return None
    count = len(kernels[0])  # type: ignore[arg-type]
    if places.ndim != 1 or not NEIGHBORS < len(places) <= LARGEST or places.min() < 0 or places.max() >= count:
        return None
    if len(kernels[1]) != count:  # type: ignore[arg-type]
        return None
    images = arrays.get("thumbnails")
    if images is not None and _is_image(images, len(places)):
        pictures = [png(image) for image in images]
        return places, lambda i, what, same=False: _thumbnail(pictures[i], what, same)
    table = arrays.get("tokens", arrays.get("rows"))
    if table is None or table.ndim != 2 or len(table) != len(places) or table.dtype.kind not in "iuf":
        return None
    words = [_words(one, row) for row in table]
    return places, lambda i, what, same=False: _code(words[i], same)


def _code(words: str, same: bool) -> Html:
    return tag("code", text(words), class_="words same" if same else "words", title=words)


def _is_image(images: numpy.ndarray, count: int) -> bool:
    shape = images.shape
    fits = images.dtype == numpy.uint8 and len(shape) in (3, 4) and shape[0] == count
    return fits and max(shape[1:3]) <= LARGEST and min(shape) > 0 and (len(shape) == 3 or shape[3] == 3)


def _thumbnail(picture: str, what: str, same: bool) -> Html:
    name = f"{what}{', same class' if same else ''}"
    return tag("img", src=picture, alt=name, class_="same" if same else "other")


def _words(one: Findings, row: numpy.ndarray) -> str:
    if row.dtype.kind == "f":
        return " ".join(f"{value:.2g}" for value in row)
    return spelled(one, row)


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
    parts = [part for when, arrays in (("start", first), ("end", last)) if (part := _patterns(group, when, arrays))]
    return tag("section", tag("h3", "What it looks at"), *parts) if parts else Html("")


def _patterns(group: RunGroup, when: str, arrays: Arrays) -> Html:
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
    if columns is not None and weights is not None and columns.ndim == 1 and columns.shape == weights.shape:
        pairs = list(zip(columns.tolist(), weights.tolist(), strict=True))[:SHOWN]
        listed = ", ".join(f"column {column}: {_percent(share)}" for column, share in pairs)
        return tag("p", text(f"{when}: {listed} of its sensitivity."))
    words, nearest = arrays.get("words"), arrays.get("nearest")
    if words is None or nearest is None or nearest.ndim != 2 or words.shape != nearest.shape[:1]:
        return Html("")
    one = group.first
    near = [
        tag("li", tag("code", text(spelled(one, [w]))), " → ", tag("code", text(_listed(one, n))))
        for w, n in zip(words[:6], nearest, strict=False)
    ]
    return tag(
        "div",
        tag("p", text(f"{when}: nearest tokens of the embedding"), class_="note"),
        tag("ul", *near, class_="tokens"),
    )


def _listed(one: Findings, tokens: numpy.ndarray) -> str:
    return " ".join(spelled(one, [token]) for token in tokens[:4])


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
