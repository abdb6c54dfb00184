"""`featlearn runs`: list, show, compare and pack recorded runs."""

import datetime
import json as jsons
import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from featlearn.cli.answer import Answer, UsageError, number, table
from featlearn.cli.key_numbers import BINARY, ENTROPY, key_numbers, loss_label
from featlearn.cli.plot import COLUMNS
from featlearn.cli.recorded_runs import FOLDER, open_recorded_run, recorded_runs
from featlearn.errors import FeatlearnError, RunError

if TYPE_CHECKING:
    from featlearn.record import Run


def comparison(paths: Sequence[Path], last_losses: Sequence[str]) -> str:
    """Return as many columns beside each other as fit into 100 characters. Each row holds one quantity."""
    from featlearn.reporting.comparison import key_numbers as reported_numbers
    from featlearn.reporting.comparison import settings_that_differ
    from featlearn.reporting.content_blocks import POINTS
    from featlearn.reporting.groups import groups

    runs = groups(paths, bands=False, points=POINTS)
    names = [group.first.run.name for group in runs]
    numbers = reported_numbers(runs)
    rows: dict[str, Sequence[str]] = {
        "": [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)],
        **settings_that_differ(runs),
        "regime": [group.diagnosis.regime for group in runs],
        "steps": [str(group.first.run.lines[-1]["step"]) if group.first.run.lines else "0" for group in runs],
        "loss": last_losses,
        **{label: [str(getattr(cell, "shown", cell)) for cell in cells] for label, cells in numbers.items()},
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


MARKS = {f"probe {ENTROPY}": " ce", f"probe {BINARY}": " bce", "training loss": " tr"}
LEGENDS = {
    " ce": "ce: cross-entropy",
    " bce": "bce: binary cross-entropy",
    " tr": "tr: training loss, as none on the probe is known",
}
"""How `runs ls`, which has one column for all losses, marks them, and what the marks mean."""
DETAILS = {
    "measuring": "seconds of measuring",
    "overhead": "measuring between first and last, times training",
    "wall_share": "share of the wall time",
}
"""Details of events -> labels."""


def ls(folder: Path = FOLDER, /, *, json: bool = False, debug: bool = False) -> Answer:
    """List the runs in a folder, the latest first: folders and .zip files, down to two levels.

    For example:

        featlearn runs ls
        featlearn runs ls results --json

    Args:
        folder: Where to look.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}, expected one that holds runs: featlearn runs ls FOLDER")
    entries = [_entry(path) for path in _places(folder)]
    entries.sort(key=lambda entry: -(entry.get("created") or 0.0))
    rows = [
        [entry["path"], "-", "-", "cannot be read", "-", "-"]
        if "error" in entry
        else [
            entry["path"],
            _date(entry),
            str(entry["steps"]),
            f"{entry['regime']}, diverged" if entry["diverged"] else entry["regime"],
            _loss(entry),
            number(entry["numbers"]["kernel moved"]),
        ]
        for entry in entries
    ]
    if any(row[4].endswith(mark) for mark in LEGENDS for row in rows):  # digits stand below digits
        rows = [[*row[:4], row[4] if row[4].endswith((*LEGENDS,)) else f"{row[4]}   ", row[5]] for row in rows]
    head = ["run", "date", "steps", "verdict", "probe loss", "kernel moved"]
    text = table(head, rows) if rows else f"no runs in {folder}, down to two levels"
    legends = [legend for mark, legend in LEGENDS.items() if any(row[4].endswith(mark) for row in rows)]
    legends = [f"{'; '.join(legends)}; others are squared errors"] if legends else []
    unread = [f"{entry['path']} {entry['error']}" for entry in entries if "error" in entry]
    reasons = [fill(word(line, 400), COLUMNS, subsequent_indent="  ") for line in unread]
    return Answer(data={"runs": entries}, text="\n".join([text, *legends, *reasons]))


def show(run: Path, /, *, json: bool = False, debug: bool = False) -> Answer:
    """Say all there is to say about one run.

    For example:

        featlearn runs show runs/a
        featlearn runs show a.zip --json

    Args:
        run: A folder or a .zip file.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    from featlearn.cli.diagnose import curves, summary
    from featlearn.cli.plot import plot
    from featlearn.diagnosis import diagnose

    opened = open_recorded_run(run)
    verdict = diagnose(opened)
    happened = [f"  - {_event(event)}" for event in opened.events]
    parts = [summary(opened), _origin(opened), "", plot(curves([opened])), "", verdict.full, "events:", *happened]
    data = {
        "path": run,
        "config": opened.config,
        "numbers": key_numbers(opened),
        "events": opened.events,
        "diagnosis": jsons.loads(verdict.to_json()),
    }
    return Answer(data=data, text="\n".join(parts))


