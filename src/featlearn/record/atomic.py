"""Atomic file writes: a killed process leaves the old file or the new file."""

import os
from contextlib import suppress
from pathlib import Path

PART = ".part"
"""Suffix of the names of incomplete files."""


def put(target: Path, content: bytes, *, synchronize: bool = False) -> None:
    """Write or replace a file atomically; `synchronize` flushes it to disk, so that it survives a power loss."""
    part = target.with_name(target.name + PART)
    try:
        with part.open("wb") as file:
            file.write(content)
            if synchronize:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
