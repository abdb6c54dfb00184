"""A positional argument too many is an error that names the keyword."""

import inspect

import pytest

from featlearn.errors import FeatlearnError
from featlearn.signatures import keywords_named


@keywords_named("Targets do not matter here; drop `y`.")
def measure(model: str, x: int, *, x2: int = 0, outputs: str = "mean") -> tuple[str, int, int, str]:
    """Measure."""
    return model, x, x2, outputs


class Operator:
    @keywords_named()
    def __init__(self, model: str, *, readout: str = "") -> None:
        self.model, self.readout = model, readout


def test_calls_go_through_unchanged():
    assert measure("m", 1, x2=3) == ("m", 1, 3, "mean")
    assert measure(model="m", x=1, outputs="sum") == ("m", 1, 0, "sum")
    assert Operator("m", readout="r").readout == "r"
    assert list(inspect.signature(measure).parameters) == ["model", "x", "x2", "outputs"]
    assert measure.__doc__ == "Measure."


def test_a_surplus_argument_names_its_keyword():
    message = r"`x2` must be passed by keyword: `fl.measure\(model, x, x2=...\)`. Targets do not matter here; drop `y`."
    with pytest.raises(FeatlearnError, match=message) as raised:
        measure("m", 1, 2)  # type: ignore[misc]
    assert isinstance(raised.value, TypeError)
    with pytest.raises(
        FeatlearnError, match=r"`readout` must be passed by keyword: `fl.Operator\(model, readout=...\)`"
    ):
        Operator("m", "r")  # type: ignore[misc]
