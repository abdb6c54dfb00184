"""Optimal feature evolution integrated numerically, as the independent check of the closed form."""

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import ratio
from featlearn.theory.arguments import Numbers, checked_number, checked_time_axis
from featlearn.theory.ofe.problem import checked_problem
from featlearn.theory.prediction import Prediction


@dataclass(frozen=True, eq=False)
class IntegratedPath(Prediction):
    """Numerical solution; T times, P samples, C outputs."""

    times: Tensor
    """(T,)"""
    residual: Tensor
    """(T, P), or (T, P, C) where y is (P, C)."""
    kernels: Tensor
    """(T, P, P)"""
    targets: Tensor
    """(P, C)"""

    @property
    def loss(self) -> Tensor:
        """(T,): |f - y|^2"""
        return self.residual.square().flatten(1).sum(1)

    @property
    def alignment(self) -> Tensor:
        """(T,): <K, Y Y^T> / (|K|_F |Y Y^T|_F)"""
        overlap = (self.targets * (self.kernels @ self.targets)).sum((1, 2))
        return ratio(overlap, torch.linalg.matrix_norm(self.kernels) * (self.targets.T @ self.targets).norm())

    def curves(self) -> dict[str, Tensor]:
        """Loss, alignment, norm and trace of the kernel, under the names that runs share."""
        return {
            "loss": self.loss,
            "ntk/alignment": self.alignment,
            "ntk/norm": torch.linalg.matrix_norm(self.kernels),
            "ntk/trace": self.kernels.diagonal(dim1=1, dim2=2).sum(1),
        }


def integrate(
    K0: Tensor, y: Tensor, gamma: float, times: Numbers, *, f0: Tensor | None = None, rate: float = 1.0
) -> IntegratedPath:
    """Return the equations of `solve` integrated step by step (DOP853, relative tolerance 1e-12), arguments as there.

        dDelta/dt = -rate Psi^T Psi Delta,   dPsi/dt = rate gamma Psi Delta Delta^T

    See Shan & Bordelon 2021b, Sec. 4.1. Independent of the closed form: neither C nor its eigenvectors are used. The
    features Psi have as many rows as K0 has rank, which keeps the rank. Slow for rate * eigenvalue * time above some
    thousands.
    """
    problem = checked_problem(K0, y, f0)
    feature_rate, speed = checked_number(gamma, "gamma", least=0.0), checked_number(rate, "rate", least=0.0)
    moments = checked_time_axis(times, increasing=True)
    samples, outputs = problem.targets.shape
    positive = problem.values > 0
    features = (problem.vectors[:, positive] * problem.values[positive].sqrt()).T  # (rank, P)
    psi, delta, t = (part.cpu().numpy() for part in (features, problem.residual, moments))
    states = torch.from_numpy(_integrated(psi, delta, t, feature_rate, speed)).to(problem.kernel.device)
    residual = states[:, : samples * outputs].reshape(len(states), samples, outputs)
    moved = states[:, samples * outputs :].reshape(len(states), *features.shape)
    return IntegratedPath(moments, residual[..., 0] if problem.single else residual, moved.mT @ moved, problem.targets)


def _integrated(features: Any, residual: Any, times: Any, gamma: float, rate: float) -> Any:
    """(T, P C + rank P)"""
    from scipy.integrate import solve_ivp

    start = numpy.concatenate([residual.ravel(), features.ravel()])
    if times[-1] == 0 or rate == 0:
        return numpy.tile(start, (len(times), 1))

    def velocity(_: float, state: Any) -> Any:
        delta = state[: residual.size].reshape(residual.shape)
        psi = state[residual.size :].reshape(features.shape)
        seen = psi @ delta
        return rate * numpy.concatenate([-(psi.T @ seen).ravel(), gamma * (seen @ delta.T).ravel()])

    solved = solve_ivp(velocity, (0.0, times[-1]), start, "DOP853", times, rtol=1e-12, atol=1e-14)
    if not solved.success:
        raise InputValueError(f"the flow could not be integrated to t = {times[-1]:.3g}: {solved.message}")
    return solved.y.T.copy()
