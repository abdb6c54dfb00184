"""What every public function of `fl.theory` must pass: it says where it comes from, and its types."""

import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import featlearn as fl

CITATION = re.compile(r"\b[A-Z][a-z]+(?: et al\.| & [A-Z][a-z]+),? \(?(?:19|20)\d\d[ab]?\b")
"""Atanasov et al. 2022; Xu & Ziyin 2024."""


def public_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    found = {name: getattr(module, name) for name in names}
    return {
        name: thing
        for name, thing in found.items()
        if inspect.isfunction(thing) and thing.__module__.startswith(module.__name__)
    }


FUNCTIONS = {
    f"{theory}.{name}": function
    for theory in fl.theory.__all__
    for name, function in public_functions(getattr(fl.theory, theory)).items()
}


def cites(function: Callable[..., Any]) -> bool:
    return CITATION.search(" ".join((function.__doc__ or "").split())) is not None


def unannotated(function: Callable[..., Any]) -> list[str]:
    signature = inspect.signature(function)
    missing = [name for name, part in signature.parameters.items() if part.annotation is part.empty]
    return missing + ["return"] * (signature.return_annotation is signature.empty)


def test_functions_are_collected_from_every_theory():
    assert {name.partition(".")[0] for name in FUNCTIONS} == set(fl.theory.__all__) - {"NetworkPath", "which"}
    assert len(FUNCTIONS) > 90


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_cites_author_and_year(name: str):
    assert cites(FUNCTIONS[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_and_the_result_have_a_type(name: str):
    assert unannotated(FUNCTIONS[name]) == []


@pytest.mark.parametrize(
    "text",
    [None, "", "The loss at time t (Eq. 5).", "See `solve`, Sec. 4.", "Not in the print.", "At width 2022.", "In 2022"],
)
def test_a_docstring_without_a_source_is_found(text: str | None):
    def function() -> None: ...

    function.__doc__ = text
    assert not cites(function)


@pytest.mark.parametrize("text", ["Atanasov et al. 2022, Eq. 5", "Shan & Bordelon\n    2021b", "Lee et al. (2019)"])
def test_a_source_is_found(text: str):
    def function() -> None: ...

    function.__doc__ = text
    assert cites(function)


def test_a_missing_type_is_found():
    def function(a: int, b, *, c: float):  # type: ignore[no-untyped-def]
        return a + b + c

    assert unannotated(function) == ["b", "return"]
