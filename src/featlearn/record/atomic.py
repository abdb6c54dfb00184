"""Files that are there whole or not at all, whenever the process that writes them is killed."""

import os
from contextlib import suppress
from pathlib import Path

PART = ".part"
"""Ends the name of a file that is not whole yet."""


def put(target: Path, content: bytes, *, synchronize: bool = False) -> None:
    """Write a file, or replace it; `synchronize` puts it on disk, so that it survives a loss of power."""
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
