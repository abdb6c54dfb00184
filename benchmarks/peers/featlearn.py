"""This library."""

from collections.abc import Callable

from torch import Tensor, nn

import featlearn as fl

PACKAGES = ("featlearn", "torch")


def kernel(network: nn.Module, x: Tensor, mode: str) -> Tensor:
    """`fl.ntk` as a user calls it once."""
    return fl.ntk(network, x, outputs="mean" if mode == "traced" else mode)  # type: ignore[call-overload, no-any-return]


def prepared(network: nn.Module, x: Tensor, mode: str) -> Callable[[], Tensor]:
    """A Session, as a loop that measures again and again holds one."""
    session = fl.Session(network, x)
    return lambda: session.ntk(outputs="mean" if mode == "traced" else mode)  # type: ignore[arg-type, return-value]
