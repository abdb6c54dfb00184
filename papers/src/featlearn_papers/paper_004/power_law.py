"""Exponents of power laws."""

from typing import Any

import numpy

from featlearn_papers.frame.runs import Array


def exponent(x: Any, values: Array, axis: int = -1) -> Array:
    """Slope of log `values` over log `x` (n,), by least squares along an axis of length n."""
    logs = numpy.log(x)
    line = (logs - logs.mean()) / ((logs - logs.mean()) ** 2).sum()
    slopes: Array = numpy.tensordot(numpy.log(values), line, axes=(axis, 0))
    return slopes
