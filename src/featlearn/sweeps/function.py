"""The function of a sweep: its name, its source, and what it takes."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from featlearn.errors import InputTypeError, InputValueError, did_you_mean
from featlearn.sweeps.function_source import reachable_source
from featlearn.sweeps.grid import Point


@dataclass(frozen=True, kw_only=True)
class SweptFunction:
    """A function as a sweep sees it."""

    call: Callable[..., Any]
    name: str
    """module:qualname"""
    source: str
    """A hash of what its results depend on."""
    seed: bool
    """whether it takes a seed"""
    out: bool
    """whether it takes a folder of its own"""
    resume: bool
    """whether it takes that an earlier attempt may have left something there"""

    def arguments(self, settings: Mapping[str, Any], seed: int, out: Path) -> dict[str, Any]:
        """What it is called with."""
        own: dict[str, Any] = {"seed": seed} if self.seed else {}
        own |= {"out": out} if self.out else {}
        return {**settings, **own} | ({"resume": True} if self.resume else {})


def swept_function(function: Callable[..., Any], points: Iterable[Point], seeds: list[int]) -> SweptFunction:
    """Check that a function takes the points of a grid."""
    if not isinstance(function, FunctionType):
        raise InputTypeError(
            f"function is {type(function).__name__}, expected a function: arguments that stay the same can stand in "
            "the grid with one value each"
        )
    signature = inspect.signature(function)
    found = SweptFunction(
        call=function,
        name=_name(function),
        source=source_digest(function),
        **{name: _takes(signature, name) for name in ("seed", "out", "resume")},
    )
    if len(seeds) > 1 and not found.seed:
        raise InputValueError(f"{found.name} takes no argument seed, expected one, as there are {len(seeds)} seeds")
    for point in points:
        _check(signature, found, point)
    return found


def _takes(signature: inspect.Signature, name: str) -> bool:
    """Whether a function takes an argument of this name; `**others` is for the grid and takes a seed only."""
    several = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    return name in signature.parameters or (name == "seed" and several)


def _check(signature: inspect.Signature, function: SweptFunction, point: Point) -> None:
    given = function.arguments(point.settings, 0, Path())
    try:
        signature.bind(**given)
    except TypeError as error:
        known = [name for name in signature.parameters if name not in ("seed", "out", "resume")]
        wrong = [name for name in point.settings if name not in known]
        hint = did_you_mean(wrong[0], known) if wrong else ""
        raise InputValueError(f"{function.name}{signature} does not take the point {point}: {error}{hint}") from error


def check_importable(function: Callable[..., Any]) -> None:
    """Refuse a function that another process cannot import."""
    module, name = sys.modules.get(function.__module__), function.__qualname__
    serial = "or pass executor=featlearn.sweeps.Serial() to run all points in this process"
    if "<lambda>" in name or "<locals>" in name:
        raise InputValueError(
            f"{name} cannot be imported by worker processes, expected a function at the top of a module: move it "
            f"there, {serial}"
        )
    interactive = function.__module__ == "__main__" and not getattr(module, "__file__", None)
    if interactive or module is None:
        raise InputValueError(
            f"{name} is defined in a notebook, a session or text that was executed, which worker processes cannot "
            f"import; write it to a file experiment.py and use experiment.{name}, {serial}"
        )
    there: Any = module
    for part in name.split("."):
        there = getattr(there, part, None)
    if there is not function:
        raise InputValueError(
            f"{module.__name__} has another {name} than the one that was given, expected the same for worker "
            f"processes to import; was it wrapped or defined again? Give it a name of its own, {serial}"
        )


def _name(function: FunctionType) -> str:
    """module:qualname; a script is named like the module that it would be when imported."""
    module = function.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else module
    return f"{module}:{function.__qualname__}"


def source_digest(function: Callable[..., Any]) -> str:
    """A hash of the function and all that it reaches in its module, without comments and docstrings."""
    source = reachable_source(function)
    if not source:  # not at the top of a file
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError):
            code = function.__code__
            values = [value for value in code.co_consts if not isinstance(value, CodeType)]
            source = f"{code.co_code!r} {values!r} {code.co_names!r}"
    return hashlib.sha256(source.encode()).hexdigest()[:16]
