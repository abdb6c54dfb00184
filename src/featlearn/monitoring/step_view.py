"""What a quantity of the user may read of one step."""

from typing import Any

from torch import Tensor, nn

from featlearn.monitoring.step_measurement import StepMeasurement
from featlearn.network.inputs import Inputs
from featlearn.quantities.layer_features import NeuralFeatures
from featlearn.readouts import TargetedInputs


class StepView:
    """The network at one step of a run.

    A quantity of yours is a function of it: `quantities={"mine": lambda view: float(view.kernel.trace())}`. Each
    attribute is measured on first access, once for all quantities of the step. Tensors are on the CPU.
    """

    step: int
    """Number of the training step; 0 before training."""
    model: nn.Module
    """The network as it is now; do not modify it."""
    outputs: Tensor
    """(P, C) outputs on the probe."""
    targets: Tensor | None
    """(P, C) targets in double; class labels become one-hot rows less 1 / C. None for a probe without targets."""
    kernel: Tensor
    """(P, P) tangent kernel, the mean over outputs."""
    kernel_each: Tensor
    """(C, P, P), one tangent kernel per output; (1, P, P), their mean, for more than 16 outputs."""
    layer_kernels: dict[str, Tensor]
    """Layer -> its part of `kernel_each`."""
    features: NeuralFeatures
    """Neural features of every layer, compared with the start of the run where it is known."""

    def __init__(self, measurement: StepMeasurement) -> None:
        self._measurement = measurement

    @property
    def x(self) -> Inputs:
        """Inputs of the probe."""
        x = self._measurement.x
        return x.inputs if isinstance(x, TargetedInputs) else x

    def __getattr__(self, name: str) -> Any:
        if name not in StepView.__annotations__:
            raise AttributeError(f"a StepView has no {name!r}, expected x, {', '.join(StepView.__annotations__)}")
        return getattr(self._measurement, name)
