"""From a trainer's learning rate and loss to the rate of df/dt = -rate K (f - y)."""

import operator
from typing import Any, Literal

from featlearn.errors import InputValueError
from featlearn.shapes import checked_number

Loss = Literal["sum-half", "mean", "mean-half", "mean-over-outputs"]

# the sizes that a convention divides by
NEEDS: dict[str, tuple[str, ...]] = {
    "sum-half": (),
    "mean": ("P",),
    "mean-half": ("P",),
    "mean-over-outputs": ("P", "C"),
}


def rate(lr: float, loss: Loss, P: int | None = None, C: int | None = None) -> float:
    """The rate at which gradient descent with step `lr` moves the outputs of P samples with C outputs.

    | loss | what is differentiated | rate |
    | --- | --- | --- |
    | `"sum-half"` | 1/2 sum (f - y)^2 (Shan & Bordelon 2021a, 2021b) | lr |
    | `"mean"` | 1/P sum (f - y)^2 | 2 lr / P |
    | `"mean-half"` | 1/(2P) sum (f - y)^2 (Atanasov et al. 2022) | lr / P |
    | `"mean-over-outputs"` | 1/(P C) sum (f - y)^2, `nn.MSELoss()` | 2 lr / (P C) |

    P and C must be given where the rate has them: C = 1 for a network with one output.

    For cross-entropy, `nn.CrossEntropyLoss()` (a mean over samples) is `"mean-half"`:
    df/dt = -lr / P K (softmax(f) - y).
    """
    if not isinstance(loss, str) or loss not in NEEDS:
        raise InputValueError(f"loss={loss!r}, expected {', '.join(map(repr, NEEDS))}")
    step = checked_rate(lr, "lr")
    sizes = {name: _size(value, name) for name, value in (("P", P), ("C", C)) if value is not None}
    missing = [name for name in NEEDS[loss] if name not in sizes]
    if missing:
        raise InputValueError(
            f"loss={loss!r} without {' and '.join(missing)}, expected rate(lr, {loss!r}, "
            f"{', '.join(f'{name}=...' for name in NEEDS[loss])}): it divides by the number of samples"
            f"{' and outputs' if 'C' in NEEDS[loss] else ''}"
        )
    for name in NEEDS[loss]:
        step /= sizes[name]
    return step if loss in ("sum-half", "mean-half") else 2 * step


def checked_rate(value: Any, name: str = "rate") -> float:
    """A finite number >= 0; a tensor with one entry counts, on any device."""
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
