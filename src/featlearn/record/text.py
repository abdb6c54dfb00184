"""Entries of a run as JSON: nan and infinity as Python writes them (`NaN`, `Infinity`), everything else standard."""

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

from featlearn.errors import InputValueError, RunError


def json_of(entry: Mapping[str, Any]) -> bytes:
    """One line. numpy numbers and arrays become numbers and lists; what JSON has no word for, its `str`."""
    try:
        return json.dumps(entry, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputValueError(f"an entry with {str(list(entry))[:80]} cannot be recorded as JSON: {error}") from error


def object_in(content: bytes, where: object) -> dict[str, Any]:
    """A JSON object; of a key given twice the last counts."""
    try:
        found = json.loads(str(content, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where} is damaged: {str(error)[:120]}") from error
    if not isinstance(found, dict):
        raise RunError(f"{where} holds {type(found).__name__}, expected an object")
    return found


def objects_in(content: bytes, where: object) -> Iterator[dict[str, Any]]:
    """One object for each line; a last line without its end was being written when the process stopped."""
    for number, line in enumerate(io.BytesIO(content), 1):
        if line.endswith(b"\n"):
            yield object_in(line, f"{where}, line {number}")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
