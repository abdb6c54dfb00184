"""Check the arguments of public calls: errors name the keyword that was meant."""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import ParamSpec, TypeVar, get_args

from featlearn.errors import InputTypeError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def name_keywords(hint: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public function: a surplus positional argument or an unknown keyword raises an error that names it.

    Python's own message only counts arguments. `hint` is added where users often mean something else. Keywords that
    are declared as `**settings: Unpack[...]` appear one by one in the signature of the decorated function.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        parameters = list(_expanded(signature))
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        limit, names = len(positional), {*positional, *keywords}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        call = partial(_call, function.__module__, function.__qualname__)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > limit:
                raise InputTypeError(_surplus(call(), positional, keywords[0], hint))
            if not takes_any and not kwargs.keys() <= names:
                unknown = next(name for name in kwargs if name not in names)
                hint_or_list = did_you_mean(unknown, names) or f", expected {', '.join(keywords)}"
                raise InputTypeError(f"{call()} has no argument {unknown!r}{hint_or_list}")
            return function(*args, **kwargs)

        checked.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return checked

    return decorate


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
