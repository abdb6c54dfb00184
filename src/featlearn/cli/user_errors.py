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
    """Turn errors of the function at `place`, its network or its loss, into a `FeatlearnError` with the user's line.

    Our own errors pass unchanged, unless the user's code caused them. `sys.exit` counts as an error, too: the exit
    status is ours.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, FeatlearnError) and not user_line(error):
            raise
        raise FeatlearnError(f"{place} failed: {one_line_message(error)}") from error


def one_line_message(error: BaseException) -> str:
    """Class and first line of the message, with the user's file and line if there is one."""
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{said}{user_line(error)}; --debug shows all of it"


def user_line(error: BaseException) -> str:
    """' (file, line n)' of the last call in code that is neither ours nor installed; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(OTHERS) and not set(INSTALLED) & {*Path(f.filename).parts}]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
