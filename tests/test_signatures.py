"""A surplus positional argument and an unknown keyword are errors that name the keyword that was meant."""

import inspect
import traceback
from pathlib import Path
from typing import TypedDict, Unpack

import pytest
import torch

import featlearn as fl
from featlearn.errors import FeatlearnError
from featlearn.signatures import name_keywords


class Options(TypedDict, total=False):
    memory: str | None


@name_keywords("Targets do not matter here; drop `y`.")
def measure(model: str, x: int, *, x2: int = 0, outputs: str = "mean") -> tuple[str, int, int, str]:
    """Measure."""
    return model, x, x2, outputs


class Operator:
    @name_keywords()
    def __init__(self, model: str, *, readout: str = "") -> None:
        self.model, self.readout = model, readout


@name_keywords()
def planned(model: str, *, ranks: int = 1, **settings: Unpack[Options]) -> dict[str, object]:
    """Plan."""
    return {"ranks": ranks, **settings}


def test_calls_go_through_unchanged():
    assert measure("m", 1, x2=3) == ("m", 1, 3, "mean")
    assert measure(model="m", x=1, outputs="sum") == ("m", 1, 0, "sum")
    assert Operator("m", readout="r").readout == "r"
    assert list(inspect.signature(measure).parameters) == ["model", "x", "x2", "outputs"]
    assert measure.__doc__ == "Measure."


def test_a_surplus_argument_names_its_keyword():
    message = r"`x2` must be passed by keyword: `.*measure\(model, x, x2=...\)`. Targets do not matter here; drop `y`."
    with pytest.raises(FeatlearnError, match=message) as raised:
        measure("m", 1, 2)  # type: ignore[misc]
    assert isinstance(raised.value, TypeError)
    with pytest.raises(
        FeatlearnError, match=r"`readout` must be passed by keyword: `.*Operator\(model, readout=...\)`"
    ):
        Operator("m", "r")  # type: ignore[misc]


def test_an_unknown_keyword_names_the_closest_one():
    with pytest.raises(FeatlearnError, match=r".*measure has no argument 'ouputs'; did you mean 'outputs'\?") as raised:
        measure("m", 1, ouputs="sum")  # type: ignore[call-arg]
    assert isinstance(raised.value, TypeError)
    with pytest.raises(FeatlearnError, match=r".*planned has no argument 'memroy'; did you mean 'memory'\?"):
        planned("m", memroy="1GiB")  # type: ignore[call-arg]
    with pytest.raises(FeatlearnError, match=r".*planned has no argument 'q', expected ranks, memory$"):
        planned("m", q=1)  # type: ignore[call-arg]


def test_settings_are_passed_on_and_shown_one_by_one():
    assert planned("m", memory="1GiB") == {"ranks": 1, "memory": "1GiB"}
    assert list(inspect.signature(planned).parameters) == ["model", "ranks", "memory"]


def traceback_of(call) -> list[str]:
    with pytest.raises(FeatlearnError) as caught:
        call()
    return traceback.format_exception(caught.value)


def test_an_error_is_raised_from_the_call(tmp_path: Path):
    model, x = torch.nn.Linear(3, 2), torch.randn(5, 4, 3)
    for call in (lambda: fl.ntk(model, x), lambda: fl.Session(model, x).neural_features()):
        lines = "".join(traceback_of(call)).splitlines()
        assert sum("featlearn" in line and "File" in line for line in lines) == 1
        assert len(lines) < 15
        assert "direct cause" not in "".join(lines)
    watch = fl.watch(model, (x, None), out=tmp_path / "run")
    assert len("".join(traceback_of(watch.__enter__)).splitlines()) < 15


def test_the_cause_shows_code_of_the_user_alone():
    class Broken(torch.nn.Linear):
        def forward(self, x):
            raise ZeroDivisionError("by zero")

    text = "".join(traceback_of(lambda: fl.ntk(Broken(3, 2), torch.randn(5, 3))))
    cause = text.partition("direct cause")[0]
    assert "ZeroDivisionError: by zero" in cause
    assert 'raise ZeroDivisionError("by zero")' in cause
    assert "featlearn/network" not in text


def test_a_variable_keeps_all_of_the_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEATLEARN_TRACEBACK", "full")
    text = "".join(traceback_of(lambda: fl.ntk(torch.nn.Linear(3, 2), torch.randn(5, 4, 3))))
    assert "featlearn/network/default_readout.py" in text
