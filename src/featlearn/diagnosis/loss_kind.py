"""The losses that a diagnosis can replay: squared error, cross-entropy, and binary cross-entropy of each output."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


class LossKind(NamedTuple):
    """A loss whose derivative by the outputs is predictions(f) - y, up to a factor."""

    name: Literal["mse", "cross-entropy", "bce"]
    """as `fl.dynamics.kernel_descent` calls it"""
    scalar: str
    """end of the name under which a run records it"""
    predictions: Callable[[Tensor], Tensor]
    mean: Callable[[Tensor, Tensor], Tensor]
    """(f, y) of shape (P, C) -> the loss, in the unit of the recorded one"""

    @property
    def logistic(self) -> bool:
        """Whether its descent has no closed form: outputs grow without end, and are integrated."""
        return self.name != "mse"


SQUARE = LossKind("mse", "loss", lambda f: f, lambda f, y: (f - y).square().sum(1).mean())
CROSS_ENTROPY = LossKind(
    "cross-entropy", "cross_entropy", lambda f: f.softmax(1), lambda f, y: -(y * f.log_softmax(1)).sum(1).mean()
)
BINARY = LossKind("bce", "binary_cross_entropy", lambda f: f.sigmoid(), binary_cross_entropy_with_logits)
KINDS = (SQUARE, CROSS_ENTROPY, BINARY)


def declared(convention: object) -> LossKind | None:
    """Return the loss that was passed to `fl.watch`; None if there was none, or a function without a name."""
    if not isinstance(convention, str):
        return None
    return next((kind for kind in KINDS if kind.name == convention), SQUARE)
