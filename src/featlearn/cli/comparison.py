"""The table of `featlearn runs compare`: settings that differ, verdicts, key numbers."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from featlearn.cli.answer import number, table
from featlearn.cli.key_numbers import BINARY, ENTROPY, NUMBERS, SQUARED
from featlearn.cli.plot import COLUMNS
from featlearn.cli.settings import option

EQUIVALENT = {"kernel moved": "turning", "weights moved": "weights_moved", "linearization gap": "gap"}
"""Label -> the equivalent number of a diagnosis."""
LABELS = {
    "gap": "linearization gap",
    "departure": "departure from the first kernel",
    "turning": "kernel moved",
    "turning_raw": "kernel moved, not centered",
    "growth": "kernel norm, times the first",
    "speedup": "first kernel slower, times",
    "speedup_rescaled": "first kernel at its later size, times",
    "alignment_rise": "centered alignment rose by",
    "loss_left": "lowest loss, share of the first",
    "feature_rate": "effective feature rate",
    "step of loss_half": "step of half of the loss",
    "step of alignment_90": "step of 90 % of the rise of alignment",
    "step of norm_10": "step of 10 % of the kernel norm",
    "step of kernel_settled": "step from which the kernel is settled",
    "step of rich_from": "step from which training was rich",
}
"""Numbers and times of a diagnosis -> labels."""
SHOWN_ELSEWHERE = ("steps",)
"""Settings that have a row of their own."""


def comparison(entries: Sequence[dict[str, Any]]) -> str:
    """One column to a run, as many beside each other as fit into 100 columns; each row holds one quantity."""
    rows = [*_settings(entries), ["verdict", *map(verdict, entries)], ["steps", *(str(e["steps"]) for e in entries)]]
    said = [key for key in entries[0]["verdict"] if any(e["verdict"].get(key) is not None for e in entries)]
    rows += [[name, *(number(e["numbers"][name]) for e in entries)] for name in _compared(entries, said)]
    rows += [
        [LABELS.get(key, key.replace("_", " ")), *(number(e["verdict"].get(key)) for e in entries)] for key in said
    ]
    whole = [["", *_names(entries)], *rows]
    parts = [[[row[0], *row[begin:end]] for row in whole] for begin, end in _spans(whole)]
    return "\n\n".join(table(head, body) for head, *body in parts)


def _names(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the runs, or their paths where several have one name: seed-0 of two experiments, say."""
    names = [entry["name"] for entry in entries]
    return [word(e["path"] if names.count(e["name"]) > 1 else e["name"], COLUMNS // 3) for e in entries]


def _spans(rows: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """(first, end) of the columns that fit beside the labels; always at least one."""
    label, *widths = (2 + max(len(row[i]) for row in rows) for i in range(len(rows[0])))
    spans, begin = [], 1
    while begin <= len(widths):
        end = begin + 1
        while end <= len(widths) and label - 2 + sum(widths[begin - 1 : end]) <= COLUMNS:
            end += 1
        spans.append((begin, end))
        begin = end
    return spans


def _settings(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each setting that differs, the seed included."""
    entries = [{**entry, "settings": {"seed": entry["seed"], **entry["settings"]}} for entry in entries]
    different = sorted(
        {
            key
            for entry in entries
            for key, value in entry["settings"].items()
            if any(other["settings"].get(key) != value for other in entries)
        }
    )
    ours = all(entry["options"] for entry in entries)
    labels = {key: option(key) if ours else f"setting {word(key)}" for key in different}
    labels |= {"subject": "function"} if ours else {}
    return [
        [labels[key], *(word(entry["settings"].get(key)) for entry in entries)]
        for key in different
        if not (ours and key in SHOWN_ELSEWHERE)
    ]


def _compared(entries: Sequence[dict[str, Any]], said: Collection[str]) -> list[str]:
    """Labels of the numbers to compare: of losses those that a run was trained on; what the verdict says is left out.

    A run that was trained on another loss has its value of this one, or a dash.
    """
    kinds = {kind for entry in entries for kind in entry["trained_on"]}
    unknown = any(entry["loss"] == "training loss" for entry in entries)

    def shown(label: str) -> bool:
        kind = next((kind for kind in (SQUARED, ENTROPY, BINARY) if label.partition(" ")[2] == kind), None)
        wanted = unknown if label == "training loss" else kind is None or kind in kinds
        known = any(not math.isnan(entry["numbers"][label]) for entry in entries)
        return wanted and known and EQUIVALENT.get(label) not in said

    return [label for label in NUMBERS if shown(label)]


def verdict(entry: dict[str, Any]) -> str:
    """The regime of a run, and whether it diverged."""
    return f"{entry['regime']}, diverged" if entry["diverged"] else str(entry["regime"])


def word(value: Any, longest: int = 60) -> str:
    """Text of an untrusted run file, without control characters."""
    text = "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:longest]
