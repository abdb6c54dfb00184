"""Fit powers of the width to sizes over widths and seeds."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from featlearn.linalg.estimate import Estimate

UNKNOWN = Estimate(math.nan, math.nan, 1)


def power(values: Tensor, widths: Sequence[int]) -> Estimate:
    """Fit the slope of log size against log width, by least squares over `values` (widths, seeds).

    The standard error comes from the residuals, and thus includes the spread over seeds and curvature. nan if sizes are
    zero or not finite at most widths, as for a readout that starts at zero.
    """
    y = values.double().log()
    x = torch.tensor(widths, dtype=torch.float64).log()[:, None].expand_as(y)
    finite = torch.isfinite(y)
    if int(finite.any(1).sum()) < 2:
        return UNKNOWN
    x, y = x[finite], y[finite]
    x = x - x.mean()
    spread = float(x.square().sum())
    slope = float((x * y).sum()) / spread
    residuals = y - y.mean() - slope * x
    freedom = len(y) - 2
    error = math.sqrt(float(residuals.square().sum()) / freedom / spread) if freedom > 0 else math.nan
    return Estimate(slope, error, values.shape[1])


def product_power(parts: Sequence[tuple[float, Tensor]], widths: Sequence[int]) -> Estimate:
    """Fit the power of a product of sizes with exponents, jointly, so that common variation over seeds cancels."""
    total = sum((factor * values.double().log() for factor, values in parts), torch.zeros(()))
    return power(torch.as_tensor(total).exp(), widths)
