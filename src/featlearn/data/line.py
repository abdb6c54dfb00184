"""Points on a line through the origin (Xu & Ziyin 2024, Fig. 1)."""

import torch
from torch import Tensor

from featlearn.data.draws import checked_count, checked_generator, checked_nonnegative, standard_normal
from featlearn.data.linear_teacher import LinearTeacher
from featlearn.data.regression_task import Regression
from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite, checked_number

__all__ = ["line"]


def line(
    samples: int = 100,
    *,
    slope: float = 2.0,
    noise: float = 0.1,
    direction: Tensor | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Regression:
    """Draw positions a from N(0, 1), inputs a n and targets y = 2 a + N(0, 1) / 10 (Xu & Ziyin 2024, App. B.1, Fig. 1).

    `fl.theory.latent.reduce_line(task.x, task.y)` returns the single sample that trains like the whole set (Prop. 1).

    Args:
        samples: P.
        slope: Slope of the target in the position.
        noise: Standard deviation of the noise on the targets.
        direction: n, (d,), nonzero; by default one-dimensional inputs.
        generator: Source of random numbers; seed 0 by default.
        dtype: Dtype of x and y.

    Returns:
        `x` (P, d), `y` (P,), and the exact `target` (slope n . x / |n|^2), `egop` and `covariance` (n n^T).
    """
    rows, size = checked_count(samples, "samples"), checked_nonnegative(noise, "noise")
    rise = checked_number(slope, "slope")
    generator = checked_generator(generator)
    along = torch.ones(1, dtype=torch.float64) if direction is None else checked_finite(direction, "direction")
    if along.dim() != 1 or not float(along.norm() if along.numel() else 0) > 0:
        raise InputValueError(f"direction has shape {tuple(along.shape)}, expected a nonzero vector (d,)")
    along = along.to(generator.device)
    positions = standard_normal(rows, generator=generator)
    y = rise * positions + size * standard_normal(rows, generator=generator)
    x = positions[:, None] * along
    weights = rise * along / along.square().sum()
    return Regression(
        x.to(dtype), y.to(dtype), LinearTeacher(weights), torch.outer(weights, weights), torch.outer(along, along)
    )
