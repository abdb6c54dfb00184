"""Two Gaussian classes in one dimension (Xu & Ziyin 2024, Fig. 7)."""

import torch

from featlearn.data.draws import checked_count, checked_generator, checked_nonnegative, standard_normal
from featlearn.data.labeled import Labeled
from featlearn.errors import InputValueError

__all__ = ["two_gaussians"]


def two_gaussians(
    samples: int = 100,
    *,
    means: tuple[float, float] = (0.0, 4.0),
    deviation: float = 1.0,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Labeled:
    """Draw class 0 from N(0, 1) and class 1 from N(4, 1), equally often (Xu & Ziyin 2024, App. B.1, Fig. 7).

    The best boundary is x = 2, and misclassifies 2.3% of the samples. Without biases, as in the paper, a network with a
    homogeneous activation can only separate positive from negative numbers.

    Args:
        samples: P, even. The paper does not state it; the default is that of its Fig. 1.
        means: Means of the two classes.
        deviation: Standard deviation of both classes.
        generator: Source of random numbers; seed 0 by default.
        dtype: Dtype of x.

    Returns:
        ``x`` (P, 1), ``labels`` 0, 1, 0, 1 ... (``signs()`` for -1 and +1), ``centers`` (2, 1).
    """
    rows, size = checked_count(samples, "samples"), checked_nonnegative(deviation, "deviation")
    if rows % 2:
        raise InputValueError(f"samples={rows}, expected an even number")
    if len(means) != 2 or not all(abs(mean) < float("inf") for mean in means):
        raise InputValueError(f"means={means!r}, expected two finite numbers, one per class")
    generator = checked_generator(generator)
    centers = torch.tensor(means, dtype=torch.float64, device=generator.device)[:, None]
    labels = torch.arange(rows, device=generator.device) % 2
    x = centers[labels] + size * standard_normal(rows, 1, generator=generator)
    return Labeled(x.to(dtype), labels, 2, "two gaussians", centers)
