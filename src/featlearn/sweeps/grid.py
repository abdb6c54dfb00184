"""The points of a grid, and the name of each: a hash of its settings."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from featlearn.errors import InputTypeError, InputValueError

Grid = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Name -> values, for all combinations; or the points one by one."""

RESERVED = ("seed", "status", "seconds", "error", "path")
"""Columns that every table of a sweep has."""
GIVEN = ("out", "resume")
"""Arguments that a function gets from the sweep where it takes them."""
DIGITS = 16


@dataclass(frozen=True)
class Point:
    """Settings, without a seed."""

    settings: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The first digits of a hash of the settings; it names the folder."""
        canonical = json.dumps(self.settings, sort_keys=True, allow_nan=False, ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:DIGITS]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items()) or "no settings"


def points_of(grid: Grid) -> list[Point]:
    """The points of a grid, each once, in order: the last name of a product varies fastest."""
    if isinstance(grid, Mapping):
        axes = {_name(name): _axis(name, values) for name, values in grid.items()}
        settings: Iterable[dict[str, Any]] = (
            dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
        )
    elif isinstance(grid, list | tuple):
        settings = [_listed(one) for one in grid]
    else:
        raise InputTypeError(
            f"grid is {type(grid).__name__}, expected a mapping of values, {{'width': [8, 64]}}, or a list of points, "
            "[{'width': 8}, {'width': 64}]"
        )
    found = {point.id: point for point in map(Point, settings)}
    if not found:
        raise InputValueError("the grid has no points, expected at least one")
    return list(found.values())


def seeds_of(seeds: int | Iterable[int]) -> list[int]:
    """A number of seeds, from 0 on, or the seeds themselves."""
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        found = list(range(seeds))
    else:
        try:
            found = [plain(seed, "a seed") for seed in seeds]  # type: ignore[union-attr]
        except TypeError as error:
            raise InputTypeError(f"seeds={seeds!r}, expected a number of seeds, or a list of them") from error
    whole = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in found)
    if not found or not whole or len(set(found)) != len(found):
        raise InputValueError(f"seeds={seeds!r}, expected at least one, whole numbers from 0, and each once")
    return found


def _axis(name: str, values: Any) -> list[Any]:
    """The values of one name; a single value is an axis of one."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable) or _is_number(values):
        return [plain(values, name)]
    found = [plain(value, name) for value in values]
    if not found:
        raise InputValueError(f"the grid has no values of {name!r}, expected at least one")
    return found


def _listed(point: Any) -> dict[str, Any]:
    if not isinstance(point, Mapping):
        raise InputTypeError(f"a point of the grid is {type(point).__name__}, expected a mapping: {{'width': 8}}")
    return {_name(name): plain(value, name) for name, value in point.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise InputTypeError(f"the grid has the name {name!r}, expected a word: an argument of the function")
    if name in RESERVED or name in GIVEN:
        hint = "; seeds= says which seeds" if name == "seed" else ""
        raise InputValueError(f"the grid has {name!r}, which the sweep itself sets, expected another name{hint}")
    return name


def plain(value: Any, name: str) -> Any:
    """A value as JSON has it: numbers of numpy and torch become Python's, tuples become lists."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if _is_number(value):
        value = value.item()
        return plain(value, name)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputValueError(f"the grid has {name}={value}, expected finite numbers")
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(one, name) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, name) for one in value]
    raise InputTypeError(
        f"the grid has {name}={value!r}, expected numbers, words, and lists or mappings of them: a point is named by "
        "them; pass str(path) for a path, and a word for an object that the function makes from it"
    )


def _is_number(value: Any) -> bool:
    """One number of numpy or torch."""
    return hasattr(value, "item") and getattr(value, "shape", None) == ()
