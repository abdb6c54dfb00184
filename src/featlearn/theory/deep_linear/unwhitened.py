"""Two-layer linear networks on inputs that are not whitened, in their early phase.

See Atanasov et al. 2022, Sec. 3.2, App. C.3.

f = a^T W x, teacher s beta, Sigma = X^T X / P, loss 1/(2P) sum (f - y)^2, rate 1. While the output is small

    da/dt = s W Sigma beta,        dW/dt = s a beta^T Sigma,

and five numbers follow each other: (beta^T W^T a, |a|^2, beta^T W^T W Sigma beta, beta^T Sigma W^T a,
beta^T Sigma W^T W Sigma beta). The spike of the kernel first grows along Sigma beta and turns to beta at the end, where
the kernel is s [beta beta^T + 1] on any data (`final_ntk`): it turns while the loss falls, not before.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite
from featlearn.theory.arguments import checked_number, checked_numbers, checked_times
from featlearn.theory.deep_linear.linear_network import checked_direction


class UnwhitenedSystem(NamedTuple):
    """d v / dt = matrix v for the five numbers v."""

    matrix: Tensor
    """(5, 5)"""
    eigenvalues: Tensor
    """(5,), ascending: s sqrt(b) times -2, -1, 0, 1, 2 for s > 0"""
    eigenvectors: Tensor
    """(5, 5): columns, as the eigenvalues, not normalized; the last is (a, sqrt b, a sqrt b, b, b sqrt b)."""


def unwhitened_system(a: Any, b: Any, s: Any) -> UnwhitenedSystem:
    """Return the linear system of five variables of phase I, with its eigenvectors in closed form.

    See Atanasov et al. 2022, Eq. 43 to 47.

    `a` = beta^T Sigma beta and `b` = beta^T Sigma^2 beta, b >= a^2 > 0; `s` the strength of the teacher: one
    number each.
    """
    first, second, size = (checked_number(value, name) for value, name in ((a, "a"), (b, "b"), (s, "s")))
    if not first > 0 or second < first**2 * (1 - 1e-12):
        raise InputValueError(
            f"a={first:g} and b={second:g}, expected b >= a^2 > 0: a = beta^T Sigma beta, b = beta^T Sigma^2 beta"
        )
    root = second**0.5
    matrix = [
        [0, first, 1, 0, 0],
        [0, 0, 0, 2, 0],
        [second, 0, 0, first, 0],
        [0, second, 0, 0, 1],
        [0, 0, 0, 2 * second, 0],
    ]
    vectors = [
        [-first, root, first * root, -second, second * root],
        [1, 0, -root, 0, 0],
        [0, 1, -first, 0, -second],
        [1, 0, root, 0, 0],
        [first, root, first * root, second, second * root],
    ]
    values = size * root * torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    return UnwhitenedSystem(
        size * torch.tensor(matrix, dtype=torch.float64), values, torch.tensor(vectors, dtype=torch.float64).T
    )


def unwhitened_variables(W: Tensor, a: Tensor, beta: Tensor, covariance: Tensor) -> Tensor:
    """Return the five numbers (5,) of a network: W (N, D), a (N,), unit vector beta (D,), Sigma (D, D).

    See Atanasov et al. 2022, App. C.3.
    """
    first, readout, sigma = checked_finite(W, "W"), checked_finite(a, "a"), checked_finite(covariance, "covariance")
    size = first.shape[-1]
    if first.dim() != 2 or readout.shape != first.shape[:1] or sigma.shape != (size, size):
        raise InputValueError(
            f"W has shape {tuple(first.shape)}, a {tuple(readout.shape)} and covariance {tuple(sigma.shape)}, expected "
            "(N, D), (N,) and (D, D)"
        )
    direction = checked_direction(beta, size)
    straight, tilted = first @ direction, first @ (sigma @ direction)
    return torch.stack([straight @ readout, readout @ readout, straight @ tilted, tilted @ readout, tilted @ tilted])


def unwhitened_path(times: Any, variables: Tensor, a: Any, b: Any, s: Any) -> Tensor:
    """Return the five numbers over time, from `variables` (5,) at time 0: the shape of `times`, and (5,) after it.

    Phase I of Atanasov et al. 2022, App. C.3, only; refused where it overflows, 2 s sqrt(b) t > 700, long after the
    phase has ended.
    """
    system = unwhitened_system(a, b, s)
    moments, start = checked_times(times), checked_finite(variables, "variables")
    fastest = float(system.eigenvalues.abs().max() * moments.max())
    if fastest > 700:
        raise InputValueError(
            f"2 s sqrt(b) t goes up to {fastest:g}, expected times in phase I; use flow for later ones"
        )
    if start.shape != (5,):
        raise InputValueError(f"variables have shape {tuple(start.shape)}, expected (5,): see unwhitened_variables")
    parts = torch.linalg.solve(system.eigenvectors, start.cpu())
    grown = torch.exp(moments.cpu()[..., None] * system.eigenvalues) * parts
    path: Tensor = grown @ system.eigenvectors.T
    return path.to(start.device)


def unwhitened_spike(covariance: Tensor, beta: Tensor, readout_norm: Any = 1.0) -> Tensor:
    """M (D, D) that phase I comes to: |a|^2 [Sigma beta beta^T Sigma / (beta^T Sigma^2 beta) + 1].

    See Atanasov et al. 2022, Eq. 48.

    `readout_norm` is |a|^2. The exact kernel of the phase, with the initial weights, is `early_kernel(covariance=...)`.

    Erratum: the print of Eq. 48 divides by the root of beta^T Sigma^2 beta.
    """
    sigma = checked_finite(covariance, "covariance")
    tilted = sigma @ checked_direction(beta, sigma.shape[-1]).to(sigma.device)
    size = checked_numbers(readout_norm, "readout_norm", least=0.0).to(sigma.device)
    eye = torch.eye(len(tilted), dtype=sigma.dtype, device=sigma.device)
    return size * (torch.outer(tilted, tilted) / tilted.square().sum() + eye)
