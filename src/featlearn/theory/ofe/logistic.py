"""The cases of optimal feature evolution that are logistic curves."""

from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.theory.arguments import Numbers, checked_numbers, checked_times


class Scalar(NamedTuple):
    """One sample and one feature along time."""

    residual_square: Tensor
    """Delta^2"""
    feature_square: Tensor
    """psi^2, the kernel."""
    conserved: Tensor
    """C = psi^2 + gamma Delta^2"""


def scalar(times: Numbers, psi0: Numbers, residual0: Numbers, gamma: Numbers, *, rate: Numbers = 1.0) -> Scalar:
    """One sample with one feature: dDelta/dt = -rate psi^2 Delta, dpsi/dt = rate gamma psi Delta^2.

    See Shan & Bordelon 2021a, Eq. 24 to 27; 2021b, Eq. 31 to 34.

        Delta^2 = C Delta_0^2 / (gamma Delta_0^2 + psi_0^2 exp(2 C rate t)),
        psi^2 = C - gamma Delta^2,   C = psi_0^2 + gamma Delta_0^2

    Errata: in Shan & Bordelon 2021a, Eq. 26 to 27; 2021b, Eq. 33 to 34, v must be psi^2 / 2; u of the print is 2 gamma
    times too large.

    All arguments broadcast: times (T,) with parameters (..., 1) give (..., T). gamma >= 0, times >= 0.
    """
    t = checked_times(times) * checked_numbers(rate, "rate", least=0.0)
    psi, delta = (checked_numbers(value, name).square() for value, name in ((psi0, "psi0"), (residual0, "residual0")))
    g = checked_numbers(gamma, "gamma", least=0.0)
    conserved = psi + g * delta
    decay = torch.exp(-2 * conserved * t)
    below = psi + g * delta * decay
    # a feature that starts at zero stays there, and so does the residual
    asleep = psi == 0
    share = torch.where(asleep, 1.0, conserved / torch.where(asleep, 1.0, below))
    residual = torch.where(asleep, 1.0, decay) * share * delta
    return Scalar(residual, share * psi, conserved.expand_as(residual))


def isotropic_half_time(eigenvalue: Numbers, gamma: Numbers, power: Numbers, *, rate: Numbers = 1.0) -> Tensor:
    """When the loss has halved, for K0 = eigenvalue * identity and power = |y|^2: ln(2 + gamma |y|^2 / k) / (2 rate C).

    C = k + gamma |y|^2 with k the eigenvalue: the loss is C |y|^2 / (gamma |y|^2 + k exp(2 C rate t)). For large gamma
    a delay of ln(gamma |y|^2 / k) / (2 rate gamma |y|^2), which Shan & Bordelon 2021a, p. 4 leaves out. Numbers or
    tensors that broadcast.
    """
    k, y2 = checked_numbers(eigenvalue, "eigenvalue", above=0.0), checked_numbers(power, "power", above=0.0)
    g, speed = checked_numbers(gamma, "gamma", least=0.0), checked_numbers(rate, "rate", above=0.0)
    return torch.log(2 + g * y2 / k) / (2 * speed * (k + g * y2))
