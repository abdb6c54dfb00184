"""Optimal feature evolution on power-law spectra."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.theory.arguments import Numbers, checked_number, checked_time_axis

EULER = 0.5772156649015329


class PowerLawExponents(NamedTuple):
    """Exponents after feature evolution, for lambda_k = k^-b and (u_k . y)^2 = k^-a."""

    eigenvalues: float
    """b: c_k ~ k^-b, unchanged."""
    task: float
    """a': (v_k . y)^2 ~ k^-a'."""
    loss: float
    """L ~ t^-loss."""


def power_law_exponents(a: float, b: float) -> PowerLawExponents:
    """Exponents of the final kernel and of the loss, where K0 has lambda_k = k^-b and the task (u_k . y)^2 = k^-a.

    With kappa = (a - 1) / b, the exponent of the loss under a frozen kernel: a' = max(a, 2 b + 2 - a), larger than a
    exactly where kappa < 1 (the task is outside the RKHS of K0); the loss falls as t^-1 for kappa < 1, whatever a and
    b, and as t^-kappa otherwise.

    Erratum: Shan & Bordelon 2021a, p. 4 and App. A.1; 2021b, App. B give t^-((a' - 1) / b) = t^-(2 - kappa), which
    drops Delta Delta^T from K = C - gamma Delta Delta^T; it is never negligible there. a > 1, b > 0.
    """
    first, second = checked_number(a, "a", above=1.0), checked_number(b, "b", above=0.0)
    kappa = (first - 1) / second
    return PowerLawExponents(second, max(first, 2 * second + 2 - first), max(kappa, 1.0))


def power_law_loss(times: Numbers, a: float, b: float, gamma: float, *, rate: float = 1.0) -> Tensor:
    """(T,): the loss at large times for lambda_k = k^-b, (u_k . y)^2 = k^-a, k = 1, 2, ...

    See Shan & Bordelon 2021a, Sec. 4 (corrected).

    With kappa = (a - 1) / b and the loss of the frozen kernel L_0 = Gamma(kappa) (2 rate t)^-kappa / b:

        gamma = 0:    L_0
        kappa < 1:    (1 - kappa) / (2 rate gamma t)
        kappa > 1:    L_0 / (1 + gamma zeta(a - b))
        kappa = 1:    1 / (2 rate t (b + gamma (ln(2 rate t) + (1 + b) 0.5772)))

    Leading terms for 1 << 2 rate t << P^b; for kappa < 1 features matter once gamma Gamma(kappa) Gamma(1 - kappa) (2
    rate t)^(1 - kappa) / b >> 1, and corrections fall with the inverse of that; for kappa = 1 with the square of the
    logarithm. nan at t = 0, where the leading term says nothing. The papers' exponent is wrong; see
    `power_law_exponents`. From the Laplace transform of D in `solve`, which is 1 / (p (1 + gamma sum_k k^-a / (p +
    k^-b))).

    Args:
        times: (T,), >= 0, in any order.
        a: decay of the task's power, > 1.
        b: decay of the eigenvalues, > 0.
        gamma: the feature rate of `solve`, >= 0.
        rate: as in `solve`.
    """
    moments = checked_time_axis(times) * checked_number(rate, "rate", least=0.0)
    moments = torch.where(moments == 0, torch.nan, moments)
    task, spectrum = checked_number(a, "a", above=1.0), checked_number(b, "b", above=0.0)
    feature_rate, kappa = checked_number(gamma, "gamma", least=0.0), (task - 1) / spectrum
    frozen = torch.exp(math.lgamma(kappa) - math.log(spectrum) - kappa * (2 * moments).log())
    if feature_rate == 0:
        return frozen
    if kappa < 1:
        return (1 - kappa) / (2 * feature_rate * moments)
    if kappa > 1:
        norm = float(torch.special.zeta(torch.tensor(task - spectrum, dtype=torch.float64), 1.0))
        return frozen / (1 + feature_rate * norm)
    grown = (2 * moments).log() + (1 + spectrum) * EULER
    return 1 / (2 * moments * (spectrum + feature_rate * grown))
