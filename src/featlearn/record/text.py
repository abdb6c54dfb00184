"""JSON entries of a run: standard except for nan and infinity, written as `NaN` and `Infinity`."""

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

from featlearn.errors import InputValueError, RunError


def json_of(entry: Mapping[str, Any]) -> bytes:
    """Encode a line of JSON. numpy numbers and arrays become numbers and lists; other objects become their `str`."""
    try:
        return json.dumps(entry, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputValueError(f"an entry with {str(list(entry))[:80]} cannot be recorded as JSON: {error}") from error


def object_in(content: bytes, where: object) -> dict[str, Any]:
    """Parse a JSON object; for repeated keys, the last value counts."""
    try:
        value = json.loads(str(content, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where} is damaged: {str(error)[:120]}") from error
    if not isinstance(value, dict):
        raise RunError(f"{where} holds {type(value).__name__}, expected an object")
    return value


def objects_in(content: bytes, where: object) -> Iterator[dict[str, Any]]:
    """Yield an object per line; skip a last line without newline, which was interrupted."""
    for number, line in enumerate(io.BytesIO(content), 1):
        if line.endswith(b"\n"):
            yield object_in(line, f"{where}, line {number}")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