def compare(*runs: Path, json: bool = False, debug: bool = False) -> Answer:
    """Put the key numbers of several runs side by side.

    For example:

        featlearn runs compare runs/a runs/b
        featlearn runs compare runs/* --json

    Args:
        runs: Folders or .zip files; a folder of seeds stands for all of them.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    paths = [path for run in runs for path in recorded_runs(run) or [run]]
    if len(paths) < 2:
        raise UsageError(f"{len(paths)} runs are given, expected two at least; featlearn runs show RUN shows one")
    entries = [_entry(path, strict=True) for path in paths]
    return Answer(data={"runs": entries}, text=comparison(paths, [_loss(entry) for entry in entries]))


def pack(run: Path, /, *, out: Path | None = None, json: bool = False, debug: bool = False) -> Answer:
    """Put a run into one .zip file, which every command takes as it takes the folder.

    For example:

        featlearn runs pack runs/a
        featlearn runs pack runs/a --out a.zip

    Args:
        run: Its folder.
        out: The file; by default as the folder, with .zip.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    path = open_recorded_run(run).pack(out)
    return Answer(data={"packed": path, "bytes": path.stat().st_size}, text=str(path))


def _places(folder: Path) -> list[Path]:
    found = [path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/run.json")]
    found += [path for depth in ("*.zip", "*/*.zip") for path in folder.glob(depth)]
    return [folder, *found] if (folder / "run.json").is_file() else found


def _entry(path: Path, *, strict: bool = False) -> dict[str, Any]:
    """Key numbers of one run; an entry with the error if it cannot be read, unless strict."""
    from featlearn.diagnosis import diagnose

    try:
        run = open_recorded_run(path)
        verdict = diagnose(run)
        steps = run.lines[-1]["step"] if run.lines else 0
    except (FeatlearnError, OSError) as error:
        if strict:
            raise
        return {"path": str(path), "error": f"cannot be read: {error}"}
    created = run.config.get("created")
    times = {f"step of {key}": value for key, value in verdict.times.items()}
    decisive = {key: float(value) for key, value in verdict.numbers.items()}
    numbers = {**decisive, "feature_rate": verdict.feature_rate, **times}
    settings = run.config.get("settings")
    return {
        "path": str(path),
        "name": run.name,
        "created": created if isinstance(created, int | float) else None,
        "steps": steps,
        "regime": verdict.regime,
        "diverged": verdict.diverged,
        "seed": run.config.get("seed"),
        "numbers": key_numbers(run),
        "loss": loss_label(run),
        "verdict": {key: value if math.isfinite(value) else None for key, value in numbers.items()},
        "settings": settings if isinstance(settings, dict) else {},
    }


def _loss(entry: dict[str, Any]) -> str:
    value = number(entry["numbers"][entry["loss"]])
    return value if value == "-" else value + MARKS.get(entry["loss"], "")


def _date(entry: dict[str, Any]) -> str:
    try:
        return datetime.datetime.fromtimestamp(entry["created"]).strftime("%Y-%m-%d %H:%M")
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return "-"


def _origin(run: "Run") -> str:
    """Where and when a run was recorded, and with which seed."""
    seed = run.config.get("seed")
    told = "" if seed is None else f", seed {word(seed)}"
    return f"{run.path}, recorded {_date({'created': run.config.get('created')})}{told}"


def _event(event: dict[str, Any]) -> str:
    details = {key: value for key, value in event.items() if key not in ("kind", "step", "at", "last_line")}
    where = "" if event["step"] is None else f" at step {event['step']}"
    told = "; ".join(
        f"{DETAILS.get(key, word(key).replace('_', ' '))}: {_detail(value)}" for key, value in details.items()
    )
    return fill(f"{word(event['kind'])}{where}{': ' + told if told else ''}", COLUMNS - 4, subsequent_indent="    ")


def _detail(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, float) else word(value, 400)
