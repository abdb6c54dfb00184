"""The TOML file of `featlearn sweep`."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from featlearn.cli.answer import UsageError
from featlearn.cli.settings import TrainingSettings
from featlearn.errors import FeatlearnError, did_you_mean

ENTRIES = {
    "subject": str,
    "function": str,
    "seeds": (int, list),
    "fixed": dict,
    "grid": dict,
    "points": list,
    "map": dict,
}
MAP = {"x": str, "y": str, "value": str, "where": dict, "boundary": str}
ALIASES = {"depth": "hidden_layers", "learning_rate": "lr", "batch_size": "batch"}
"""Alternative names of options of `featlearn diagnose`."""


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """Content of the file."""

    path: Path
    subject: str | None
    function: str | None
    seeds: list[int]
    grid: dict[str, Any] | list[dict[str, Any]]
    """name -> values, or a list of points; includes fixed settings"""
    map: dict[str, Any]


def read_sweep_file(path: Path) -> SweepFile:
    """Read and check the file, and convert option names to those of `TrainingSettings`."""
    if not path.is_file():
        raise FeatlearnError(f"{path} does not exist, expected a TOML file with [grid]")
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a TOML file: {error}") from error
    _check(entries, ENTRIES, str(path))
    _check(entries.get("map", {}), MAP, f"[map] of {path}")
    if ("grid" in entries) == ("points" in entries):
        raise UsageError(
            f"{path} has {'both' if 'grid' in entries else 'neither'} [grid] and [[points]], expected exactly one of "
            "them"
        )
    if "subject" in entries and "function" in entries:
        raise UsageError(
            f"{path} has subject and function, expected either a network to diagnose or a function to call"
        )
    file = SweepFile(
        path=path,
        subject=entries.get("subject"),
        function=entries.get("function"),
        seeds=_seeds(entries, path),
        grid={},
        map=entries.get("map", {}),
    )
    fixed = {setting_name(name, file): value for name, value in entries.get("fixed", {}).items()}
    listed = entries.get("points", [entries.get("grid")])
    if not all(isinstance(point, dict) for point in listed):
        raise UsageError(f"points of {path} are not tables, expected [[points]] with settings below")
    points = [{setting_name(name, file): value for name, value in point.items()} for point in listed]
    repeated = [name for point in points for name in point if name in fixed]
    if repeated:
        raise UsageError(f"{path} has {repeated[0]} in [fixed] and in the grid, expected only one of them")
    if "points" in entries:
        grid: Any = [{**fixed, **point} for point in points]
    else:  # fixed lists are single values
        grid = {**{name: [value] for name, value in fixed.items()}, **points[0]}
    return SweepFile(**{**vars(file), "grid": grid})


def setting_name(name: str, file: SweepFile) -> str:
    """Return the setting of an option of `featlearn diagnose`; arguments of a user's function are not renamed."""
    if file.function is not None:
        return name
    setting = name.replace("-", "_")
    setting = ALIASES.get(setting, setting)
    names = [field.name for field in fields(TrainingSettings) if field.name != "seed"]
    if setting == "seed":
        raise UsageError(f"{file.path} has the option {name!r}, expected seeds = 3, or seeds = [101, 102] at its top")
    if setting not in names:
        options = [field.replace("_", "-") for field in names]
        raise UsageError(
            f"{file.path} has the option {name!r}, expected one of featlearn diagnose: {', '.join(options)}"
            f"{did_you_mean(name, options)}"
        )
    return setting


def _seeds(entries: dict[str, Any], path: Path) -> list[int]:
    seeds = entries.get("seeds", 1)
    seed_list = list(range(seeds)) if isinstance(seeds, int) else seeds
    valid = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in seed_list)
    if not seed_list or not valid or len(set(seed_list)) != len(seed_list):
        raise UsageError(f"seeds of {path} is {seeds}, expected a count, or a list of distinct whole numbers")
    return seed_list


def _check(entries: dict[str, Any], types: dict[str, Any], where: str) -> None:
    for name, value in entries.items():
        if name not in types:
            raise UsageError(f"{where} has {name!r}, expected {', '.join(types)}{did_you_mean(name, list(types))}")
        if not isinstance(value, types[name]) or isinstance(value, bool):
            raise UsageError(f"{name} of {where} is {value!r}, expected {_KINDS[name]}")


_KINDS = {
    "subject": '"FILE.py:setup"',
    "function": '"FILE.py:function"',
    "seeds": "a number, or a list",
    "fixed": "a table",
    "grid": "a table of lists",
    "points": "tables [[points]]",
    "map": "a table",
    "x": "a setting",
    "y": "a setting",
    "value": "a column",
    "where": "a table of settings",
    "boundary": '"FILE.py:function"',
}
