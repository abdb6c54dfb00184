"""Where things lie in a run, which names are safe there, and how large they may be.

Names of arrays become folders. Two things are left to who names them: names that differ in case only (`Loss`, `loss`)
share a folder, and overwrite each other, where the file system does not tell case apart (macOS, Windows); and Windows
refuses a few words (`con`, `nul`) and, by default, paths over 260 characters.
"""

import functools
import operator
import re
from collections.abc import Container
from typing import Any

from featlearn.errors import InputTypeError, InputValueError

RUN, SCALARS, EVENTS, ARRAYS = "run.json", "scalars.jsonl", "events.jsonl", "arrays"

# Far above what a run holds, far below what would bring a machine down; the writer keeps to them, the reader insists.
LARGEST_TEXT, LARGEST_ARRAYS, MOST_ARRAYS = 2**28, 2**32, 10_000
LONGEST_NAME, LAST_STEP = 200, 10**12 - 1

# Letters, digits and a few signs in parts divided by /. No part is . or .. or hidden, and none begins with a sign: a
# name at the head of a column is no formula.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.+=@-]*[A-Za-z0-9_+=@-])?"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_PLACE = re.compile(rf"{ARRAYS}/({_NAME.pattern})/([0-9]{{12}})\.npz")
AXES = frozenset({"step", "seconds"})
"""Names of columns of a table beside the scalars."""
USER = "user/"
"""Prefix, in a file, of the names of numbers that the user records."""


def checked_name(name: object) -> str:
    """The name of an array, refused unless it can be a path and the head of a column everywhere."""
    if not isinstance(name, str) or len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        raise InputValueError(
            f"the name {str(name)[:LONGEST_NAME]!r} cannot be recorded, expected at most {LONGEST_NAME} letters, digits"
            " and _ . - + = @ in parts divided by /, each beginning with a letter, a digit or _"
        )
    return name


@functools.lru_cache(maxsize=MOST_ARRAYS)  # a run has the same few in each of its lines
def checked_scalar_name(name: object) -> str:
    """The name of a scalar: as that of an array, and not one of the axes."""
    if name in AXES:
        raise InputValueError(f"a scalar cannot be named {name!r}, every measurement has one; choose another name")
    return checked_name(name)


def shown_name(name: str, measured: Container[str]) -> str:
    """The name that the user wrote, unless the run measures a number of that name."""
    plain = name.removeprefix(USER)
    return name if plain in measured else plain


def checked_step(step: Any) -> int:
    """A step: a whole number from 0."""
    try:
        number = operator.index(step)
    except TypeError as error:
        raise InputTypeError(f"step is {str(step)[:40]!r}, expected a whole number") from error
    if isinstance(step, bool) or not 0 <= number <= LAST_STEP:
        raise InputValueError(f"step is {str(step)[:40]}, expected a whole number from 0 to {LAST_STEP}")
    return number


def array_path(name: str, step: int) -> str:
    """Where an array lies, relative to the run."""
    return f"{ARRAYS}/{checked_name(name)}/{checked_step(step):012d}.npz"


def named_array(place: str) -> tuple[str, int] | None:
    """The inverse of `array_path`; None for what is not the place of an array."""
    found = _PLACE.fullmatch(place) if len(place) < 2 * LONGEST_NAME else None
    if found is None or len(found[1]) > LONGEST_NAME:
        return None
    return found[1], int(found[2])
