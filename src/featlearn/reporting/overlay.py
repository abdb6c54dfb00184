"""Theory curves in charts of runs: times of gradient flow are converted to steps."""

import math
from collections.abc import Mapping
from typing import Any

from featlearn.errors import InputTypeError, InputValueError
from featlearn.reporting.content_blocks import ChartLine, thin

COLORS = 4
"""Index of the first theory's color; lower ones belong to the lines of a run."""
POINTS = 80
"""Largest number of points of a curve: theories are smooth."""


class Overlay:
    """Predictions by label.

    A prediction is any object with `times` and `curves()`, such as a result of `fl.theory`. Its time is `time_scale`
    times the step, as for `Prediction.overlay`.
    """

    def __init__(self, theory: Mapping[str, Any] | None, time_scale: float = 1.0) -> None:
        if not (isinstance(time_scale, int | float) and math.isfinite(time_scale) and time_scale > 0):
            raise InputValueError(f"time_scale is {time_scale!r}, expected a positive number: theory time per step")
        if theory is not None and not isinstance(theory, Mapping):
            raise InputTypeError(f"theory is {type(theory).__name__}, expected label -> prediction")
        self._curves = {str(label): _curves(label, one, time_scale) for label, one in (theory or {}).items()}

    def __bool__(self) -> bool:
        return bool(self._curves)

    def names(self) -> list[str]:
        """Names of the predicted quantities."""
        return list(dict.fromkeys(name for curves in self._curves.values() for name in curves))

    def lines(self, name: str, samples: int | None = None) -> list[ChartLine]:
        """Predictions of one quantity. Theories sum the loss over samples, runs average it: divide it by `samples`."""
        share = samples or 1
        return [
            ChartLine(f"theory: {label}", x, [v / share for v in y], color, dash=3)
            for color, (label, curves) in enumerate(self._curves.items(), COLORS)
            for x, y in [curves.get(name, ([], []))]
            if x
        ]


def _curves(label: Any, prediction: Any, time_scale: float) -> dict[str, tuple[list[float], list[float]]]:
    times, curves = getattr(prediction, "times", None), getattr(prediction, "curves", None)
    if times is None or not callable(curves):
        raise InputTypeError(
            f"theory[{label!r}] is {type(prediction).__name__}, expected a prediction with times and curves()"
        )
    steps = [float(t) / time_scale for t in times]
    found = {}
    for name, values in curves().items():
        pairs = [(s, float(v)) for s, v in zip(steps, values, strict=True) if math.isfinite(s + float(v)) and s >= 0]
        found[str(name)] = thin([s for s, _ in pairs], [v for _, v in pairs], POINTS)
    return found
