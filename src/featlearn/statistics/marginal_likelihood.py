"""The marginal likelihood of a linearized network, and the precisions and noise that maximize it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import InputValueError, NotFiniteError
from featlearn.planning.plan import ProgressLine

TOLERANCE = 1e-6
"""Largest change of a logarithm in the last step of a fit."""
STEPS = 200
SMALLEST = 1e-200
"""Stands in for what is zero up to rounding, where its logarithm is taken."""


@dataclass(frozen=True, kw_only=True)
class MarginalLikelihood:
    """What the marginal likelihood depends on, for a system of n = P C rows.

    Keys of mappings are layers, or `""` for the whole network.
    """

    curvatures: Mapping[str, Tensor]
    """L^T K L (n, n) of each key, for precision 1 and noise 1."""
    squares: Mapping[str, float]
    """Squared norm of the weights of each key."""
    squared_error: float | None
    """Sum of squared errors where noise is part of the likelihood."""

    def factor(self, precisions: Mapping[str, float], variance: float) -> Tensor:
        """Return the Cholesky factor of S = I + sum_l L^T K_l L / (precision_l variance)."""
        keys = list(self.curvatures)
        system = self.curvatures[keys[0]] / (precisions[keys[0]] * variance)
        for key in keys[1:]:
            system.add_(self.curvatures[key], alpha=1 / (precisions[key] * variance))
        system.diagonal().add_(1.0)
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(system)
        if int(failed):
            raise NotFiniteError(
                "the kernel of the posterior is not positive up to rounding; measure it with dtype=torch.float64, or "
                f"raise the noise or the precision (now {variance**0.5:.3g} and {min(precisions.values()):.3g})"
            )
        return factor

    def log_volume(self, factor: Tensor, precisions: Mapping[str, float]) -> float:
        """Return -1/2 log det S - 1/2 sum_l precision_l |w_l|^2, which adds to the log-likelihood."""
        scatter = sum(precisions[key] * self.squares[key] for key in self.squares)
        return -float(factor.diagonal().log().sum()) - 0.5 * scatter

    def fit(
        self, precisions: Mapping[str, float], variance: float, *, fit_prior: bool, fit_noise: bool
    ) -> tuple[dict[str, float], float]:
        """Return the precisions, the variance of the noise, or both, that maximize the marginal likelihood.

        Each step goes to the geometric mean of the present values and of those that `_stationary` returns. The
        derivatives of a step, in logarithms, have absolute row sums of at most 1/2. So the maximum is unique, and each
        step at least halves the largest distance to it.
        """
        if fit_prior:
            self._refuse_unbounded()
        if fit_noise and not self.squared_error:
            raise InputValueError("noise='fit' with outputs equal to the targets, expected a number, noise=0.1 say")
        current = dict(precisions)
        rows = len(next(iter(self.curvatures.values())))
        with ProgressLine(f"fit of a {rows:,} x {rows:,} system", 24) as progress:
            for _ in range(STEPS):
                better, noise = self._stationary(current, variance)
                steps = [0.5 * math.log(better[key] / current[key]) if fit_prior else 0.0 for key in current]
                noise_step = 0.5 * math.log(noise / variance) if fit_noise else 0.0
                current = {key: current[key] * math.exp(step) for key, step in zip(current, steps, strict=True)}
                variance *= math.exp(noise_step)
                progress.advance()
                if max(map(abs, [*steps, noise_step])) < TOLERANCE:
                    break
        return current, variance

    def _stationary(self, precisions: Mapping[str, float], variance: float) -> tuple[dict[str, float], float]:
        """Return gamma_l / |w_l|^2 for each key, and the squared error divided by n - sum_l gamma_l (MacKay 1992).

        gamma_l = tr(S^-1 L^T K_l L) / (precision_l variance) is the number of parameters that the data determine, and
        n - sum_l gamma_l = tr(S^-1). At the maximum these are the precisions and the variance themselves.
        """
        inverse = torch.cholesky_inverse(self.factor(precisions, variance))
        better = {}
        for key, curvature in self.curvatures.items():
            degrees = float(torch.dot(inverse.flatten(), curvature.flatten())) / (precisions[key] * variance)
            better[key] = max(degrees, SMALLEST) / max(self.squares[key], SMALLEST)
        return better, max(self.squared_error or 0.0, SMALLEST) / float(inverse.trace())

    def _refuse_unbounded(self) -> None:
        """Refuse layers whose precision has no finite maximum."""
        for key, curvature in self.curvatures.items():
            layer = f"layer {key!r}" if key else "the network"
            if not self.squares[key]:
                raise InputValueError(
                    f"all weights of {layer} are zero, expected others to fit a precision; pass a number for it: "
                    f"prior={{{key!r}: 1.0, '*': 1.0}}"
                )
            if not bool(curvature.any()):
                raise InputValueError(
                    f"no output depends on the weights of {layer}, expected that to fit a precision; select other "
                    "weights by parameters=, or pass prior=<a number>"
                )
