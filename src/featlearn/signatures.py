"""Check of public calls: a positional argument too many names the keyword to use."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from featlearn.errors import InputTypeError

P = ParamSpec("P")
R = TypeVar("R")


def keywords_named(hint: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public function: a surplus positional argument raises an error that names its keyword.

    Python's own message only counts arguments. `hint` is added where users often mean something else.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        limit = len(positional)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > limit:
                raise InputTypeError(_surplus(function.__qualname__, positional, keywords, hint))
            return function(*args, **kwargs)

        return checked

    return decorate


def _surplus(name: str, positional: list[str], keywords: list[str], hint: str) -> str:
    """Return the message for an argument too many."""
    owner, _, method = name.rpartition(".")
    called = owner if method == "__init__" else method
    shown = ", ".join([*(word for word in positional if word != "self"), f"{keywords[0]}=..."])
    start = "Session." if owner == "Session" and method != "__init__" else "fl."
    return " ".join(filter(None, [f"`{keywords[0]}` must be passed by keyword: `{start}{called}({shown})`.", hint]))
