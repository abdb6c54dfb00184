"""Effect of training on the two layers: rotation, rescaling, or none (Xu & Ziyin 2024, Sec. 3.2 to 3.4)."""

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.theory.latent.latent_network import length
from featlearn.theory.latent.start import Start

PARALLEL = 1e-12
"""Sine of the angle between p and q up to which the layers count as parallel: rounding of W x."""


class Mechanism(StrEnum):
    """Change of the angle between the layers."""

    ALIGNMENT = "alignment"
    """the output is too small, or has the wrong sign: zeta moves toward the sign of scale * y"""
    DISALIGNMENT = "disalignment"
    """the output is too large: zeta moves away from the sign of scale * y"""
    RESCALING = "rescaling"
    """u and W x are parallel and stay so; only their lengths change"""
    STATIONARY = "stationary"
    """nothing moves"""


class Rescaling(StrEnum):
    """Change of the norms of u and W x, which grow and shrink together."""

    INCREASE = "increase"
    DECREASE = "decrease"
    DECREASE_THEN_INCREASE = "decrease then increase"
    UNCHANGED = "unchanged"


class Attribution(NamedTuple):
    """From start to end; the first is the sum of the next three."""

    log_output: Tensor
    """ln |f(inf) / f(0)|; the logarithms are nan where f changes its sign, or starts or ends at 0"""
    log_u: Tensor
    """change of ln |u|"""
    log_Wx: Tensor
    """change of ln |W x|"""
    log_layer_alignment: Tensor
    """change of ln |zeta|"""
    layer_alignment: Tensor
    """zeta(inf) - zeta(0), signed; monotone in between, which |zeta| need not be"""
    ntk: Tensor
    """K(inf) / K(0) on the data: how far the kernel moved, 1 in the kernel regime"""


def mechanism_of(problem: Start) -> Mechanism:
    """Stationary and parallel starts first, then whether the output has to grow.

    Equivalent to alpha_+ > 1 (Eq. 13), which is scale (y - f(0)) > 0 and hence never depends on the learning rates.
    """
    if not problem.moves:
        return Mechanism.STATIONARY
    if _parallel(problem.p, problem.q):
        return Mechanism.RESCALING
    # for y = 0 every output is too large
    too_small = problem.y * float(problem.residual) < 0
    return Mechanism.ALIGNMENT if too_small else Mechanism.DISALIGNMENT


def rescaling_of(problem: Start, final_output: Tensor) -> Rescaling:
    """Return the four cases of Sec. 3.3, by the output: d|u|^2/dt = -4 rate_u (f - y) f, and the same for W x.

    f moves monotonically from f(0) to its end, so the norms grow while |f| does. The same classes follow from alpha_+
    and alpha* = sqrt(Q / P), in this order: alpha_+ = 1 unchanged; (alpha_+ - 1)(1 - alpha*) >= 0 increase;
    (alpha_+ - alpha*)(1 - alpha*) >= 0 decrease; else decrease then increase. Erratum: the print has P = Q as
    "increase" also where nothing moves. By the output they also hold for a learning rate of zero, where alpha = 1.
    """
    if not problem.moves:
        return Rescaling.UNCHANGED
    first, last = float(problem.output), float(final_output)
    if first * (last - first) >= 0:
        return Rescaling.INCREASE
    return Rescaling.DECREASE if first * last >= 0 else Rescaling.DECREASE_THEN_INCREASE


def ends_in_saddle(problem: Start) -> bool:
    """Return whether training ends at u = W x = 0 with the loss y^2: P = 0 with scale y > 0, Q = 0 with scale y < 0."""
    s = float(problem.s)
    gone = [float(part) == 0 for part in (problem.root_a, problem.root_b)]
    return (gone[0] and s > 0) or (gone[1] and s < 0)


def _parallel(p: Tensor, q: Tensor) -> bool:
    """Return whether 4 P Q = c^2, by the angle between p and q, which does not depend on their size."""
    sizes = [length(part) for part in (p, q)]
    if min(float(size) for size in sizes) == 0:
        return True
    first, second = (part / size for part, size in zip((p, q), sizes, strict=True))
    chord = torch.minimum(length(first - second), length(first + second))
    return float(chord) <= PARALLEL
