"""Predictions of theories over training, with the names of measured runs, so that both can be plotted together."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.palette import BLUE, ORANGE

NAMES: Mapping[str, str] = {
    "loss": "squared error $|f - y|^2$",
    "output": "output $f$",
    "ntk/alignment": "kernel-task alignment",
    "ntk/hidden/mean": "hidden part $\\mathrm{Tr} K_W / P$",
    "ntk/hidden/task": "hidden part $y^T K_W y / |y|^2$",
    "ntk/norm": "kernel norm $|K|$",
    "ntk/readout/mean": "readout part $\\mathrm{Tr} K_V / P$",
    "ntk/readout/task": "readout part $y^T K_V y / |y|^2$",
    "ntk/task": "kernel along the task $y^T K y / |y|^2$",
    "ntk/trace": "trace of the kernel",
    "ntk/value": "kernel on the data $K(x, x)$",
    "layers/alignment": "layer alignment $\\zeta$",
    "layers/first_norm": "norm of the first layer",
    "layers/second_norm": "norm of the second layer",
    "strength": "strength of the mode",
}
"""Quantities shared by predictions and runs -> axis labels."""


class Prediction(ABC):
    """Curves over time. Subclasses say which; everything else is shared."""

    times: Tensor
    """(T,): time of gradient flow, in the units of the theory's own docstring."""

    @abstractmethod
    def curves(self) -> dict[str, Tensor]:
        """Name -> (T,) values at `times`; names are those of `NAMES`."""

    def overlay(
        self, measured: Any = None, *, names: Sequence[str] | None = None, axes: Any = None, time_scale: float = 1.0
    ) -> Any:
        """Draw the predicted curves as lines and, over them, measured ones as points; returns the matplotlib axes.

        Args:
            measured: name -> (times, values), or anything with such a mapping as its `curves()`: another prediction, or
                a run, whose loss becomes |f - y|^2 of its probe. Names are those of `NAMES`: "loss", "ntk/alignment",
                "ntk/norm" ...
            names: which curves; by default those that both have, or all predicted ones if nothing was measured.
            axes: one matplotlib axes for each name; by default a new figure.
            time_scale: what the measured times are multiplied by to be those of the theory, a learning rate for steps.
        """
        predicted = self.curves()
        points = _points(measured)
        shared = [name for name in predicted if name in points or not points]
        curve_names = shared if names is None else list(names)
        unknown = [name for name in curve_names if name not in predicted]
        if unknown or not curve_names:
            missing = ", ".join(unknown) or f"measured curves {', '.join(points)}"
            raise InputValueError(f"no prediction for {missing}, expected some of {', '.join(predicted)}")
        axes = _axes(len(curve_names)) if axes is None else list(axes) if isinstance(axes, Sequence) else [axes]
        if len(axes) != len(curve_names):
            raise InputValueError(f"got {len(axes)} axes for {len(curve_names)} curves, expected one for each")
        for name, ax in zip(curve_names, axes, strict=True):
            ax.plot(self.times.tolist(), predicted[name].tolist(), color=BLUE, label="theory")
            if name in points:
                times, values = points[name]
                ax.plot([time_scale * t for t in times], values, "o", color=ORANGE, markersize=3, label="measured")
            ax.set_xlabel("time")
            ax.set_ylabel(NAMES.get(name, name))
            ax.legend()
        return axes


def _points(measured: Any) -> dict[str, tuple[list[float], list[float]]]:
    if measured is None:
        return {}
    if isinstance(measured, Prediction):
        times = measured.times.tolist()
        return {name: (times, values.tolist()) for name, values in measured.curves().items()}
    is_run = hasattr(measured, "curves") and hasattr(measured, "arrays")
    curves = (
        run_curves(measured)
        if is_run
        else measured
        if isinstance(measured, Mapping)
        else getattr(measured, "curves", lambda: None)()
    )
    if not isinstance(curves, Mapping):
        raise InputTypeError(
            f"measured is {type(measured).__name__}, expected name -> (times, values), or something with curves()"
        )
    for name, curve in curves.items():
        if not isinstance(curve, tuple | list) or len(curve) != 2 or len(curve[0]) != len(curve[1]):
            raise InputValueError(f"measured[{name!r}] is no pair of equal length, expected (times, values)")
    return {name: ([float(t) for t in times], [float(v) for v in values]) for name, (times, values) in curves.items()}


def run_curves(run: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Return the curves of a run in the units of theories: its loss is |f - y|^2, summed over the probe.

    A run without numbers as targets has no loss here.
    """
    curves: dict[str, tuple[list[float], list[float]]] = {
        name: curve for name, curve in run.curves().items() if name != "loss"
    }
    if run.arrays.get("targets") and run.arrays.get("outputs"):
        targets = run.array("targets", run.arrays["targets"][0])["y"].astype(float)
        steps = run.arrays["outputs"]
        outputs = [run.array("outputs", step)["f"] for step in steps]
        if all(f.size == targets.size for f in outputs):
            losses = [float(((f.reshape(targets.shape) - targets) ** 2).sum()) for f in outputs]
            curves["loss"] = [float(step) for step in steps], losses
    return curves


def _axes(count: int) -> list[Any]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(3.25 * count, 2.5), squeeze=False, layout="constrained")
    del figure
    return list(axes[0])
