"""Gaussian classes around random centers (Shan & Bordelon 2021b, Sec. 6.2)."""

from typing import Literal

import torch
from torch import Tensor

from featlearn.data.draws import checked_count, checked_generator, checked_nonnegative, standard_normal
from featlearn.data.labeled import Labeled
from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite

__all__ = ["gaussian_mixture"]


def gaussian_mixture(
    samples: int,
    dimension: int,
    classes: int = 10,
    *,
    variance: float = 0.01,
    spread: Literal["total", "coordinate"] = "total",
    orthogonal: bool = False,
    centers: Tensor | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Labeled:
    """Draw equally many samples mu_c + noise around each of C centers mu_c on the unit sphere.

    See Shan & Bordelon 2021b, App. E.5, Fig. 7.

    Args:
        samples: P, a multiple of the number of classes; 500 in the paper.
        dimension: d; 1000 in the paper.
        classes: C.
        variance: sigma^2 of the noise, in the sense of `spread`.
        spread: ``"total"``: E|noise|^2 = sigma^2, that is N(0, sigma^2 / d) for each coordinate. ``"coordinate"``: N(0,
            sigma^2) for each. The paper prints N(mu, sigma^2 I) with sigma^2 = 0.01: the noise would be sqrt(10) times
            as long as the centers at d = 1000. The small-noise theory of the paper needs the default.
        orthogonal: Make the centers exactly orthogonal, as the theory assumes (needs C <= d). Otherwise they are
            uniform on the sphere, and orthogonal up to 1 / sqrt(d).
        centers: mu, (C, d); drawn before the noise by default. ``centers=task.centers`` draws more samples of the same
            task.
        generator: Source of random numbers; seed 0 by default.
        dtype: Dtype of x.

    Returns:
        ``x`` (P, d), ``labels`` 0, 1, ..., C - 1, 0, 1, ..., ``centers`` (C, d) and ``one_hot()`` targets.
    """
    rows, columns, count = (
        checked_count(value, name)
        for value, name in ((samples, "samples"), (dimension, "dimension"), (classes, "classes"))
    )
    size = checked_nonnegative(variance, "variance")
    if rows % count or spread not in ("total", "coordinate") or (orthogonal and count > columns):
        raise InputValueError(
            f"samples={rows}, classes={count}, dimension={columns}, spread={spread!r} and orthogonal={orthogonal}, "
            "expected samples divisible by classes, spread 'total' or 'coordinate', and classes <= dimension for "
            "orthogonal centers"
        )
    generator = checked_generator(generator)
    means = _centers(centers, count, columns, orthogonal, generator)
    deviation = (size / columns if spread == "total" else size) ** 0.5
    labels = torch.arange(rows, device=means.device) % count
    x = means[labels] + deviation * standard_normal(rows, columns, generator=generator)
    return Labeled(x.to(dtype), labels, count, "gaussian mixture", means)


def _centers(
    centers: Tensor | None, count: int, dimension: int, orthogonal: bool, generator: torch.Generator
) -> Tensor:
    if centers is not None:
        means = checked_finite(centers, "centers").to(generator.device)
        if means.shape != (count, dimension):
            raise InputValueError(f"centers have shape {tuple(means.shape)}, expected (C, d) = ({count}, {dimension})")
        return means
    drawn = standard_normal(count, dimension, generator=generator)
    if orthogonal:
        drawn = torch.linalg.qr(drawn.mT).Q.mT.contiguous()
    unit: Tensor = drawn / drawn.norm(dim=1, keepdim=True)
    return unit
