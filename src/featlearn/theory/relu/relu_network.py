"""The boundary checks of the theory of two-layer ReLU networks."""

from typing import Any

from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite, checked_kernel, checked_targets
from featlearn.theory.arguments import checked_number


def checked_outputs(f: Any, target: Tensor) -> Tensor:
    """Outputs (..., P) for targets (P,)."""
    outputs = checked_finite(f, "f").to(target.device)
    if outputs.dim() == 0 or outputs.shape[-1] != len(target):
        raise InputValueError(f"f has shape {tuple(outputs.shape)}, expected (..., P) with P = {len(target)}, as y")
    return outputs


def checked_rate(value: Any) -> float:
    """Return a number >= 0."""
    return checked_number(value, "rate", least=0.0, hint="see fl.dynamics.rate")


def checked_square(value: Any, name: str, target: Tensor) -> Tensor:
    """One kernel (P, P) for targets (P,)."""
    kernel = checked_finite(checked_kernel(value, name), name).to(target.device)
    checked_targets(target, kernel)
    if kernel.dim() != 2:
        raise InputValueError(f"{name} has shape {tuple(kernel.shape)}, expected (P, P)")
    return kernel
