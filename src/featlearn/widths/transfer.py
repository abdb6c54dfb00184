"""Find the best learning rate at each size by short runs: does it transfer?"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn import losses
from featlearn.linalg.estimate import Estimate
from featlearn.network.inputs import Inputs
from featlearn.widths.fits import power
from featlearn.widths.networks import MakeModel, MakeOptimizer, create, explain_errors, scale_rates
from featlearn.widths.passes import call_model

FACTORS = tuple(2.0**k for k in range(-5, 6))
"""Factors on all learning rates that are tried first."""
MOST_EXTENSIONS = 4
LAST = 0.2
"""Share of the steps over which the final loss is averaged."""


@dataclass(frozen=True)
class RateTransfer:
    """Best learning rates by size."""

    factors: tuple[float, ...]
    """factors on the learning rates of the user's optimizer"""
    losses: Tensor
    """final training losses, (sizes, seeds, factors); infinite if training diverged"""
    best: Tensor
    """best factor by size and seed, (sizes, seeds), between the points of the grid by a parabola"""
    drift: Estimate
    """power of the size by which the best learning rate changes; 0 if it transfers"""
    sizes: tuple[int, ...]
    steps: int
    cost: str
    """the cost estimate, made before the sweep"""
    along: str

    @property
    def transfers(self) -> bool:
        """Whether the best rate is constant within a power of 0.2 and two standard errors."""
        error = float(self.drift.stderr)
        return abs(float(self.drift)) <= max(0.2, 0.0 if math.isnan(error) else 2 * error)

    def __str__(self) -> str:
        best = ", ".join(f"{size}: x{_mean(row):.2g}" for size, row in zip(self.sizes, self.best, strict=True))
        word = "transfers" if self.transfers else "drifts"
        error = float(self.drift.stderr)
        return f"learning rate: the best one {word}, as {self.along}^({float(self.drift):+.2f} ± {error:.2f}) ({best})"

    @property
    def entries(self) -> dict[str, Any]:
        """Content of `WidthCheck.to_json`."""
        drift = {"value": float(self.drift), "stderr": _finite(float(self.drift.stderr))}
        losses = [[[_finite(value) for value in seed] for seed in size] for size in self.losses.tolist()]
        return {"factors": list(self.factors), "losses": losses, "best": self.best.tolist(), "drift": drift} | {
            "transfers": self.transfers,
            "cost": self.cost,
        }

    def plot(self, ax: Any = None) -> Any:
        """Plot the final loss over the learning rate, with a curve per size and its best rate; return the axes."""
        import matplotlib.pyplot as plt

        ax = plt.subplots(figsize=(3.25, 2.6), layout="constrained")[1] if ax is None else ax
        colors = plt.get_cmap("viridis")(torch.linspace(0, 0.9, len(self.sizes)).tolist())
        for size, color, values, best in zip(self.sizes, colors, self.losses, self.best, strict=True):
            mean = values.log().mean(0).exp()
            shown = torch.isfinite(mean)
            ax.plot(torch.tensor(self.factors)[shown], mean[shown], "o-", color=color, markersize=2.5, label=str(size))
            ax.axvline(_mean(best), color=color, linewidth=0.6, linestyle=":")
        ax.set(xscale="log", yscale="log", xlabel="learning rate / yours", ylabel=f"loss after {self.steps} steps")
        ax.set_title(f"best rate: {self.along}^({float(self.drift):+.2f} ± {float(self.drift.stderr):.2f})", loc="left")
        ax.legend(title=self.along, fontsize=6, title_fontsize=6, frameon=False)
        return ax


def transfer_cost(sizes: Sequence[int], seeds: int, steps: int, parameters: Sequence[int], samples: int) -> str:
    """Return the cost estimate of a sweep in runs, steps, and multiplications."""
    runs = len(FACTORS) * seeds
    work = sum(6.0 * count * samples * steps * runs for count in parameters)
    extra = 1 + MOST_EXTENSIONS / len(FACTORS)
    return (
        f"{runs * len(sizes)} to {math.ceil(runs * len(sizes) * extra)} runs of {steps} steps, about {work:.1e} "
        "multiplications per position"
    )


def sweep_rates(
    make: MakeModel,
    optimizer: MakeOptimizer | None,
    x: Inputs,
    y: Tensor,
    loss: losses.LossFunction,
    sizes: Sequence[int],
    *,
    seeds: int,
    steps: int,
    along: str,
    cost: str,
    progress: Callable[[], None],
) -> RateTransfer:
    """Train at every size with every factor on the learning rates, and fit how the best factor scales."""

    def final_loss(size: int, seed: int, factor: float) -> float:
        model, model_optimizer = create(make, optimizer, size, seed)
        scale_rates(model_optimizer, factor)
        values = []
        with explain_errors(size, along):
            for _ in range(steps):
                model_optimizer.zero_grad()
                value = loss(call_model(model, x), y)
                values.append(float(value.detach()))
                if not math.isfinite(values[-1]) or values[-1] > 1e3 * max(values[0], 1e-30):
                    return math.inf
                value.backward()
                model_optimizer.step()
        last = values[-max(1, round(LAST * steps)) :]
        return sum(last) / len(last)

    table: dict[float, list[list[float]]] = {}

    def try_factor(factor: float) -> None:
        table[factor] = [[final_loss(size, seed, factor) for seed in range(seeds)] for size in sizes]
        progress()

    for factor in FACTORS:
        try_factor(factor)
    for _ in range(MOST_EXTENSIONS):  # until no optimum lies at an end of the grid
        factors = sorted(table)
        places = {min(range(len(factors)), key=lambda k: _mean(table[factors[k]][n])) for n in range(len(sizes))}
        if 0 in places:
            try_factor(factors[0] / 2)
        elif len(factors) - 1 in places:
            try_factor(factors[-1] * 2)
        else:
            break
    tried = tuple(sorted(table))
    values = torch.tensor([table[factor] for factor in tried]).permute(1, 2, 0)
    best = torch.tensor([[_minimum(tried, row) for row in seed_rows] for seed_rows in values.tolist()])
    return RateTransfer(tried, values, best, power(best, sizes), tuple(sizes), steps, cost, along)


def _minimum(factors: Sequence[float], values: Sequence[float]) -> float:
    """Return the factor of the smallest loss, by a parabola through the logarithms of three points."""
    k = min(range(len(values)), key=lambda n: values[n])
    if not 0 < k < len(values) - 1 or not math.isfinite(values[k + 1]) or min(values[k - 1 : k + 2]) <= 0:
        return factors[k]
    left, middle, right = (math.log(value) for value in values[k - 1 : k + 2])
    curvature = left - 2 * middle + right
    return factors[k] * 2 ** (0.5 * (left - right) / curvature if curvature > 0 else 0.0)


def _mean(values: Any) -> float:
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
