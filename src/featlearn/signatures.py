"""Check the arguments of public calls: errors name the keyword that was meant."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast, get_args

from featlearn.errors import FeatlearnError, InputTypeError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def name_keywords(hint: str = "", *, name: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public function: a surplus positional argument or an unknown keyword raises an error that names it.

    Python's own message only counts arguments. `hint` is added where users often mean something else. Keywords that
    are declared as `**settings: Unpack[...]` appear one by one in the signature of the decorated function. `name`
    replaces the name of the function, for methods that are defined elsewhere.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        parameters = list(_expanded(signature))
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        limit, names = len(positional), {*positional, *keywords}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        call = partial(_call, function.__module__, name or function.__qualname__)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > limit:
                raise InputTypeError(_surplus(call(), positional, keywords[0], hint))
            if not takes_any and not kwargs.keys() <= names:
                unknown = next(name for name in kwargs if name not in names)
                hint_or_list = did_you_mean(unknown, names) or f", expected {', '.join(keywords)}"
                raise InputTypeError(f"{call()} has no argument {unknown!r}{hint_or_list}")
            try:
                return function(*args, **kwargs)
            except FeatlearnError as error:
                raise shortened(error) from shown_cause(error)

        if name:
            parameters[0] = parameters[0].replace(name="self")
            positional[0] = "self"
            checked.__qualname__, checked.__name__ = name, name.rpartition(".")[2]
        checked.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return checked

    return decorate


def session_method(function: F, hint: str = "") -> F:
    """Return a function of an audited model, `ntk_of` say, as the method `Session.ntk`."""
    name = f"Session.{function.__name__.removesuffix('_of')}"
    return cast(F, name_keywords(hint, name=name)(function))


def raise_from_call(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public method: errors of this package have a traceback that begins at the call."""

    @wraps(function)
    def calling(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except FeatlearnError as error:
            raise shortened(error) from shown_cause(error)

    return calling


FULL = "FEATLEARN_TRACEBACK"
"""Environment variable: `full` keeps the frames of this package in tracebacks."""


def shortened(error: FeatlearnError) -> FeatlearnError:
    """Return an error without the frames below the public call."""
    return error if os.environ.get(FULL) == "full" else error.with_traceback(None)


def shown_cause(error: FeatlearnError) -> BaseException | None:
    """Return the cause of an error if it lies outside this package, without the frames of this package and of torch."""
    cause = error.__cause__
    if cause is None or os.environ.get(FULL) == "full":
        return cause
    if isinstance(cause, FeatlearnError):
        return shown_cause(cause)
    trace = cause.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] in (
        "featlearn",
        "torch",
    ):
        trace = trace.tb_next
    cause.__suppress_context__ = True
    return cause.with_traceback(trace)


def _package(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def _expanded(signature: inspect.Signature) -> Iterator[inspect.Parameter]:
    """Yield all parameters, those of `**settings: Unpack[...]` one by one."""
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD and get_args(parameter.annotation):
            (settings,) = get_args(parameter.annotation)
            for name, annotation in settings.__annotations__.items():
                yield inspect.Parameter(name, parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        else:
            yield parameter


def _call(module: str, name: str) -> str:
    """Return the public name of a function or method: `fl.ntk`, `fl.quantities.ptk`, `Session.ntk`."""
    owner, _, method = name.rpartition(".")
    if owner and method != "__init__":
        return f"{owner}.{method}"
    called = owner or name
    room = "" if called in dir(sys.modules["featlearn"]) else f"{module.split('.')[1]}."
    return f"fl.{room}{called}"


def _surplus(call: str, positional: list[str], keyword: str, hint: str) -> str:
    """Return the message for an argument too many."""
    shown = ", ".join([*(word for word in positional if word != "self"), f"{keyword}=..."])
    return " ".join(filter(None, [f"`{keyword}` must be passed by keyword: `{call}({shown})`.", hint]))
