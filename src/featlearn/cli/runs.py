"""`featlearn runs`: list, show, compare and pack recorded runs."""

import datetime
import json as jsons
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from featlearn.cli.answer import Answer, UsageError, number, table
from featlearn.cli.key_numbers import ENTROPY, NUMBERS, SQUARED, key_numbers, loss_label, trained_on
from featlearn.cli.plot import COLUMNS
from featlearn.cli.settings import option
from featlearn.errors import FeatlearnError, RunError

EQUIVALENT = {"kernel moved": "turning", "weights moved": "weights_moved", "linearisation gap": "gap"}
"""Label -> the equivalent number of a diagnosis."""
MARKS = {f"probe {ENTROPY}": " ce", "training loss": " tr"}
LEGENDS = {
    " ce": "ce: cross-entropy, others are squared errors",
    " tr": "tr: training loss, as none on the probe is known",
}
"""How `runs ls`, which has one column for all losses, marks them, and what the marks mean."""
TIMES = {
    "step of loss_half": "step of half of the loss",
    "step of alignment_90": "step of 90 % of the rise of alignment",
    "step of norm_10": "step of 10 % of the kernel norm",
}
"""Times of a diagnosis -> labels."""


def ls(folder: Path = Path("runs"), /, *, json: bool = False, debug: bool = False) -> Answer:
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
        raise RunError(f"there is no folder {folder}, expected one that holds runs")
    entries = [_entry(path) for path in _places(folder)]
    entries.sort(key=lambda entry: -(entry.get("created") or 0.0))
    rows = [
        [entry["path"], "-", "-", "cannot be read", "-", "-"] if "error" in entry else
        [entry["path"], _date(entry), str(entry["steps"]), _verdict(entry),
         _loss(entry), number(entry["numbers"]["kernel moved"])]
        for entry in entries
    ]  # fmt: skip
    head = ["run", "date", "steps", "verdict", "probe loss", "kernel moved"]
    text = table(head, rows) if rows else f"no runs in {folder}"
    legends = [legend for mark, legend in LEGENDS.items() if any(row[4].endswith(mark) for row in rows)]
    unread = [f"{entry['path']} {entry['error']}" for entry in entries if "error" in entry]
    reasons = [fill(_word(line, 400), COLUMNS, subsequent_indent="  ") for line in unread]
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
    from featlearn.record import open_run

    opened = open_run(run)
    verdict = diagnose(opened)
    happened = [f"  - {_event(event)}" for event in opened.events]
    text = "\n".join([summary(opened), "", plot(curves([opened])), "", str(verdict), "events:", *happened])
    data = {"path": run, "config": opened.config, "numbers": key_numbers(opened), "events": opened.events,
            "diagnosis": jsons.loads(verdict.to_json())}  # fmt: skip
    return Answer(data=data, text=text)


