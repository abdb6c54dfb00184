"""Optimal feature evolution solved exactly."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from featlearn.theory.arguments import Numbers, checked_number, checked_time_axis, checked_times
from featlearn.theory.ofe.eigenmodes import Eigenmodes, conserved_modes
from featlearn.theory.ofe.frames import frames_at, frames_at_the_end
from featlearn.theory.ofe.problem import KernelProblem, checked_problem
from featlearn.theory.ofe.readings import Readings, kernels, readings
from featlearn.theory.ofe.transport import residuals
from featlearn.theory.prediction import Prediction

# Frames are held for this many numbers at a time.
ELEMENTS = 2**23


@dataclass(frozen=True, eq=False)
class Solution(Prediction):
    """Optimal feature evolution along time; T times, P samples, C outputs."""

    times: Tensor
    """(T,)"""
    gamma: float
    rate: float
    problem: KernelProblem
    modes: Eigenmodes

    @cached_property
    def residual(self) -> Tensor:
        """Delta = f - y: (T, P), or (T, P, C) where y is (P, C).

        One output is in closed form. For several, Delta Delta^T is, and how the outputs turn among themselves is
        followed numerically, to about 1e-11.
        """
        inside = residuals(self.modes, self.rate * self.times)  # (T, m, r)
        outputs = self.modes.vectors[:, self.modes.touched] @ inside @ self.modes.turn.T
        return outputs[..., 0] if self.problem.single else outputs

    @property
    def outputs(self) -> Tensor:
        """f = y + Delta: (T, P), or (T, P, C) where y is (P, C)."""
        targets = self.problem.targets
        return self.residual + (targets[:, 0] if self.problem.single else targets)

    @cached_property
    def _readings(self) -> Readings:
        parts = [
            readings(self.modes, frames_at(self.modes, part), self.problem.targets)
            for part in _parts(self.modes, self.rate * self.times)
        ]
        return Readings(*(torch.cat(column) for column in zip(*parts, strict=True)))

    @property
    def loss(self) -> Tensor:
        """(T,): |f - y|^2, summed over samples and outputs."""
        return self._readings.loss

    @property
    def alignment(self) -> Tensor:
        """(T,): kernel-task alignment <K, Y Y^T> / (|K|_F |Y Y^T|_F); nan where K or y vanishes."""
        return self._readings.alignment

    @property
    def kernel_norm(self) -> Tensor:
        """(T,): |K|_F"""
        return self._readings.norm

    @property
    def kernel_trace(self) -> Tensor:
        """(T,): Tr K"""
        return self._readings.trace

    def kernel(self, t: Numbers) -> Tensor:
        """K(t): (P, P) at one time, (T, P, P) at several; not only at `times`."""
        asked = checked_times(t, "t")
        moments = checked_time_axis(asked, "t").to(self.times.device)
        stack = kernels(self.modes, frames_at(self.modes, self.rate * moments))
        return stack if asked.dim() else stack[0]

    @cached_property
    def final_loss(self) -> Tensor:
        """(): the loss at infinite time; 0 unless K0 is singular and y - f0 is not in its range."""
        return readings(self.modes, frames_at_the_end(self.modes), self.problem.targets).loss[0]

    @cached_property
    def final_kernel(self) -> Tensor:
        """(P, P): the kernel at infinite time."""
        return kernels(self.modes, frames_at_the_end(self.modes))[0]

    def curves(self) -> dict[str, Tensor]:
        """Loss, alignment, norm and trace of the kernel, under the names that runs share."""
        return {
            "loss": self.loss,
            "ntk/alignment": self.alignment,
            "ntk/norm": self.kernel_norm,
            "ntk/trace": self.kernel_trace,
        }


def solve(
    K0: Tensor,
    y: Tensor,
    gamma: float,
    times: Numbers,
    *,
    f0: Tensor | None = None,
    rate: float = 1.0,
    rank_tolerance: float | None = None,
) -> Solution:
    """Optimal feature evolution: features move to lower the loss after the next step.

    See Shan & Bordelon 2021a, Sec. 4, Eq. 6, 8, 9, 23, 28, 29; 2021b, Sec. 4.1, Eq. 6, 30, 35, 36.

        dDelta/dt = -rate K Delta,   dPsi/dt = rate gamma Psi Delta Delta^T,   K = Psi^T Psi,   Delta = f - y

    (Shan & Bordelon 2021a, Eq. 23; 2021b, Eq. 6), from f0 and K0. C = K + gamma Delta Delta^T is conserved, and the
    solution is exact:

        Delta(t) = exp(-rate C t) Delta_0 / sqrt(D(t)),   K(t) = C - gamma Delta Delta^T,
        D(t) = 1 / (1 + gamma Delta_0^T K0^-1 Delta_0) + gamma sum_k d_k^2 exp(-2 rate c_k t) / c_k

    with C = sum_k c_k v_k v_k^T and d_k = v_k . Delta_0; for several outputs that share the kernel the same with
    matrices in place of D. The papers give only the conserved matrix, the scalar case and approximations.

    Where K0 is singular its rank is conserved; if y - f0 is not in its range, the loss stops at `final_loss`: for one
    output the smallest eigenvalue of C that Delta_0 overlaps, divided by gamma.

    Args:
        K0: (P, P), positive semi-definite. Measure it in double, fl.ntk(..., dtype=torch.float64): small eigenvalues,
            which determine late times, are lost in the rounding of single precision.
        y: (P,), or (P, C) for outputs that share the kernel.
        gamma: the feature rate, >= 0, in the convention of the equations above (see `ode_rate`). Its unit is that of K
            divided by that of y^2: only gamma |y|^2 / |K0| compares between problems. 0 is a frozen kernel.
        times: (T,), >= 0, in any order, in units of 1 / (rate * eigenvalue).
        f0: outputs at time 0, as y; zero by default.
        rate: see `fl.dynamics.rate`; with it one unit of time is one step of gradient descent.
        rank_tolerance: eigenvalues of K0 below this share of the largest are zero; by default P times the rounding of
            a double. 0.0 trusts K0 to the last digit.

    Errata: with dPsi/dt as above, Shan & Bordelon 2021a, Eq. 9 must read dPsi/dt = rate Psi (K0 + gamma y y^T - K),
    without a second gamma. Shan & Bordelon 2021a, p. 4: for large gamma the loss falls as exp(-2 rate gamma |y|^2 t),
    after a delay of about ln(gamma |y|^2 / lambda) / (2 rate gamma |y|^2). Shan & Bordelon 2021b, Sec. 4.1: the loss
    does not fall faster than that of the frozen kernel at every moment. Shan & Bordelon 2021a, Fig. 2E: alignment may
    exceed its final value on the way. Shan & Bordelon 2021a, App. A.1 and 2021b, App. B: the late loss is not
    sum_k (v_k . y)^2 exp(-2 rate c_k t) but `late_amplification` times that.
    """
    problem = checked_problem(K0, y, f0, rank_tolerance)
    feature_rate = checked_number(gamma, "gamma", least=0.0)
    speed = checked_number(rate, "rate", least=0.0)
    moments = checked_time_axis(times).to(problem.kernel.device)
    return Solution(moments, feature_rate, speed, problem, conserved_modes(problem, feature_rate))


def _parts(modes: Eigenmodes, times: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = times.split(max(1, ELEMENTS // max(1, modes.rows.numel())))
    return parts
