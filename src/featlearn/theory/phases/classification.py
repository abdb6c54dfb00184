"""In which phase a scaling limit trains (Xu & Ziyin 2024, Theorem 2)."""

import math
from enum import StrEnum

from featlearn.errors import InputTypeError
from featlearn.theory.phases.exponents import Exponents

EQUAL = 1e-9
"""Exponents that differ by less are the same: sums of decimal fractions round."""


class Phase(StrEnum):
    """Behavior of training as kappa grows."""

    FROZEN = "frozen"
    """the learning time diverges"""
    UNSTABLE = "unstable"
    """the learning time vanishes: steps of a fixed size overshoot"""
    KERNEL = "kernel"
    """the NTK is of order one and stays as it was"""
    LEARNING = "learning"
    """the NTK changes by as much as its own size: feature learning"""


def classify(exponents: Exponents, balanced_start: bool = True, *, correlated_target: bool = True) -> Phase:
    """Return the phase of a scaling limit (Xu & Ziyin 2024, Eq. 15, 16, 36, 37 and Theorem 2).

    With A the feature term and B the kernel term of the exponents: frozen for max(A, B) < 0, unstable for
    max(A, B) > 0; at max(A, B) = 0 kernel if B = 0, A < 0 and P / Q -> 1, else learning. Erratum: the summaries of Sec.
    4 and 4.1 print gamma where 2 gamma belongs, and would reject the NTK parametrization itself.

    Args:
        exponents: the limit.
        balanced_start: whether P / Q -> 1, which exponents alone cannot say at a fixed width: there the kernel of a
            generic start moves by a part that never goes away. `start_is_balanced` has the usual reasons for it.
        correlated_target: False for y = 0, or samples on a line whose targets are uncorrelated with them: A is minus
            infinity.
    """
    if not isinstance(exponents, Exponents):
        raise InputTypeError(
            f"exponents is {type(exponents).__name__}, expected phases.Exponents; those of the usual schemes are in "
            "phases.TABLE_1"
        )
    A = exponents.feature_term if correlated_target else -math.inf
    B = exponents.kernel_term
    if max(A, B) < -EQUAL:
        return Phase.FROZEN
    if max(A, B) > EQUAL:
        return Phase.UNSTABLE
    return Phase.KERNEL if A < -EQUAL and balanced_start else Phase.LEARNING


def start_is_balanced(exponents: Exponents, *, independent: bool = True, zero_output: bool = False) -> bool:
    """Return whether P / Q -> 1 (Xu & Ziyin 2024, the three cases below Theorem 2).

    P - Q = sqrt(rate_u rate_w) u . W x / (rho d) vanishes against P + Q if (i) the width grows and u and W are
    `independent`; (ii) the output is zero at the start (`zero_output`); (iii) one layer dominates:
    u + rate_w != w + rate_u.
    """
    dominated = abs(exponents.u + exponents.rate_w - exponents.w - exponents.rate_u) > EQUAL
    return zero_output or dominated or (independent and exponents.d > EQUAL)
