"""Errors in the user's code, reported in one line with file and line number."""

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import featlearn
from featlearn.errors import FeatlearnError

OTHERS = (
    str(Path(featlearn.__file__).parent) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    "<",  # frozen modules and code without a file
)
INSTALLED = ("site-packages", "dist-packages")


@contextmanager
def reporting_user_errors(place: str) -> Iterator[None]:
    """Convert errors of the function at `place`, its network, or its loss to `FeatlearnError` with the user's line.

    Errors of featlearn pass unchanged, unless the user's code caused them. `sys.exit` counts as an error, too.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, FeatlearnError) and not user_line(error):
            raise
        raise FeatlearnError(f"{place} failed: {one_line_message(error)}") from error


def one_line_message(error: BaseException) -> str:
    """Return class and first line of the message, with the user's file and line if known."""
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    summary = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{summary}{user_line(error)}; --debug shows the traceback"


def user_line(error: BaseException) -> str:
    """Return ' (file, line n)' of the last call in the user's code; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        f for f in frames if not f.filename.startswith(OTHERS) and not set(INSTALLED) & {*Path(f.filename).parts}
    ]
    return f" ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else ""
