"""Time of `fl.ntk` for n scalar parameters in one `cat`, and for one layer called n times, against n.

    python benchmarks/many_uses.py

Doubling n should double the time: the last column is the ratio to the row above, and stays near 2.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import featlearn as fl


class Concatenated(nn.Module):
    """sum_j tanh(x_j w_j), with each w_j a parameter without axes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scalars = nn.ParameterList([nn.Parameter(torch.randn(())) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        """(P, 1)"""
        weight = torch.cat([scalar[None] for scalar in self.scalars])
        return torch.tanh(x * weight).sum(1, keepdim=True)


class Repeated(nn.Module):
    """One layer called `count` times."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 4), count

    def forward(self, x: Tensor) -> Tensor:
        """(P, 1)"""
        for _ in range(self.count):
            x = torch.tanh(self.layer(x))
        return x[:, :1]


def seconds(model: nn.Module, x: Tensor) -> float:
    """CPU seconds of a call, the best of three."""
    times = []
    for _ in range(3):
        start = time.process_time()
        fl.ntk(model, x)
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    """Print one table for each network."""
    torch.set_num_threads(1)
    kinds: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Tensor]]] = {
        "cat of n scalars": (Concatenated, lambda count: torch.randn(6, count)),
        "one layer n times": (Repeated, lambda count: torch.randn(6, 4)),
    }
    for name, (network, inputs) in kinds.items():
        before = float("nan")
        for count in (125, 250, 500, 1000):
            taken = seconds(network(count), inputs(count))
            print(f"{name:18} n = {count:4}: {taken:6.3f} s, {taken / before:4.1f} times")
            before = taken


if __name__ == "__main__":
    main()
