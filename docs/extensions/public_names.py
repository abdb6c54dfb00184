"""Every public name of featlearn: what `dir(featlearn)` lists, and what its public modules list in `__all__`."""

import importlib
import inspect
import types
import typing

import featlearn

# modules that users import by name: what `fl.sweep`, `fl.report`, ... return or take
IMPORTED = ("record", "reporting", "sweeps", "widths")
RULES = ("ops.",)


def public_names() -> dict[str, object]:
    """By name as users write it after `fl.`, modules excluded; a name that is also in a module is listed once."""
    found: dict[str, object] = {}
    for name in dir(featlearn):
        if not name.startswith("_"):
            _collect(name, getattr(featlearn, name), found)
    for name in IMPORTED:
        _collect(name, importlib.import_module(f"featlearn.{name}"), found)
    top = {id(value) for name, value in found.items() if "." not in name}
    return {name: value for name, value in found.items() if "." not in name or id(value) not in top}


def _collect(name: str, value: object, found: dict[str, object]) -> None:
    if not isinstance(value, types.ModuleType):
        found[name] = value
    elif not name.startswith(RULES):
        module = importlib.import_module(f"featlearn.{name}")
        for part in module.__all__:
            _collect(f"{name}.{part}", getattr(module, part), found)


def returned_by(function: object) -> set[object]:
    """The classes that a function says it returns."""
    if not inspect.isroutine(function):
        return set()
    return _classes(typing.get_type_hints(function).get("return"))


def _classes(hint: object) -> set[object]:
    parts = set().union(*(_classes(part) for part in typing.get_args(hint)))
    return parts | {hint} if inspect.isclass(hint) else parts
