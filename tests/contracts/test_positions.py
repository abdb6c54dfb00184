"""Public calls take (model, x) or (model, x, y) by position, and everything else by keyword."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import featlearn as fl
from tests.contracts.public_names import calls


def names(function: Callable[..., Any], kind: Any) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is kind and p.name != "self"]


CALLS = {
    name: function
    for name, function in calls()
    if names(function, inspect.Parameter.KEYWORD_ONLY) and not names(function, inspect.Parameter.VAR_POSITIONAL)
}
POSITIONS = {
    ("model", "x"),
    ("model", "x", "y"),
    ("model", "x", "initial"),
    ("model", "data"),
    ("model", "data", "y"),
    ("model", "probe"),
    ("model", "checkpoints"),
    ("model", "order"),
    ("model", "task_a", "task_b"),
    ("model", "factor"),
    ("model", "speeds"),
    ("model", "scheme", "lr"),
    ("model", "probe", "lr"),
    ("model", "sigma", "layers", "redraw", "generator"),
}
"""What a call that begins with a model takes by position: its samples, its targets, and the subject of its name."""


def test_calls_are_collected():
    assert {"ntk", "watch", "Session.ntk", "NTKOperator.__init__", "quantities.ptk", "steer.safe_lr"} <= CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_positional_argument_too_many_names_its_keyword(name: str):
    function = CALLS[name]
    positional = names(function, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    keyword = names(function, inspect.Parameter.KEYWORD_ONLY)[0]
    method = "self" in inspect.signature(function).parameters
    with pytest.raises(fl.FeatlearnError, match=f"^`{keyword}` must be passed by keyword: `") as caught:
        function(*[None] * (len(positional) + 1 + method))
    public = name.removesuffix(".__init__")
    shown = public if method and "__init__" not in name else f"fl.{public}"
    assert f"`{shown}({', '.join([*positional, keyword])}=...)`" in str(caught.value)


def test_calls_of_a_model_take_its_samples_and_targets_by_position():
    taken = {name: tuple(names(function, inspect.Parameter.POSITIONAL_OR_KEYWORD)) for name, function in calls()}
    assert {name: given for name, given in taken.items() if given[:1] == ("model",) and given not in POSITIONS} == {}


def test_the_model_text_of_a_kernel_with_targets():
    with pytest.raises(fl.FeatlearnError) as caught:
        fl.ntk(None, None, None)  # type: ignore[misc]
    hint = "The kernel does not depend on targets, so drop `y`."
    assert str(caught.value) == f"`x2` must be passed by keyword: `fl.ntk(model, x, x2=...)`. {hint}"