def compare(*runs: Path, json: bool = False, debug: bool = False) -> Answer:
    """Put the key numbers of several runs side by side.

    For example:

        featlearn runs compare runs/a runs/b
        featlearn runs compare runs/* --json

    Args:
        runs: Folders or .zip files.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    if len(runs) < 2:
        raise UsageError(f"{len(runs)} runs are given, expected two at least")
    entries = [_entry(path, strict=True) for path in runs]
    said = [key for key in entries[0]["verdict"] if any(entry["verdict"][key] is not None for entry in entries)]
    rows: list[list[str]] = [["verdict", *(_verdict(entry) for entry in entries)]]
    rows.append(["steps", *(str(entry["steps"]) for entry in entries)])
    rows += [[name, *(number(entry["numbers"][name]) for entry in entries)] for name in _compared(entries, said)]
    rows += [[TIMES.get(key, key.replace("_", " ")), *(number(entry["verdict"][key]) for entry in entries)]
             for key in said]  # fmt: skip
    different = sorted({key for entry in entries for key, value in entry["settings"].items()
                        if any(other["settings"].get(key) != value for other in entries)})  # fmt: skip
    ours = all(entry["options"] for entry in entries)
    rows += [[option(key) if ours else f"setting {_word(key)}", *(_word(e["settings"].get(key)) for e in entries)]
             for key in different]  # fmt: skip
    return Answer(data={"runs": entries}, text=table(["", *(entry["name"] for entry in entries)], rows))


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
    from featlearn.record import open_run

    path = open_run(run).pack(out)
    return Answer(data={"packed": path, "bytes": path.stat().st_size}, text=str(path))


def _places(folder: Path) -> list[Path]:
    found = [path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/run.json")]
    found += [path for depth in ("*.zip", "*/*.zip") for path in folder.glob(depth)]
    return [folder, *found] if (folder / "run.json").is_file() else found


def _entry(path: Path, *, strict: bool = False) -> dict[str, Any]:
    """Key numbers of one run; an entry with the error if it cannot be read, unless strict."""
    from featlearn.cli.diagnose import of_command
    from featlearn.diagnosis import diagnose
    from featlearn.record import open_run

    try:
        run = open_run(path)
        verdict = diagnose(run)
        steps = run.lines[-1]["step"] if run.lines else 0
    except (FeatlearnError, OSError) as error:
        if strict:
            raise
        return {"path": str(path), "error": f"cannot be read: {error}"}
    created = run.config.get("created")
    times = {f"step of {key}": value for key, value in verdict.times.items()}
    decisive = {key: float(one) for key, one in verdict.numbers.items()}
    numbers = {**decisive, "feature_rate": verdict.feature_rate, **times}
    settings = run.config.get("settings")
    told = any(event["kind"] == "diverged" for event in run.events)
    diverged = told or "training broke down" in verdict.headline
    return {
        "path": str(path), "name": run.name, "created": created if isinstance(created, int | float) else None,
        "steps": steps, "regime": verdict.regime, "diverged": diverged,
        "seed": run.config.get("seed"),
        "numbers": key_numbers(run), "loss": loss_label(run), "trained_on": trained_on(run),
        "verdict": {key: value if math.isfinite(value) else None for key, value in numbers.items()},
        "settings": settings if isinstance(settings, dict) else {}, "options": of_command(run),
    }  # fmt: skip


def _compared(entries: Sequence[dict[str, Any]], said: Collection[str]) -> list[str]:
    """Labels of the numbers to compare: of losses those that a run was trained on; what the verdict says is left out.

    Each row holds one quantity: a run that was trained on another loss has its value of this one, or a dash.
    """
    kinds = {kind for entry in entries for kind in entry["trained_on"]}
    unknown = any(entry["loss"] == "training loss" for entry in entries)

    def shown(label: str) -> bool:
        kind = next((kind for kind in (SQUARED, ENTROPY) if label.endswith(kind)), None)
        wanted = unknown if label == "training loss" else kind is None or kind in kinds
        known = any(not math.isnan(entry["numbers"][label]) for entry in entries)
        return wanted and known and EQUIVALENT.get(label) not in said

    return [label for label in NUMBERS if shown(label)]


def _loss(entry: dict[str, Any]) -> str:
    value = number(entry["numbers"][entry["loss"]])
    return value if value == "-" else value + MARKS.get(entry["loss"], "")


def _date(entry: dict[str, Any]) -> str:
    try:
        return datetime.datetime.fromtimestamp(entry["created"]).strftime("%Y-%m-%d %H:%M")
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return "-"


def _verdict(entry: dict[str, Any]) -> str:
    return f"{entry['regime']}, diverged" if entry["diverged"] else str(entry["regime"])


def _event(event: dict[str, Any]) -> str:
    details = {key: value for key, value in event.items() if key not in ("kind", "step", "at")}
    where = "" if event["step"] is None else f" at step {event['step']}"
    return f"{_word(event['kind'])}{where}{': ' + jsons.dumps(details) if details else ''}"


def _word(value: Any, longest: int = 60) -> str:
    """Text of an untrusted run file, without control characters."""
    text = "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:longest]
