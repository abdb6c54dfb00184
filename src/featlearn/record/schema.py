"""Schema of a run, and upgrades of older schemas."""

from collections.abc import Callable

from featlearn.errors import RunError
from featlearn.record.files import Files
from featlearn.record.layout import LARGEST_TEXT, RUN
from featlearn.record.text import object_in

SCHEMA = 1
"""Version of the layout, increased by changes that older readers would misread."""

UPGRADES: dict[int, Callable[[Files], Files]] = {}
"""Schema n -> function that presents files of schema n as files of schema n + 1, for every n below `SCHEMA`."""


def schema_of(files: Files, where: object) -> int:
    """Return the schema with which a run was written; raise if it is not supported."""
    content = files.read(RUN, LARGEST_TEXT)
    if content is None:
        raise RunError(f"{where} has no {RUN}, expected the directory of a run, or a .zip with {RUN} at its top")
    schema = object_in(content, f"{where}/{RUN}").get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise RunError(f"{where} has schema {str(schema)[:40]!r}, expected a whole number from 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise RunError(f"{where} has schema {schema}, this version of featlearn reads up to {SCHEMA}; update it")
    return schema


def upgraded(files: Files, schema: int) -> Files:
    """Present files of an older schema as files of the current schema."""
    for older in range(schema, SCHEMA):
        files = UPGRADES[older](files)
    return files
