"""The approximate solution of the papers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.shapes import ratio
from featlearn.theory.arguments import Numbers, checked_number, checked_time_axis
from featlearn.theory.ofe.eigenmodes import conserved_modes
from featlearn.theory.ofe.problem import checked_task
from featlearn.theory.prediction import Prediction


@dataclass(frozen=True, eq=False)
class DiagonalApproximation(Prediction):
    """The papers' approximation along time; T times, P modes."""

    times: Tensor
    """(T,)"""
    eigenvalues: Tensor
    """(P,): c_k of the final kernel, descending."""
    modes: Tensor
    """(T, P): A_kk, the kernel's diagonal in the eigenbasis of the final kernel."""
    alignment: Tensor
    """(T,)"""
    loss: Tensor
    """(T,): the papers' "zeroth order" loss, sum_k (v_k . y)^2 exp(-2 rate c_k t)."""

    def curves(self) -> dict[str, Tensor]:
        """Loss, alignment, norm and trace of the kernel, under the names that runs share."""
        return {
            "loss": self.loss,
            "ntk/alignment": self.alignment,
            "ntk/norm": self.modes.norm(dim=1),
            "ntk/trace": self.modes.sum(1),
        }


def diagonal_approximation(
    K0: Tensor, y: Tensor, gamma: float, times: Numbers, *, rate: float = 1.0
) -> DiagonalApproximation:
    """Return the papers' approximation of `solve`: a kernel diagonal in its final basis.

    See Shan & Bordelon 2021a, Eq. 31 to 35; 2021b, Eq. 38 to 42.

        A_kk(t) = c_k B_k / (B_k + exp(-2 rate c_k t)),   B_k = A_kk(0) / (c_k - A_kk(0)),
        A_kk(0) = c_k - gamma (v_k . y)^2

    and alignment sum_k (v_k . y)^2 A_kk / (|y|^2 sqrt(sum_k A_kk^2)). It drops the off-diagonal elements, which is
    wrong early: for the 3 x 3 example of the tests it starts at an alignment of 0.7296 where the truth is 0.4089. Its
    loss misses the factor `late_amplification`. For reproducing the papers' curves; `solve` is exact and costs the
    same.

    Erratum: the second root in Shan & Bordelon 2021a, Eq. 35; 2021b, Eq. 42 must be constant, gamma |y|^2; as printed
    it is the root of a negative number.

    Args:
        K0: (P, P), positive semi-definite.
        y: (P,); outputs start at 0.
        gamma: the feature rate of `solve`, > 0.
        times: (T,), >= 0.
        rate: as in `solve`.
    """
    problem = checked_task(K0, y)
    without = "for 0 the kernel does not move: fl.dynamics.kernel_descent"
    feature_rate = checked_number(gamma, "gamma", above=0.0, hint=without)
    asked = checked_time_axis(times)
    moments = asked.to(problem.kernel.device) * checked_number(rate, "rate", least=0.0)
    conserved = conserved_modes(problem, feature_rate)
    c, V = conserved.values.flip(0), conserved.vectors.flip(1)
    power = torch.zeros_like(conserved.values)
    power[conserved.touched] = conserved.rows[: conserved.moving, 0].square()
    power = power.flip(0)
    # v_k^T K0 v_k, without the difference of large numbers
    start = ((problem.vectors.T @ V).square() * problem.values[:, None]).sum(0)
    decay = torch.exp(-2 * moments[:, None] * c)
    modes = c * ratio(start.expand_as(decay), start + feature_rate * power * decay).nan_to_num(0.0)
    overlap = (power * modes).sum(1)
    alignment = ratio(overlap, problem.targets.square().sum() * modes.norm(dim=1))
    return DiagonalApproximation(asked, c, modes, alignment, (power * decay).sum(1))
