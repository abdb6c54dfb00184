"""The public functions and classes, collected, so that a new one is tested without being listed."""

import inspect
from collections.abc import Iterator
from typing import Any

import featlearn as fl

MODULES = ("quantities", "dynamics", "steer", "metrics", "readouts", "losses")


def public() -> dict[str, Any]:
    """Name as a user writes it -> function or class: `ntk`, `quantities.ptk`."""
    names = {name: getattr(fl, name) for name in dir(fl) if not name.startswith("_")}
    for module in MODULES:
        part = getattr(fl, module)
        names |= {f"{module}.{name}": getattr(part, name) for name in part.__all__}
    return {name: thing for name, thing in names.items() if inspect.isfunction(thing) or inspect.isclass(thing)}


def calls() -> Iterator[tuple[str, Any]]:
    """Name and callable of every public function, constructor and method."""
    for name, thing in public().items():
        if inspect.isfunction(thing):
            yield name, thing
            continue
        for method, function in vars(thing).items():
            if inspect.isfunction(function) and (method == "__init__" or not method.startswith("_")):
                yield f"{name}.{method}", function
