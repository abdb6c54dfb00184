"""The TOML file of `featlearn sweep`."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from featlearn.cli.answer import UsageError
from featlearn.cli.settings import Settings
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
"""Other names of options of `featlearn diagnose`."""


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """What the file says."""

    path: Path
    subject: str | None
    function: str | None
    seeds: list[int]
    grid: dict[str, Any] | list[dict[str, Any]]
    """name -> values, or the points one by one; fixed settings included"""
    map: dict[str, Any]


def read_sweep_file(path: Path) -> SweepFile:
    """Read and check the file; names of options become those of `Settings`."""
    if not path.is_file():
        raise FeatlearnError(f"there is no file {path}, expected a TOML file with [grid]")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML file: {error}") from error
    _check(found, ENTRIES, str(path))
    _check(found.get("map", {}), MAP, f"[map] of {path}")
    if ("grid" in found) == ("points" in found):
        raise UsageError(f"{path} has {'both' if 'grid' in found else 'neither'} [grid] and [[points]], expected one")
    if "subject" in found and "function" in found:
        raise UsageError(f"{path} has subject and function, expected one: a network to diagnose, or a function to call")
    file = SweepFile(
        path=path,
        subject=found.get("subject"),
        function=found.get("function"),
        seeds=_seeds(found, path),
        grid={},
        map=found.get("map", {}),
    )
    fixed = {setting_name(name, file): value for name, value in found.get("fixed", {}).items()}
    listed = found.get("points", [found.get("grid")])
    if not all(isinstance(one, dict) for one in listed):
        raise UsageError(f"points of {path} are no tables, expected [[points]] with settings below it")
    given = [{setting_name(name, file): value for name, value in one.items()} for one in listed]
    twice = [name for one in given for name in one if name in fixed]
    if twice:
        raise UsageError(f"{path} has {twice[0]} in [fixed] and in the grid, expected one of them")
    if "points" in found:
        grid: Any = [{**fixed, **one} for one in given]
    else:  # fixed lists are single values
        grid = {**{name: [value] for name, value in fixed.items()}, **given[0]}
    return SweepFile(**{**vars(file), "grid": grid})


def setting_name(name: str, file: SweepFile) -> str:
    """The setting of an option of `featlearn diagnose`; arguments of the user's function stay as they are."""
    if file.function is not None:
        return name
    plain = name.replace("-", "_")
    plain = ALIASES.get(plain, plain)
    known = [one.name for one in fields(Settings) if one.name != "seed"]
    if plain == "seed":
        raise UsageError(f"{file.path} has the option {name!r}, expected seeds = 3, or seeds = [101, 102] at its top")
    if plain not in known:
        options = [one.replace("_", "-") for one in known]
        raise UsageError(
            f"{file.path} has the option {name!r}, expected one of featlearn diagnose: {', '.join(options)}"
            f"{did_you_mean(name, options)}"
        )
    return plain


def _seeds(found: dict[str, Any], path: Path) -> list[int]:
    seeds = found.get("seeds", 1)
    listed = list(range(seeds)) if isinstance(seeds, int) else seeds
    whole = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in listed)
    if not listed or not whole or len(set(listed)) != len(listed):
        raise UsageError(f"seeds of {path} is {seeds}, expected how many, or a list of whole numbers, each once")
    return listed


def _check(found: dict[str, Any], known: dict[str, Any], where: str) -> None:
    for name, value in found.items():
        if name not in known:
            raise UsageError(f"{where} has {name!r}, expected {', '.join(known)}{did_you_mean(name, list(known))}")
        if not isinstance(value, known[name]) or isinstance(value, bool):
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
