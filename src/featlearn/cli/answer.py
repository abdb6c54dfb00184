"""The result of a command: data for programs, text for people."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from featlearn.errors import InputValueError

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The outcome of a command."""

    data: Any
    """what --json prints"""
    text: str
    """what is printed otherwise"""
    code: int = DONE
    """exit status"""


class UsageError(InputValueError):
    """Conflicting options, or an unknown word: exit status 2."""


def document(data: Any) -> str:
    """Format data as a JSON document; nan and infinity become null, as in `Diagnosis.to_json`."""
    return json.dumps(_plain(data), indent=1, allow_nan=False, ensure_ascii=False)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a text table, with the first column left-aligned and the others right-aligned."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]

    def padded(line: Sequence[str]) -> str:
        first, *others = zip(line, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return "  ".join(cells).rstrip()

    return "\n".join(padded(line) for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    """Format a rounded number, or a dash for None and nan."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}g}"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value
