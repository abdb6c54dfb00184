"""Optimal feature evolution step by step, in the conventions of the papers."""

from typing import Any, Literal, NamedTuple

from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_tensor
from featlearn.theory.arguments import checked_number

Convention = Literal["ode", "000-eq5", "000-eq21a", "000-eq21b", "001-eq5", "001-eq26", "001-eq27"]
"""Factor of the derivative of the next loss; see `step`."""

# (multiple of gamma, whether the rate multiplies too)
MULTIPLES: dict[str, tuple[float, bool]] = {
    "ode": (0.25, False),
    "000-eq5": (1.0, False),
    "000-eq21a": (1.0, True),
    "000-eq21b": (0.5, True),
    "001-eq5": (1.0, False),
    "001-eq26": (1.0, True),
    "001-eq27": (0.5, True),
}


class DiscreteStep(NamedTuple):
    """Features and residual after a step."""

    features: Tensor
    """(Q, P)"""
    residual: Tensor
    """(P,) or (P, C)"""


def step(features: Tensor, residual: Tensor, gamma: float, rate: float, convention: Convention = "ode") -> DiscreteStep:
    """One simultaneous step of residual and features (Shan & Bordelon 2021a, Eq. 5, 21, 22; 2021b, Eq. 4, 5, 26-29):

        Delta <- Delta - rate K Delta,   Psi <- Psi - m dL'/dPsi,   L' = |(1 - rate Psi^T Psi) Delta|^2,   K = Psi^T Psi

    with dL'/dPsi = -2 rate Psi (Delta r^T + r Delta^T), r = Delta - rate K Delta. The papers use different factors m:

        convention                  m                 the flow of `solve` has gamma_ode =
        "ode"                       gamma / 4         gamma
        "000-eq5", "001-eq5"        gamma             4 gamma
        "000-eq21a", "001-eq26"     rate gamma        4 rate gamma
        "000-eq21b", "001-eq27"     rate gamma / 2    2 rate gamma

    (`ode_rate`). C = K + gamma_ode Delta Delta^T is conserved by the flow; a step moves it by rate^2 [gamma_ode^2
    (Delta^T K Delta) Delta Delta^T - (gamma_ode / 2)(K^2 Delta Delta^T + Delta Delta^T K^2)] + O(rate^3). Stable for
    rate * (largest eigenvalue of C) < 2.

    Erratum: Shan & Bordelon 2021a, Eq. 22; 2021b, Eq. 28 to 29: half the derivative starts with -2 rate Psi Delta
    Delta^T, not -rate.

    Args:
        features: Psi (Q, P), for one output or for several that share it.
        residual: Delta = f - y, (P,) or (P, C).
        gamma: the feature rate of the convention, >= 0.
        rate: the step, >= 0.
        convention: one of the table.
    """
    psi, delta = checked_tensor(features, "features"), checked_tensor(residual, "residual")
    if psi.dim() != 2 or delta.dim() not in (1, 2) or psi.shape[1] != len(delta):
        raise InputValueError(
            f"features have shape {tuple(psi.shape)} and residual {tuple(delta.shape)}, "
            "expected (Q, P) and (P,) or (P, C)"
        )
    size = checked_number(rate, "rate", least=0.0)
    multiple = ode_rate(gamma, size, convention) / 4
    columns = delta[:, None] if delta.dim() == 1 else delta
    moved = columns - size * (psi.T @ (psi @ columns))
    slope = -2 * size * ((psi @ columns) @ moved.T + (psi @ moved) @ columns.T)
    return DiscreteStep(psi - multiple * slope, moved.reshape(delta.shape))


def ode_rate(gamma: float, rate: float, convention: Convention = "ode") -> float:
    """Return the feature rate of the flow in `solve` that steps with this gamma approach; see the table of `step`.

    The flow is that of Shan & Bordelon 2021b, Sec. 4.1.
    """
    multiple, times_rate = _multiple(convention)
    feature_rate = checked_number(gamma, "gamma", least=0.0)
    return 4 * multiple * feature_rate * (checked_number(rate, "rate", least=0.0) if times_rate else 1.0)


def _multiple(convention: Any) -> tuple[float, bool]:
    if convention not in MULTIPLES:
        raise InputValueError(f"convention={convention!r}, expected one of {', '.join(MULTIPLES)}")
    return MULTIPLES[str(convention)]
