"""What gradient flow conserves between consecutive layers."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from featlearn.capture.measurement import Measurement
from featlearn.capture.pairs import Pair, consecutive
from featlearn.capture.precision import checked_dtype
from featlearn.capture.probe import Inputs, Readout
from featlearn.capture.projections import Projection
from featlearn.capture.uses import REARRANGEMENTS
from featlearn.errors import InputTypeError, InputValueError
from featlearn.ops import Direct
from featlearn.quantities.arriving import measured_layers


@dataclass(frozen=True)
class LayerBalance:
    """W W^T / eta - U^T U / eta' of two weights that follow each other, over the channels they share."""

    value: Tensor
    """(k, k) where nothing but linear ops lie between them; else its diagonal, (k,). float64."""
    conserved: bool
    """Whether gradient flow keeps it, for any loss."""
    reason: str = ""
    """Why it is not conserved, or has no value."""


_LINEAR = REARRANGEMENTS | {
    "MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1", "AvgPool1DBackward0", "AvgPool2DBackward0",
    "AvgPool3DBackward0", "AdaptiveAvgPool2DBackward0", "ConstantPadNdBackward0", "NegBackward0",
}  # fmt: skip
_HOMOGENEOUS = _LINEAR | {
    "ReluBackward0", "LeakyReluBackward0", "ThresholdBackward0", "AbsBackward0", "MaxPool2DWithIndicesBackward0",
    "MaxPool3DWithIndicesBackward0", "SqueezeBackward1", "MaxPool1DBackward0",
}  # fmt: skip


def layer_balance(
    model: nn.Module, x: Inputs, rates: Mapping[str, float] | Optimizer | None = None, *,
    readout: Readout | None = None, dtype: torch.dtype | None = None,
) -> dict[tuple[str, str], LayerBalance]:  # fmt: skip
    """What gradient flow conserves between consecutive layers: W W^T / eta - U^T U / eta' (002 App. B, 004 Sec. 3).

    All of it for linear networks; its diagonal where activations are positively homogeneous (ReLU, leaky ReLU, max
    pooling). A bias of the first layer counts as one more column of W. Not conserved, and said so: layers with other
    activations, norms, residual sums or attention between them, weights used twice.

    Args:
        model, x, readout, dtype: as for `fl.ntk`; a few samples of x are run, to see what follows what.
        rates: learning rates by layer (globs, the first that matches counts), or an optimiser whose groups have them;
            by default 1 for all.
    """
    checked_dtype(dtype)
    with sdpa_kernel(SDPBackend.MATH), measured_layers(model, [x], readout, dtype) as measurement:
        eta = _Rates(rates, measurement)
        return {
            (first, second): _balance(pair, eta.of(first, pair.first), eta.of(second, pair.second), measurement)
            for (first, second), pair in consecutive(measurement.pilots[0]).items()
        }


class _Rates:
    """Learning rates of layers."""

    def __init__(self, rates: Mapping[str, float] | Optimizer | None, measurement: Measurement) -> None:
        self._globs: Mapping[str, float] = {}
        self._of_parameter: dict[str, float] = {}
        if isinstance(rates, Optimizer):
            groups = [(p, float(group["lr"])) for group in rates.param_groups for p in group["params"]]
            by_parameter = {id(parameter): lr for parameter, lr in groups}
            self._of_parameter = {
                name: by_parameter.get(id(parameter), 0.0) for name, parameter in measurement.originals.items()
            }
        elif isinstance(rates, Mapping):
            self._globs = rates
        elif rates is not None:
            raise InputTypeError(f"rates is {type(rates).__name__}, expected a mapping of layer names or an optimiser")

    def of(self, name: str, one: Projection) -> float:
        if self._of_parameter:
            rate = self._of_parameter[one.parameters[0]]
        elif self._globs:
            matched = [rate for glob, rate in self._globs.items() if fnmatch.fnmatchcase(name, glob)]
            if not matched:
                raise InputValueError(f"rates have no entry for {name!r}, expected one for every layer; add '*'")
            rate = matched[0]
        else:
            return 1.0
        if not rate > 0:
            raise InputValueError(f"the learning rate of {name!r} is {rate}, expected one above zero")
        return rate


def _balance(pair: Pair, rate: float, next_rate: float, measurement: Measurement) -> LayerBalance:
    if pair.after is None:
        return LayerBalance(pair.before.new_full((len(pair.before),), torch.nan), False, pair.reason)
    names = {node.name() for node in pair.between}
    scaled = {node.name() for node in pair.between if _constant_scale(node)}
    strange = names - scaled - _HOMOGENEOUS
    linear = not strange and names - scaled <= _LINEAR
    bias = _bias(pair, measurement)
    columns = pair.before if bias is None else torch.cat([pair.before, bias[:, None]], 1)
    if linear:
        value = columns @ columns.mT / rate - pair.after.mT @ pair.after / next_rate
    else:
        value = columns.square().sum(1) / rate - pair.after.square().sum(0) / next_rate
    if strange:
        return LayerBalance(value, False, f"{', '.join(sorted(strange))} between them")
    if not pair.alone:
        return LayerBalance(value, False, "other layers feed the second, are fed by the first, or one is used twice")
    return LayerBalance(value, True)


def _constant_scale(node: object) -> bool:
    """Whether a node multiplies or divides by a number."""
    name = node.name()  # type: ignore[attr-defined]
    other = getattr(node, "_saved_other", None)
    constant = len([child for child, _ in node.next_functions if child is not None]) == 1  # type: ignore[attr-defined]
    return name in ("MulBackward0", "DivBackward0") and constant and (other is None or other.numel() == 1)


def _bias(pair: Pair, measurement: Measurement) -> Tensor | None:
    """What the first op adds to its product."""
    node = pair.first.readings[0].use.node
    for name, access in measurement.pilots[0].access.items():
        for reading in access.uses.readings:
            if reading.use.node is node and isinstance(reading.form, Direct):
                bias = measurement.parameters[name].detach().double().flatten()
                bias = bias if pair.first.units is None else bias[pair.first.units]
                return bias if len(bias) == len(pair.before) else None
    return None
