"""What a quantity of the user may read of one step."""

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

    def __init__(self, measurement: StepMeasurement) -> None:
        self._measurement = measurement

    @property
    def step(self) -> int:
        """Number of the training step; 0 before training."""
        return self._measurement.step

    @property
    def model(self) -> nn.Module:
        """The network as it is now; do not modify it."""
        return self._measurement.model

    @property
    def x(self) -> Inputs:
        """Inputs of the probe."""
        x = self._measurement.x
        return x.inputs if isinstance(x, TargetedInputs) else x

    @property
    def outputs(self) -> Tensor:
        """(P, C) outputs on the probe."""
        return self._measurement.outputs

    @property
    def targets(self) -> Tensor | None:
        """(P, C) targets in double; class labels become one-hot rows less 1 / C. None for a probe without targets."""
        return self._measurement.targets

    @property
    def kernel(self) -> Tensor:
        """(P, P) tangent kernel, the mean over outputs."""
        return self._measurement.kernel

    @property
    def kernel_each(self) -> Tensor:
        """(C, P, P), one tangent kernel per output; (1, P, P), their mean, for more than 16 outputs."""
        return self._measurement.kernel_each

    @property
    def layer_kernels(self) -> dict[str, Tensor]:
        """Layer -> its part of `kernel_each`."""
        return self._measurement.layer_kernels

    @property
    def features(self) -> NeuralFeatures:
        """Neural features of every layer, compared with the start of the run where it is known."""
        return self._measurement.features
