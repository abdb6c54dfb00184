"""Check the arguments of public calls: errors name the keyword that was meant."""

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar, get_args

from featlearn.errors import InputTypeError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def keywords_named(hint: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
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

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > limit:
                raise InputTypeError(_surplus(function.__qualname__, positional, keywords, hint))
            if not kwargs.keys() <= names:
                unknown = next(name for name in kwargs if name not in names)
                hint_or_list = did_you_mean(unknown, names) or f", expected {', '.join(keywords)}"
                raise InputTypeError(f"{_call(function.__qualname__)} has no argument {unknown!r}{hint_or_list}")
            return function(*args, **kwargs)

        checked.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return checked

    return decorate


def _expanded(signature: inspect.Signature) -> Iterator[inspect.Parameter]:
    """Yield all parameters, those of `**settings: Unpack[...]` one by one."""
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            (settings,) = get_args(parameter.annotation)
            for name, annotation in settings.__annotations__.items():
                yield inspect.Parameter(name, parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        else:
            yield parameter


def _call(name: str) -> str:
    """Return how users write the call of a function."""
    owner, _, method = name.rpartition(".")
    called = owner if method == "__init__" else method
    return f"{'Session.' if owner == 'Session' and method != '__init__' else 'fl.'}{called}"


def _surplus(name: str, positional: list[str], keywords: list[str], hint: str) -> str:
    """Return the message for an argument too many."""
    shown = ", ".join([*(word for word in positional if word != "self"), f"{keywords[0]}=..."])
    return " ".join(filter(None, [f"`{keywords[0]}` must be passed by keyword: `{_call(name)}({shown})`.", hint]))
