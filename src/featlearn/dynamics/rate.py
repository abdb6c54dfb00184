"""Convert a trainer's learning rate and loss to the rate of df/dt = -rate K (f - y)."""

import operator
from typing import Any

from featlearn.errors import InputValueError
from featlearn.losses import NAMES, Loss, LossName
from featlearn.losses import name as loss_name
from featlearn.shapes import checked_number

# factor of the gradient, and the sizes that divide the loss
_FACTORS: dict[LossName, tuple[float, tuple[str, ...]]] = {
    "sum-half": (1.0, ()),
    "mean": (2.0, ("P",)),
    "mean-half": (1.0, ("P",)),
    "mean-over-outputs": (2.0, ("P", "C")),
    "mse": (2.0, ("P", "C")),
    "cross-entropy": (1.0, ("P",)),
    "bce": (1.0, ("P", "C")),
}


def rate(lr: float, loss: Loss, P: int | None = None, C: int | None = None) -> float:
    """Compute the rate at which gradient descent with learning rate `lr` moves P samples with C outputs.

    The rate is the factor of df/dt = -rate K (f - y). For `"cross-entropy"` softmax(f) stands for f, for `"bce"`
    sigmoid(f).

    | loss | value | rate |
    | --- | --- | --- |
    | `"sum-half"` | 1/2 sum (f - y)^2 (Shan & Bordelon 2021a, 2021b) | lr |
    | `"mean"` | 1/P sum (f - y)^2 | 2 lr / P |
    | `"mean-half"` | 1/(2P) sum (f - y)^2 (Atanasov et al. 2022) | lr / P |
    | `"mse"`, `"mean-over-outputs"` | 1/(P C) sum (f - y)^2, `nn.MSELoss()` | 2 lr / (P C) |
    | `"cross-entropy"` | `nn.CrossEntropyLoss()` | lr / P |
    | `"bce"` | `nn.BCEWithLogitsLoss()` | lr / (P C) |

    Args:
        lr: Learning rate of the trainer.
        loss: Name of the table in `fl.losses`, or a module that equals one of them.
        P: Number of samples, if the rate depends on it.
        C: Number of outputs, if the rate depends on it.
    """
    table_name = loss_name(loss)
    if table_name is None:
        raise InputValueError(
            f"loss={loss!r} has no rate, expected {', '.join(map(repr, NAMES))}, or a module that equals one of them "
            "such as nn.MSELoss(); fl.dynamics.kernel_descent takes any loss with rate=lr"
        )
    factor, divisors = _FACTORS[table_name]
    step = factor * checked_rate(lr, "lr")
    sizes = {name: _size(value, name) for name, value in (("P", P), ("C", C)) if value is not None}
    missing = [name for name in divisors if name not in sizes]
    if missing:
        raise InputValueError(
            f"loss={loss!r} without {' and '.join(missing)}, expected rate(lr, {loss!r}, "
            f"{', '.join(f'{name}=...' for name in divisors)}): it divides by the number of samples"
            f"{' and outputs' if 'C' in divisors else ''}"
        )
    for name in divisors:
        step /= sizes[name]
    return step


def checked_rate(value: Any, name: str = "rate") -> float:
    """Convert a number or a tensor with one entry to a float, and raise unless it is finite and >= 0."""
    number = checked_number(value, name)
    if number < 0:
        raise InputValueError(f"{name}={value!r}, expected a number >= 0")
    return number


def _size(value: Any, name: str) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if size < 1:
        raise InputValueError(f"{name}={value!r}, expected a number of {'samples' if name == 'P' else 'outputs'} >= 1")
    return size
