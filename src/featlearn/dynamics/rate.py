"""From a trainer's learning rate and loss to the rate of df/dt = -rate K (f - y)."""

from typing import Literal

from featlearn.errors import InputValueError

Loss = Literal["sum-half", "mean", "mean-half", "mean-over-outputs"]


def rate(lr: float, loss: Loss, P: int = 1, C: int = 1) -> float:
    """The rate at which gradient descent with step `lr` moves the outputs of P samples with C outputs.

    | loss | what is differentiated | rate |
    | --- | --- | --- |
    | `"sum-half"` | 1/2 sum (f - y)^2 (000, 001) | lr |
    | `"mean"` | 1/P sum (f - y)^2 | 2 lr / P |
    | `"mean-half"` | 1/(2P) sum (f - y)^2 (002) | lr / P |
    | `"mean-over-outputs"` | 1/(P C) sum (f - y)^2, `nn.MSELoss()` | 2 lr / (P C) |

    For cross-entropy, `nn.CrossEntropyLoss()` (a mean over samples) is `"mean-half"`:
    df/dt = -lr / P K (softmax(f) - y).
    """
    if not P >= 1 or not C >= 1:
        raise InputValueError(f"P={P!r} and C={C!r}, expected numbers of samples and outputs >= 1")
    factors = {"sum-half": 1.0, "mean": 2.0 / P, "mean-half": 1.0 / P, "mean-over-outputs": 2.0 / (P * C)}
    if loss not in factors:
        raise InputValueError(f"loss={loss!r}, expected {', '.join(map(repr, factors))}")
    return lr * factors[loss]
