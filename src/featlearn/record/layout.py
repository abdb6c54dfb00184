"""Paths, safe names, and size limits of a run.

Names of arrays become folders. On case-insensitive file systems (macOS, Windows), names that differ only in case
(`Loss`, `loss`) overwrite each other. Windows also rejects some words (`con`, `nul`) and, by default, paths over 260
characters.
"""

import functools
import operator
import re
from collections.abc import Container
from typing import Any

from featlearn.errors import InputTypeError, InputValueError

SCHEMA = 1
"""Version of the layout, increased by changes that older readers would misread."""
RUN, SCALARS, EVENTS, ARRAYS = "run.json", "scalars.jsonl", "events.jsonl", "arrays"

# Limits far above usual runs, and far below the memory of a machine. Writer and reader enforce them.
LARGEST_TEXT, LARGEST_ARRAYS, MOST_ARRAYS = 2**28, 2**32, 10_000
LONGEST_NAME, LAST_STEP = 200, 10**12 - 1

# Letters, digits, and a few signs, in parts separated by /. No part is . or .. or hidden. No part begins with a sign,
# which spreadsheets would interpret as a formula.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.+=@-]*[A-Za-z0-9_+=@-])?"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_PLACE = re.compile(rf"{ARRAYS}/({_NAME.pattern})/([0-9]{{12}})\.npz")
AXES = frozenset({"step", "seconds"})
"""Names of table columns other than scalars."""
USER = "user/"
"""Prefix, in a file, of the names of numbers that the user records."""


def checked_name(name: object) -> str:
    """Check that a name is safe as a path and as a column header."""
    if not isinstance(name, str) or len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        raise InputValueError(
            f"the name {str(name)[:LONGEST_NAME]!r} cannot be recorded, expected at most {LONGEST_NAME} letters, digits"
            " and _ . - + = @ in parts separated by /, each beginning with a letter, a digit or _"
        )
    return name


@functools.lru_cache(maxsize=MOST_ARRAYS)  # lines of a run repeat the same few names
def checked_scalar_name(name: object) -> str:
    """Check the name of a scalar, which must not be the name of an axis."""
    if name in AXES:
        raise InputValueError(f"a scalar cannot be named {name!r}, which is reserved; choose another name")
    return checked_name(name)


def shown_name(name: str, measured: Container[str]) -> str:
    """Return the name without the user prefix, unless the run measures a number of that name."""
    plain = name.removeprefix(USER)
    return name if plain in measured else plain


def checked_step(step: Any) -> int:
    """Check that a step is a whole number >= 0."""
    try:
        number = operator.index(step)
    except TypeError as error:
        raise InputTypeError(f"step is {str(step)[:40]!r}, expected a whole number") from error
    if isinstance(step, bool) or not 0 <= number <= LAST_STEP:
        raise InputValueError(f"step is {str(step)[:40]}, expected a whole number from 0 to {LAST_STEP}")
    return number


def array_path(name: str, step: int) -> str:
    """Return the path of an array, relative to the run."""
    return f"{ARRAYS}/{checked_name(name)}/{checked_step(step):012d}.npz"


def named_array(place: str) -> tuple[str, int] | None:
    """Return name and step from the path of an array; None for other paths."""
    match = _PLACE.fullmatch(place) if len(place) < 2 * LONGEST_NAME else None
    if match is None or len(match[1]) > LONGEST_NAME:
        return None
    return match[1], int(match[2])
