"""Content blocks as HTML, with text alternative and table, and as the data that the page draws."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy

from featlearn.reporting.content_blocks import (
    NEUTRAL,
    Cell,
    Chart,
    ChartLine,
    ContentBlock,
    Grid,
    MatrixSequence,
    Picture,
    Section,
    in_full,
    shade,
)
from featlearn.reporting.markup import Html, floats, number, tag, text, written

DASHES = ("", "7 4", "2 3", "8 3 2 3")
MATRIX_TABLE = 12
"""Number of rows up to which a matrix is shown as a table."""


def section(one: Section) -> Html:
    """A section, including what is missing and why."""
    absent = [tag("p", tag("strong", "Not there: "), text(f"{reason}."), class_="missing") for reason in one.missing]
    blocks = tag("div", *(block(each) for each in one.blocks), class_="blocks") if one.blocks else ""
    return titled(one.key, one.title, one.intro, blocks, *absent)


def titled(key: str, title: str, *content: str, folded: bool = False) -> Html:
    """Return a section under its heading, which opens it if it is folded."""
    heading = tag("h2", text(title), id=f"{key}-title")
    inside = [tag("details", tag("summary", heading), *content, class_="fold")] if folded else [heading, *content]
    return tag("section", *inside, id=key, aria_labelledby=f"{key}-title")


def block(one: ContentBlock) -> Html:
    """A chart, a sequence of matrices, or a table."""
    if isinstance(one, Chart):
        return _chart(one)
    return _matrix_sequence(one) if isinstance(one, MatrixSequence) else _grid(one)


def numbers(one: ContentBlock) -> dict[str, Any] | None:
    """The data that the page draws; None for a table."""
    if isinstance(one, Grid):
        return None
    return _chart_numbers(one) if isinstance(one, Chart) else _sequence_numbers(one)


def data_cell(cell: Cell, *content: Html, **attributes: object) -> Html:
    """A cell of a table, with its number in full; `content` is shown in place of the words of the cell."""
    if isinstance(cell, str):
        return tag("td", *(content or [text(cell)]), **attributes)
    error = repr(float(cell.error)) if math.isfinite(cell.error) else None
    value = cell.value if isinstance(cell.value, str) else repr(float(cell.value))
    return tag("td", *(content or [text(cell.shown)]), data_value=value, data_error=error, **attributes)


def table(head: Sequence[str], body: Sequence[Sequence[Cell]], caption: str, colors: Sequence[int] = ()) -> Html:
    """A scrollable table, also by keyboard; the first cell of a row is its header, with the color of its run."""
    samples = [swatch(color) for color in colors] or [Html("")] * len(body)
    rows = [
        tag("tr", tag("th", sample, text(row[0]), scope="row"), *map(data_cell, row[1:]))
        for sample, row in zip(samples, body, strict=True)
    ]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", text(caption)),
            tag("thead", tag("tr", *(tag("th", text(cell), scope="col") for cell in head))),
            tag("tbody", *rows),
        ),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption,
    )


def _numbers_below(head: Sequence[str], body: Sequence[Sequence[str]], caption: str) -> Html:
    return tag("details", tag("summary", text(f"Numbers: {caption}")), table(head, body, caption))


def _figure(one: Chart | MatrixSequence, *content: str) -> Html:
    remark = one.remark if isinstance(one, Chart) else one.note
    note = [tag("p", text(remark), class_="note")] if remark else []
    return tag("figure", tag("figcaption", tag("h3", text(one.title))), *content, *note, id=f"figure-{one.key}")


# ---- charts


def _chart(one: Chart) -> Html:
    marks = [tag("li", text(f"{mark.label}: step {mark.at:.0f}")) for mark in one.marks]
    spans = [tag("li", text(f"{w.label}: steps {w.begin:.0f} to {w.end:.0f}")) for w in one.windows]
    head = [one.x, *(line.label for line in one.lines)]
    body = [[written(x), *map(_cell, cells)] for x, cells in one.rows()]
    return _figure(
        one,
        tag("div", class_="chart", id=f"chart-{one.key}", role="img", aria_label=_chart_text(one)),
        tag("p", class_="readout", aria_hidden="true"),
        *_legend(one),
        tag("ul", *spans, *marks, class_="marks") if marks or spans else "",
        _numbers_below(head, body, one.title),
    )


def _legend(one: Chart) -> list[Html]:
    """Buttons that show and hide lines. Several lines of several runs: one button a run, and one a kind of line."""
    runs = {line.group: line for line in one.lines if line.group is not None}
    kinds = {line.kind: line for line in one.lines if line.group is not None and line.kind}
    rows: list[tuple[str, list[Html]]] = []
    if len(runs) > 1 and len(kinds) > 1:
        rows.append(
            (
                "Runs",
                [
                    _button(swatch(line.color), line.label.removesuffix(f": {line.kind}"), data_group=group)
                    for group, line in runs.items()
                ],
            )
        )
        rows.append(
            ("Line styles", [_button(swatch(NEUTRAL, line.dash), kind, data_kind=kind) for kind, line in kinds.items()])
        )
        own = [(i, line) for i, line in enumerate(one.lines) if line.group is None]
    else:
        own = list(enumerate(one.lines))
    if own:
        rows.append(
            (
                "Lines",
                [
                    _button(swatch(line.color, line.dash), line.label, data_line=i, data_group=line.group)
                    for i, line in own
                ],
            )
        )
    return [
        tag("div", *buttons, class_="legend", role="group", aria_label=f"{what} of: {one.title}")
        for what, buttons in rows
    ]


def _button(sample: Html, label: str, **attributes: object) -> Html:
    return tag("button", sample, text(label), type="button", aria_pressed="true", **attributes)


def swatch(color: int, dash: int = 0) -> Html:
    """A sample of a line style for legends."""
    stroke = tag("line", x1=1, x2=27, y1=5, y2=5, stroke_dasharray=DASHES[dash % 4] or None)
    return tag("svg", stroke, width=28, height=10, aria_hidden="true", class_=f"c{shade(color)} swatch")


def _cell(values: tuple[float, float, float]) -> str:
    y, low, high = values
    return f"{written(y)} ({written(low)} to {written(high)})" if math.isfinite(low) else written(y)


def _chart_text(one: Chart) -> str:
    """Text alternative of a chart."""
    ends = []
    for line in one.lines[:8]:
        seen = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
        if seen:
            (x0, y0), (x1, y1) = seen[0], seen[-1]
            ends.append(f"{line.label} from {written(y0)} at {one.x} {written(x0)} to {written(y1)} at {written(x1)}")
    more = f"; and {len(one.lines) - 8} more lines" if len(one.lines) > 8 else ""
    limits = f" Thresholds: {', '.join(level.label for level in one.levels)}." if one.levels else ""
    return f"Chart of {one.y} over {one.x}. {'; '.join(ends)}{more}.{limits} The numbers are in the table below."


def _chart_numbers(one: Chart) -> dict[str, Any]:
    rows = list(one.rows())
    limits = one.limits or one.limits_of_frames
    lines = []
    for i, line in enumerate(one.lines):
        entry: dict[str, Any] = {
            "label": line.label,
            "color": shade(line.color),
            "dash": line.dash % 4,
            "y": [number(cells[i][0]) for _, cells in rows],
        }
        entry |= {} if line.group is None else {"group": line.group, "kind": line.kind}
        if line.frames:
            entry["frames"] = {
                "steps": [step for step, _ in line.frames],
                "values": floats(_frames_at(line, [x for x, _ in rows])),
            }
        if line.low is not None:
            entry["low"] = [number(cells[i][1]) for _, cells in rows]
            entry["high"] = [number(cells[i][2]) for _, cells in rows]
        lines.append(entry)
    return {
        "kind": "chart",
        "key": one.key,
        "x": [number(x) for x, _ in rows],
        "xAxis": one.x_axis,
        "yAxis": "log" if one.logarithmic else "linear",
        **({} if limits is None else {"yLimits": [*map(number, limits)]}),
        "xLabel": one.x,
        "yLabel": one.y,
        "lines": lines,
        "marks": [{"at": number(m.at), "label": m.label, "color": shade(m.color)} for m in one.marks],
        "windows": [{"begin": number(w.begin), "end": number(w.end), "label": w.label} for w in one.windows],
        "levels": [{"at": number(level.at), "label": level.label} for level in one.levels],
        "least": None if one.least is None else list(one.least),
    }


def _frames_at(line: ChartLine, places: Sequence[float]) -> numpy.ndarray:
    """(frames, places) of a line that moves; nan where it has no value."""
    known = [dict(zip(line.x, values, strict=True)) for _, values in line.frames]
    return numpy.array([[values.get(place, math.nan) for place in places] for values in known])


# ---- matrix sequences


def _matrix_sequence(one: MatrixSequence) -> Html:
    samples = [swatch(color) for color in one.colors] or [Html("")] * len(one.sequences)
    sequences = [
        tag("div", tag("h4", samples[i], text(label)), *_canvases(one, i, pictures), class_="sequence")
        for i, (label, pictures) in enumerate(one.sequences)
    ]
    tables = [] if one.limits is not None else _sequence_tables(one)
    return _figure(one, tag("div", *sequences, class_="sequences"), _scale(one), *tables)


def _scale(one: MatrixSequence) -> Html:
    """The legend of the color scale."""
    low, high = "lowest of a picture", "highest"
    if one.limits is not None:
        low, high = f"{one.limits[0]:.2f} or less", f"{one.limits[1]:.2f} or more"
    elif one.middle is not None:
        ends = one.levels(one.sequences[0][1][0].values)
        beyond = any(
            not ends[0] <= v <= ends[1]
            for _, pictures in one.sequences
            for picture in pictures
            for v in (picture.values.min(), picture.values.max())
        )
        low, high = (f"{written(end)}{word if beyond else ''}" for end, word in zip(ends, _BEYOND, strict=True))
    bar = tag("span", class_="bar one" if one.middle is None else "bar two", aria_hidden="true")
    return tag("p", text(low), bar, text(high), class_="scale")


_BEYOND = (" or less", " or more")


def _canvases(one: MatrixSequence, sequence: int, pictures: Sequence[Picture]) -> list[Html]:
    beside = [(pictures[0], False)] if one.first_beside and len(pictures) > 1 else []
    return [
        tag(
            "div",
            _axis_names(one, picture, "rows"),
            tag(
                "canvas",
                role="img",
                aria_label=_picture_text(one, picture),
                data_sequence=sequence,
                data_moves=moves,
                width=len(picture.values[0]),
                height=len(picture.values),
            ),
            _axis_names(one, picture, "columns"),
            _group_names(one),
            tag("p", text(_caption(one, picture)), class_="range"),
            class_="picture",
        )
        for picture, moves in [*beside, (pictures[-1], True)]
    ]


def _axis_names(one: MatrixSequence, picture: Picture, axis: Literal["rows", "columns"]) -> Html:
    """The name of an axis, and the indices of a small matrix that is shown as it is."""
    count = picture.values.shape[0 if axis == "rows" else 1]
    indices = [tag("span", str(i)) for i in range(count)] if one.first_beside and count <= MATRIX_TABLE else []
    name = tag("span", text(one.rows if axis == "rows" else one.columns), class_="name")
    return tag("div", name, tag("div", *indices, class_="indices"), class_=axis, aria_hidden="true")


def _group_names(one: MatrixSequence) -> Html:
    """Return the names of groups of columns, each below its columns."""
    names = [tag("text", text(name), x=f"{100 * place:.1f}%", y=11, text_anchor="middle") for place, name in one.groups]
    return tag("svg", *names, height=14, class_="groups", aria_hidden="true") if names else Html("")


def _picture_text(one: MatrixSequence, picture: Picture) -> str:
    facts = "".join(f", {name} {written(value)}" for name, value in picture.facts.items())
    return f"{one.title} at {picture.label}: {_range(picture)}{facts}. Rows: {one.rows}; columns: {one.columns}."


def _range(picture: Picture) -> str:
    return f"{picture.label}: {written(float(picture.values.min()))} to {written(float(picture.values.max()))}"


def _caption(one: MatrixSequence, picture: Picture) -> str:
    """Return what stands below a picture; its range only where that is not the scale of all."""
    return picture.label if one.limits is not None else _range(picture)


def _sequence_tables(one: MatrixSequence) -> list[Html]:
    found = []
    for label, pictures in one.sequences:
        names = list(dict.fromkeys(name for picture in pictures for name in picture.facts))
        head = ["picture", "lowest", "highest", *names]
        body = [
            [
                p.label,
                in_full(float(p.values.min())),
                in_full(float(p.values.max())),
                *(in_full(p.facts.get(name, math.nan)) for name in names),
            ]
            for p in pictures
        ]
        caption = f"{one.title}, {label}"
        small = one.first_beside and len(pictures[0].values) <= MATRIX_TABLE
        ends = pictures[:: max(len(pictures) - 1, 1)]
        whole = [_matrix(one, f"{caption}, {picture.label}", picture) for picture in ends if small]
        summary = tag("summary", text(f"Numbers: {caption}"))
        found.append(tag("details", summary, table(head, body, caption), *whole))
    return found


def _matrix(one: MatrixSequence, caption: str, picture: Picture) -> Html:
    head = [f"{one.rows} / {one.columns}", *map(str, range(picture.values.shape[1]))]
    body = [[str(i), *map(in_full, row.tolist())] for i, row in enumerate(picture.values)]
    return table(head, body, caption)


def _sequence_numbers(one: MatrixSequence) -> dict[str, Any]:
    return {
        "kind": "sequence",
        "key": one.key,
        "rows": one.rows,
        "diverging": one.middle is not None,
        "runs": [label for label, _ in one.sequences],
        "sequences": [[_picture(one, picture) for picture in pictures] for _, pictures in one.sequences],
    }


def _picture(one: MatrixSequence, picture: Picture) -> dict[str, Any]:
    low, high = one.levels(picture.values)
    return {
        "step": picture.step,
        "size": list(picture.values.shape),
        "low": number(low),
        "high": number(high),
        "values": floats(picture.values),
        "range": _caption(one, picture),
        "label": _picture_text(one, picture),
    }


def _grid(one: Grid) -> Html:
    note = [tag("p", text(one.note), class_="note")] if one.note else []
    parts = [
        tag("details", tag("summary", text(title)), table(one.head, rows, f"{one.title}: {title}"))
        for title, rows in one.parts
    ]
    return tag(
        "div",
        tag("h3", text(one.title)),
        table(one.head, one.body, one.title, one.colors),
        *note,
        *parts,
        class_="grid",
        id=f"grid-{one.key}",
    )
