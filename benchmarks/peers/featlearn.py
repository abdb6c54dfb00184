"""This library."""

from torch import Tensor, nn

import featlearn as fl

PACKAGES = ("featlearn", "torch")


def kernel(network: nn.Module, x: Tensor, mode: str) -> Tensor:
    """`fl.ntk` as a user calls it."""
    return fl.ntk(network, x, outputs="mean" if mode == "traced" else mode)  # type: ignore[call-overload, no-any-return]
