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
    """Return tables of at most 100 characters per line, with a row per quantity and a column per run."""
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
    " tr": "tr: training loss, because there is no probe loss",
}
"""Marks of losses other than squared errors in the loss column of `runs ls`, and their legends."""
DETAILS = {
    "measuring": "seconds of measuring",
    "overhead": "measuring between first and last, times training",
    "wall_share": "share of the wall time",
}
"""Details of events -> labels."""


def ls(folder: Path = FOLDER, /, *, json: bool = False, debug: bool = False) -> Answer:
    """List runs in a folder, latest first: folders and .zip files, up to two levels deep.

    For example:

        featlearn runs ls
        featlearn runs ls results --json

    Args:
        folder: Folder to search.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder, expected a folder of runs: featlearn runs ls FOLDER")
    entries = [_entry(path) for path in _run_paths(folder)]
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
    if any(row[4].endswith(mark) for mark in LEGENDS for row in rows):  # align digits
        rows = [[*row[:4], row[4] if row[4].endswith((*LEGENDS,)) else f"{row[4]}   ", row[5]] for row in rows]
    head = ["run", "date", "steps", "verdict", "probe loss", "kernel moved"]
    text = table(head, rows) if rows else f"no runs in {folder}, up to two levels deep"
    legends = [legend for mark, legend in LEGENDS.items() if any(row[4].endswith(mark) for row in rows)]
    legends = [f"{'; '.join(legends)}; others are squared errors"] if legends else []
    unread = [f"{entry['path']} {entry['error']}" for entry in entries if "error" in entry]
    reasons = [fill(word(line, 400), COLUMNS, subsequent_indent="  ") for line in unread]
    return Answer(data={"runs": entries}, text="\n".join([text, *legends, *reasons]))


def show(run: Path, /, *, json: bool = False, debug: bool = False) -> Answer:
    """Show everything about a run.

    For example:

        featlearn runs show runs/a
        featlearn runs show a.zip --json

    Args:
        run: Folder or .zip file.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    from featlearn.cli.diagnose import curves, summary
    from featlearn.cli.plot import plot
    from featlearn.diagnosis import diagnose

    open_run = open_recorded_run(run)
    verdict = diagnose(open_run)
    events = [f"  - {_event(event)}" for event in open_run.events]
    parts = [summary(open_run), _origin(open_run), "", plot(curves([open_run])), "", verdict.full, "events:", *events]
    data = {
        "path": run,
        "config": open_run.config,
        "numbers": key_numbers(open_run),
        "events": open_run.events,
        "diagnosis": jsons.loads(verdict.to_json()),
    }
    return Answer(data=data, text="\n".join(parts))


def compare(*runs: Path, json: bool = False, debug: bool = False) -> Answer:
    """Compare key numbers of several runs side by side.

    For example:

        featlearn runs compare runs/a runs/b
        featlearn runs compare runs/* --json

    Args:
        runs: Folders or .zip files; a folder of seeds means all its runs.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    paths = [path for run in runs for path in recorded_runs(run) or [run]]
    if len(paths) < 2:
        raise UsageError(
            f"{len(paths)} runs are passed, expected at least two; featlearn runs show RUN shows a single run"
        )
    entries = [_entry(path, strict=True) for path in paths]
    return Answer(data={"runs": entries}, text=comparison(paths, [_loss(entry) for entry in entries]))


def pack(run: Path, /, *, out: Path | None = None, json: bool = False, debug: bool = False) -> Answer:
    """Pack a run into a .zip file, which all commands accept in place of the folder.

    For example:

        featlearn runs pack runs/a
        featlearn runs pack runs/a --out a.zip

    Args:
        run: Folder of the run.
        out: Path of the file; by default the folder's name with .zip.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    path = open_recorded_run(run).pack(out)
    return Answer(data={"packed": path, "bytes": path.stat().st_size}, text=str(path))


def _run_paths(folder: Path) -> list[Path]:
    paths = [path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/run.json")]
    paths += [path for depth in ("*.zip", "*/*.zip") for path in folder.glob(depth)]
    return [folder, *paths] if (folder / "run.json").is_file() else paths


def _entry(path: Path, *, strict: bool = False) -> dict[str, Any]:
    """Return key numbers of a run. Unless strict, return an entry with the error if the run cannot be read."""
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
    numbers = {**decisive, **times}
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
    """Describe where, when, and with which seed a run was recorded."""
    seed = run.config.get("seed")
    seed_text = "" if seed is None else f", seed {word(seed)}"
    return f"{run.path}, recorded {_date({'created': run.config.get('created')})}{seed_text}"


def _event(event: dict[str, Any]) -> str:
    details = {key: value for key, value in event.items() if key not in ("kind", "step", "at", "last_line")}
    step = "" if event["step"] is None else f" at step {event['step']}"
    text = "; ".join(
        f"{DETAILS.get(key, word(key).replace('_', ' '))}: {_detail(value)}" for key, value in details.items()
    )
    return fill(f"{word(event['kind'])}{step}{': ' + text if text else ''}", COLUMNS - 4, subsequent_indent="    ")


def _detail(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, float) else word(value, 400)
