"""A data set that violates the neural feature ansatz early in training.

See Beaglehole et al. 2024, Sec. 4.2 and App. F.
"""

from typing import Literal

import torch
from torch import Tensor

from featlearn.data.draws import checked_count, checked_generator, standard_normal
from featlearn.data.regression_task import Regression
from featlearn.errors import InputValueError

__all__ = ["alignment_reversing"]


def alignment_reversing(
    samples: int,
    dimension: int,
    balance: float,
    *,
    variant: Literal["printed", "corrected"] = "corrected",
    spread: float = 0.5,
    noise: float = 1e-2,
    offset: float = 1e-5,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
) -> Regression:
    """Draw two subsets, X1 with target 1 and X2 with target 0, such that X2^T X2 is about (X1^T X1)^-2.

    See Beaglehole et al. 2024, App. F.

    n1 = round(balance * samples) rows X1 are drawn from N(0, 1 1^T + spread I). X2 = V2 S1^-1 U1^T, with S1 and U1
    the singular values and vectors of X1^T X1 and V2 the left singular vectors of n2 further rows of the same
    distribution. Then noise * N(0, 1) is added to all inputs and `offset` to all targets. Only the leading r = min(n1,
    n2, d) directions are used: X1^T X1 has rank at most n1, so S1^-1 does not exist as printed, and the shapes of V2
    S1^-1 U1^T would not match.

    Args:
        samples: n, at least 2.
        dimension: d.
        balance: gamma of the paper, in (0, 1]. X2 may be empty; n1 is at least 1.
        variant: ``"printed"`` follows the paper, in the only reading that does not depend on rounding. It does *not*
            reverse the alignment: the spike 1 1^T, of size n1 d, makes both matrices rank one, and the correlation of
            the second derivatives is 1.000 for every balance (erratum of App. F). ``"corrected"`` first divides X1 by
            its largest singular value. It is not from the paper: of eleven variants, it shows a clear dip of the
            correlation (about 0.6 at balance 0.05 for n = d = 1024, at 0.2 for 256). The position and depth of the dip
            cannot be compared with the figure of the paper.
        spread: epsilon_1 of the paper.
        noise: epsilon_2 of the paper.
        offset: Constant added to the targets.
        generator: Source of random numbers; seed 0 by default.
        dtype: Dtype of x and y; float64 by default, because X2 inverts small singular values.

    Returns:
        `x` (n, d), X1 in its first n1 rows, and `y` (n,). There is no target function.
    """
    rows, columns = checked_count(samples, "samples"), checked_count(dimension, "dimension")
    if not 0 < balance <= 1 or rows < 2:
        raise InputValueError(f"samples={rows} and balance={balance!r}, expected at least 2 and a share in (0, 1]")
    if variant not in ("printed", "corrected"):
        raise InputValueError(f"variant is {variant!r}, expected 'printed' or 'corrected'")
    if not spread > 0 or not noise >= 0:
        raise InputValueError(f"spread={spread!r} and noise={noise!r}, expected spread > 0 and noise >= 0")
    generator = checked_generator(generator)
    count = max(1, round(balance * rows))
    first = _spiked(count, columns, spread, generator)
    second = _spiked(rows - count, columns, spread, generator)
    if variant == "corrected":
        first = first / torch.linalg.matrix_norm(first, 2)
    x = torch.cat([first, _inverse_square_root(first, second)])
    x = x + noise * standard_normal(rows, columns, generator=generator)
    y = torch.cat([torch.ones(count), torch.zeros(rows - count)]).to(x) + offset
    return Regression(x.to(dtype), y.to(dtype))


def _spiked(rows: int, columns: int, spread: float, generator: torch.Generator) -> Tensor:
    """Draw rows of N(0, 1 1^T + spread I)."""
    common = standard_normal(rows, 1, generator=generator)
    drawn: Tensor = common + spread**0.5 * standard_normal(rows, columns, generator=generator)
    return drawn


def _inverse_square_root(first: Tensor, second: Tensor) -> Tensor:
    """Return X2 = V2 S1^-1 U1^T, with X2^T X2 = (X1^T X1)^-2 on the leading directions."""
    rank = min(*first.shape, len(second))
    _, sizes, right = torch.linalg.svd(first, full_matrices=False)
    left = torch.linalg.svd(second, full_matrices=False).U
    inverse: Tensor = left[:, :rank] @ (right[:rank] / sizes[:rank, None].square())
    return inverse
