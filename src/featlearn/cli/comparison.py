"""The table of `featlearn runs compare`: the numbers of a report on several runs, one column to a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from featlearn.cli.answer import table
from featlearn.cli.plot import COLUMNS


def comparison(paths: Sequence[Path], last_losses: Sequence[str]) -> str:
    """Return as many columns beside each other as fit into 100 characters. Each row holds one quantity."""
    from featlearn.reporting.comparison import key_numbers, settings_that_differ
    from featlearn.reporting.content_blocks import POINTS
    from featlearn.reporting.groups import groups

    runs = groups(paths, bands=False, points=POINTS)
    names = [group.first.run.name for group in runs]
    rows: dict[str, Sequence[str]] = {
        "": [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)],
        **settings_that_differ(runs),
        "regime": [group.diagnosis.regime for group in runs],
        "steps": [str(group.first.run.lines[-1]["step"]) if group.first.run.lines else "0" for group in runs],
        "loss": last_losses,
        **{label: [str(getattr(cell, "shown", cell)) for cell in cells] for label, cells in key_numbers(runs).items()},
    }
    texts = [[word(label), *(word(cell, COLUMNS // 3) for cell in cells)] for label, cells in rows.items()]
    parts = [[[row[0], *row[begin:end]] for row in texts] for begin, end in _spans(texts)]
    return "\n\n".join(table(head, body) for head, *body in parts)


def _spans(rows: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Return (first, end) of the columns that fit beside the labels, always at least one."""
    label, *widths = (2 + max(len(row[i]) for row in rows) for i in range(len(rows[0])))
    spans, begin = [], 1
    while begin <= len(widths):
        end = begin + 1
        while end <= len(widths) and label - 2 + sum(widths[begin - 1 : end]) <= COLUMNS:
            end += 1
        spans.append((begin, end))
        begin = end
    return spans


def word(value: Any, longest: int = 60) -> str:
    """Return text of an untrusted run file without control characters."""
    text = "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:longest]
