"""Powers of the width, fitted to sizes over widths and seeds."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from featlearn.linalg.estimate import Estimate

UNKNOWN = Estimate(math.nan, math.nan, 1)


def power(values: Tensor, widths: Sequence[int]) -> Estimate:
    """The slope of log size against log width, by least squares over all widths and seeds, `values` (widths, seeds).

    Its standard error comes from what the line leaves over, so that it holds the spread of seeds and a bend of the
    curve. nan where sizes are zero or not finite at most widths: a readout that starts at zero has no power.
    """
    y = values.double().log()
    x = torch.tensor(widths, dtype=torch.float64).log()[:, None].expand_as(y)
    known = torch.isfinite(y)
    if int(known.any(1).sum()) < 2:
        return UNKNOWN
    x, y = x[known], y[known]
    x = x - x.mean()
    spread = float(x.square().sum())
    slope = float((x * y).sum()) / spread
    left = y - y.mean() - slope * x
    freedom = len(y) - 2
    error = math.sqrt(float(left.square().sum()) / freedom / spread) if freedom > 0 else math.nan
    return Estimate(slope, error, values.shape[1])


def product_power(parts: Sequence[tuple[float, Tensor]], widths: Sequence[int]) -> Estimate:
    """The power of a product of sizes, each to a factor: fitted as one, so that seeds they share cancel."""
    total = sum((factor * values.double().log() for factor, values in parts), torch.zeros(()))
    return power(torch.as_tensor(total).exp(), widths)
