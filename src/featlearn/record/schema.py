"""Which layout a run has, and how an older one is read."""

from collections.abc import Callable

from featlearn.errors import RunError
from featlearn.record.files import Files
from featlearn.record.layout import LARGEST_TEXT, RUN
from featlearn.record.text import object_in

SCHEMA = 1
"""Counts the changes of the layout that an older reader would misread."""

UPGRADES: dict[int, Callable[[Files], Files]] = {}
"""Schema n -> what makes the files of such a run read as those of schema n + 1: one for each before `SCHEMA`."""


def schema_of(files: Files, where: object) -> int:
    """The schema that a run was written with, if it can be read."""
    content = files.read(RUN, LARGEST_TEXT)
    if content is None:
        raise RunError(f"{where} holds no {RUN}, expected the directory of a run, or a .zip with {RUN} at its top")
    schema = object_in(content, f"{where}/{RUN}").get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise RunError(f"{where} has schema {str(schema)[:40]!r}, expected a whole number from 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise RunError(f"{where} has schema {schema}, this version of featlearn reads up to {SCHEMA}; update it")
    return schema


def upgraded(files: Files, schema: int) -> Files:
    """The files of a run of an older schema, as the present one has them."""
    for older in range(schema, SCHEMA):
        files = UPGRADES[older](files)
    return files
