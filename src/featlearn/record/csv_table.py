"""Tables as CSV files."""

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from featlearn.errors import RunError
from featlearn.record.atomic import put


def write_csv(path: str | os.PathLike[str], head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a table atomically and return its path. None becomes an empty cell, a list or mapping its JSON.

    Text that a spreadsheet would interpret as a formula is quoted.
    """
    target, table = Path(path), io.StringIO(newline="")
    csv.writer(table).writerows([_cell(value) for value in row] for row in (head, *rows))
    try:
        put(target, table.getvalue().encode())
    except OSError as error:
        raise RunError(f"the table cannot be written to {target}: {error}") from error
    return target


def _cell(value: Any) -> Any:
    if isinstance(value, list | dict):
        return json.dumps(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
