"""Points of a grid, identified by a hash of their settings."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from featlearn.errors import InputTypeError, InputValueError

Grid = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Name -> values, for all combinations; or a list of points."""

RESERVED = ("seed", "status", "seconds", "error", "path")
"""Columns that every table of a sweep has."""
GIVEN = ("out", "resume")
"""Arguments that the sweep passes if the function takes them."""
DIGITS = 16


@dataclass(frozen=True)
class Point:
    """Settings, without a seed."""

    settings: Mapping[str, Any]

    @property
    def id(self) -> str:
        """First digits of a hash of the settings; the name of the folder."""
        canonical = json.dumps(self.settings, sort_keys=True, allow_nan=False, ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:DIGITS]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items()) or "no settings"


def points_of(grid: Grid) -> list[Point]:
    """Return the distinct points of a grid, in order. The last name of a product varies fastest."""
    if isinstance(grid, Mapping):
        axes = {_name(name): _axis(name, values) for name, values in grid.items()}
        settings: Iterable[dict[str, Any]] = (
            dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
        )
    elif isinstance(grid, list | tuple):
        settings = [_listed(point) for point in grid]
    else:
        raise InputTypeError(
            f"grid is {type(grid).__name__}, expected a mapping of values, {{'width': [8, 64]}}, or a list of points, "
            "[{'width': 8}, {'width': 64}]"
        )
    points = {point.id: point for point in map(Point, settings)}
    if not points:
        raise InputValueError("the grid has no points, expected at least one")
    return list(points.values())


def seeds_of(seeds: int | Iterable[int]) -> list[int]:
    """Return seeds 0, 1, ... for a number of seeds, or the listed seeds."""
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        values = list(range(seeds))
    else:
        try:
            values = [plain(seed, "a seed") for seed in seeds]  # type: ignore[union-attr]
        except TypeError as error:
            raise InputTypeError(f"seeds={seeds!r}, expected a number of seeds, or a list of them") from error
    valid = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in values)
    if not values or not valid or len(set(values)) != len(values):
        raise InputValueError(f"seeds={seeds!r}, expected at least one seed, and distinct whole numbers >= 0")
    return values


def _axis(name: str, values: Any) -> list[Any]:
    """Return the values of a setting; a single value becomes a list."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable) or _is_number(values):
        return [plain(values, name)]
    plain_values = [plain(value, name) for value in values]
    if not plain_values:
        raise InputValueError(f"the grid has no values of {name!r}, expected at least one")
    return plain_values


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
    """Convert a value to JSON types: numpy and torch numbers to Python numbers, tuples to lists."""
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
        return {str(key): plain(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, name) for item in value]
    raise InputTypeError(
        f"the grid has {name}={value!r}, expected numbers, words, and lists or mappings of them; "
        "pass str(path) for a path, and a word from which the function creates an object"
    )


def _is_number(value: Any) -> bool:
    """Return whether a value is a numpy or torch number."""
    return hasattr(value, "item") and getattr(value, "shape", None) == ()
