"""The function of a sweep: its name, source, and arguments."""

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
    """A function that a sweep calls."""

    call: Callable[..., Any]
    name: str
    """module:qualname"""
    source: str
    """Hash of the source that its results depend on."""
    seed: bool
    """whether it takes an argument `seed`"""
    out: bool
    """whether it takes an argument `out`, a separate folder"""
    resume: bool
    """whether it takes an argument `resume`, and can continue from files of an earlier attempt"""

    def arguments(self, settings: Mapping[str, Any], seed: int, out: Path) -> dict[str, Any]:
        """Return the keyword arguments of a call."""
        extra: dict[str, Any] = {"seed": seed} if self.seed else {}
        extra |= {"out": out} if self.out else {}
        return {**settings, **extra} | ({"resume": True} if self.resume else {})


def check_function(function: Callable[..., Any], points: Iterable[Point], seeds: list[int]) -> SweptFunction:
    """Check that a function takes the points of a grid."""
    if not isinstance(function, FunctionType):
        raise InputTypeError(
            f"function is {type(function).__name__}, expected a function; pass constant arguments as grid values"
        )
    signature = inspect.signature(function)
    swept = SweptFunction(
        call=function,
        name=_name(function),
        source=source_digest(function),
        **{name: _takes(signature, name) for name in ("seed", "out", "resume")},
    )
    if len(seeds) > 1 and not swept.seed:
        raise InputValueError(f"{swept.name} takes no argument seed, expected a seed argument for {len(seeds)} seeds")
    for point in points:
        _check(signature, swept, point)
    return swept


def _takes(signature: inspect.Signature, name: str) -> bool:
    """Return whether a function takes an argument of this name. `**kwargs` receives the seed, but not out or resume."""
    variadic = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    return name in signature.parameters or (name == "seed" and variadic)


def _check(signature: inspect.Signature, function: SweptFunction, point: Point) -> None:
    arguments = function.arguments(point.settings, 0, Path())
    try:
        signature.bind(**arguments)
    except TypeError as error:
        names = [name for name in signature.parameters if name not in ("seed", "out", "resume")]
        unknown = [name for name in point.settings if name not in names]
        hint = did_you_mean(unknown[0], names) if unknown else ""
        raise InputValueError(f"{function.name}{signature} does not take the point {point}: {error}{hint}") from error


def check_importable(function: Callable[..., Any]) -> None:
    """Raise if another process cannot import a function."""
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
    attribute: Any = module
    for part in name.split("."):
        attribute = getattr(attribute, part, None)
    if attribute is not function:
        raise InputValueError(
            f"{module.__name__}.{name} is not this function, but worker processes import it by name, expected "
            f"the same object; if it was wrapped or redefined, give it another name, {serial}"
        )


def _name(function: FunctionType) -> str:
    """Return module:qualname. A script is named like the module it would be if imported."""
    module = function.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else module
    return f"{module}:{function.__qualname__}"


def source_digest(function: Callable[..., Any]) -> str:
    """Hash the function and everything it reaches in its module, without comments and docstrings."""
    source = reachable_source(function)
    if not source:  # not at the top of a file
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError):
            code = function.__code__
            values = [value for value in code.co_consts if not isinstance(value, CodeType)]
            source = f"{code.co_code!r} {values!r} {code.co_names!r}"
    return hashlib.sha256(source.encode()).hexdigest()[:16]
