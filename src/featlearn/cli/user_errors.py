"""Errors of the user's own code, told in one line that says where they come from."""

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
    "<",  # frozen modules, and what was never a file
)
INSTALLED = ("site-packages", "dist-packages")


@contextmanager
def reporting_user_errors(place: str) -> Iterator[None]:
    """What fails inside, in the function at `place`, its network or its loss, is a `FeatlearnError` with the line.

    Our own errors pass as they are, unless the user's code brought them about. A `sys.exit` is a failure as well: the
    exit status is ours.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, FeatlearnError) and not user_line(error):
            raise
        raise FeatlearnError(f"{place} failed: {one_line_message(error)}") from error


def one_line_message(error: BaseException) -> str:
    """Kind, first line of the message, and the user's line where there is one."""
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{said}{user_line(error)}; --debug shows all of it"


def user_line(error: BaseException) -> str:
    """' (file, line n)' of the last call in code that is neither ours nor installed; nothing if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(OTHERS) and not set(INSTALLED) & {*Path(f.filename).parts}]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
