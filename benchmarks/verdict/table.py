"""What a table of runs shows: what was said of each construction, and how its numbers are spread."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

Line = dict[str, Any]

VERDICTS = ("lazy", "mixed", "rich", "lazy then rich", "cannot tell")
NUMBERS = {
    "gap, probe": "reference_gap_probe",
    "gap, test": "reference_gap_test",
    "gap, unshrunk": "reference_gap_unshrunk",
    "turning": "reference_turning",
    "growth": "reference_growth",
    "loss left": "loss_left_centered",
}
NAME = 50


def rows(table: Path) -> list[Line]:
    """The lines of a table; none where there is no such file."""
    return [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []


def show(lines: list[Line]) -> None:
    """Print the confusion table by construction and by regime, and the spread of the references."""
    for line in lines:
        if "failed" in line:
            print("failed:", line["construction"], line["variant"], line["seed"], line["failed"])
    done = [line for line in lines if "failed" not in line]
    print(f"{len(done)} runs, {sum(line['seconds'] for line in done):.0f} s; the longest {_longest(done)}")
    if done:
        _show_confusion(done)
        _show_spread(done)
        _show_opinions(done)


def _longest(lines: list[Line]) -> str:
    line = max(lines, key=lambda one: one["seconds"], default=None)
    return f"{line['seconds']} s, {line['construction']}" if line else "none"


def _groups(lines: list[Line]) -> dict[str, list[Line]]:
    """By construction, those of one regime together."""
    found: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda one: one["regime_by_theory"]):
        found.setdefault(line["construction"], []).append(line)
    return found


def _show_confusion(lines: list[Line]) -> None:
    verdicts = "".join(f"{verdict:<16}" for verdict in VERDICTS).rstrip()
    print(f"\n{'construction':{NAME}}{'by theory':16}{verdicts}")
    for name, some in _groups(lines).items():
        print(f"{name:{NAME}}{some[0]['regime_by_theory']:16}{_counted(some)}")
    for regime in sorted({line["regime_by_theory"] for line in lines}):
        some = [line for line in lines if line["regime_by_theory"] == regime]
        print(f"{'all':{NAME}}{regime:16}{_counted(some)}")


def _counted(lines: list[Line]) -> str:
    counted = Counter(line["regime"] for line in lines)
    others = {v: n for v, n in counted.items() if v not in VERDICTS}
    return "".join(f"{counted[v] or '-'!s:<16}" for v in VERDICTS).rstrip() + (f" {others}" if others else "")


def _show_opinions(lines: list[Line]) -> None:
    """What other metrics say of the same runs."""
    names = list(dict.fromkeys(name for line in lines for name in line.get("opinions", {})))
    if not names:
        return
    print(f"\n{'second opinion':{NAME}}{'by theory':16}{'lazy':<16}{'between':<16}rich")
    for name in names:
        for regime in sorted({line["regime_by_theory"] for line in lines}):
            said = Counter(
                line["opinions"][name][1]
                for line in lines
                if line["regime_by_theory"] == regime and name in line.get("opinions", {})
            )
            cells = "".join(f"{said[word] or '-'!s:<16}" for word in ("lazy", "between", "rich")).rstrip()
            print(f"{name:{NAME}}{regime:16}{cells}")


def _show_spread(lines: list[Line]) -> None:
    print("\n" + f"{'lowest to highest':{NAME}}{'by theory':16}" + "".join(f"{name:<20}" for name in NUMBERS).rstrip())
    for name, some in _groups(lines).items():
        print(f"{name:{NAME}}{some[0]['regime_by_theory']:16}{_ranges(some)}")
    for regime in sorted({line["regime_by_theory"] for line in lines}):
        print(f"{'all':{NAME}}{regime:16}{_ranges([one for one in lines if one['regime_by_theory'] == regime])}")


def _ranges(lines: list[Line]) -> str:
    cells = []
    for key in NUMBERS.values():
        values = sorted(line[key] for line in lines if line[key] is not None and math.isfinite(line[key]))
        cells.append(f"{_short(values[0])} to {_short(values[-1])}" if values else "-")
    return "".join(f"{cell:<20}" for cell in cells).rstrip()


def _short(value: float) -> str:
    """Two digits; what is rounding is zero."""
    return f"{value:.2g}" if abs(value) > 1e-9 else "0"
