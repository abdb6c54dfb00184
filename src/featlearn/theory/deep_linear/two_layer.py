"""Two-layer linear networks on whitened inputs, from small weights (Atanasov et al. 2022, Sec. 3, App. C).

f = a^T W x with W (N, D) and a (N,), teacher s beta, |beta| = 1. Loss 1/(2P) sum (f - y)^2, rate 1, X^T X / P a
projector: da/dt = W (s beta - W^T a), dW/dt = a (s beta - W^T a)^T. In the direction of the teacher

    q = (|a|^2 + |W beta|^2) / 2,        r = a^T W beta,

r the strength of the function that is learned, 2q = beta^T M beta its kernel (M = W^T W + |a|^2).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.theory.arguments import checked_numbers, checked_times
from featlearn.theory.prediction import Prediction


@dataclass(frozen=True, eq=False)
class TwoLayer(Prediction):
    """q(t) and r(t); ``q, r = two_layer(...)`` unpacks the two."""

    times: Tensor
    q: Tensor
    """Half of the kernel along the teacher, beta^T M beta / 2."""
    r: Tensor
    """Strength of the function, beta^T W^T a."""
    s: Tensor
    """That of the teacher."""
    samples: int
    """P: with 1, losses and kernels are those of a mean over samples."""

    def curves(self) -> dict[str, Tensor]:
        """Loss P (s - r)^2, strength r, and y^T K y / |y|^2 = 2 P q."""
        return {
            "loss": self.samples * (self.s - self.r).square(),
            "strength": self.r,
            "ntk/task": 2 * self.samples * self.q,
        }

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.q, self.r))


class InitialStatistics(NamedTuple):
    """Averages over a_i ~ N(0, sigma^2 / N), W_ij ~ N(0, sigma^2 / D)."""

    mean_q0: Tensor
    """sigma^2 / 2 (1 + N / D)"""
    var_q0: Tensor
    """sigma^4 / 2 (1 / N + N / D^2)"""
    mean_r0: Tensor
    """0"""
    mean_r0_sq: Tensor
    """sigma^4 / D"""


def initial_statistics(sigma: Any, D: Any, N: Any) -> InitialStatistics:
    """Mean and spread of q and r at random initialization.

    See Atanasov et al. 2022, Eq. 34; the variance of q is not in the print.

    `sigma` the scale of the weights, `D` inputs, `N` hidden units: numbers or tensors, broadcast. Exact at every size.
    A typical network of these sizes starts its second phase from c0 = mean_q0 / 2.
    """
    scale, inputs, width = torch.broadcast_tensors(
        checked_numbers(sigma, "sigma", least=0.0),
        checked_numbers(D, "D", above=0.0),
        checked_numbers(N, "N", above=0.0),
    )
    square = scale.square()
    return InitialStatistics(
        mean_q0=square / 2 * (1 + width / inputs),
        var_q0=square.square() / 2 * (1 / width + width / inputs.square()),
        mean_r0=torch.zeros_like(square),
        mean_r0_sq=square.square() / inputs,
    )


def early_path(times: Any, q0: Any, r0: Any, s: Any) -> tuple[Tensor, Tensor]:
    """(q, r) of phase I, while the output is small: q0 cosh 2st + r0 sinh 2st, r0 cosh 2st + q0 sinh 2st.

    See Atanasov et al. 2022, Eq. 33, 35. Valid for s t much below log(s / q0) / 2; inf where it overflows. `two_layer`
    continues from there.
    """
    moments, q, r, teacher = _checked(times, q0, r0, s)
    grown, shrunk = (q + r) / 2 * torch.exp(2 * teacher * moments), (q - r) / 2 * torch.exp(-2 * teacher * moments)
    return grown + shrunk, grown - shrunk


def two_layer(times: Any, q0: Any, r0: Any, s: Any, *, samples: int = 1) -> TwoLayer:
    """Return the whole path of q and r, both phases matched, with r0 kept (Atanasov et al. 2022, Eq. 49-51 corrected).

        {q, r}(t) = {q0 cosh 2st + r0 sinh 2st, r0 cosh 2st + q0 sinh 2st} / [1 + (q0 + r0) / (2s) (e^(2st) - 1)]

    `times`, `q0`, `r0`, `s`: numbers or tensors, broadcast; |r0| <= q0 as for every network. The error is O(sigma^2),
    relative to s; the strength is that of a balanced network from c0 = (q0 + r0) / 2.

    A negative s is a teacher against beta. Nothing is learned from r0 = -q0 s / |s|, the saddle. `samples` P scales
    the curves (loss P (s - r)^2 for whitened inputs) and nothing else.

    Erratum: the print drops r0 (take r0 = 0 for it), which is off by r0 / q0 = O(1 / sqrt D) whatever sigma is, not by
    O(sigma^2).
    """
    moments, q, r, teacher = _checked(times, q0, r0, s)
    sign, size = teacher.sign(), teacher.abs()
    aligned, opposed = (q + sign * r) / 2, (q - sign * r) / 2
    # numerator and denominator times e^(-2st): nothing grows
    decay = torch.exp(-2 * size * moments)
    denominator = decay - aligned / size * torch.expm1(-2 * size * moments)
    # where nothing grows, aligned = 0, both are powers of the decay, and 0 / 0 in the end
    fading = torch.where(denominator > 0, decay / denominator, torch.zeros_like(decay)) * decay
    grown = torch.where(aligned > 0, aligned / denominator, torch.zeros_like(aligned))
    return TwoLayer(
        times=moments, q=grown + opposed * fading, r=sign * (grown - opposed * fading), s=teacher, samples=samples
    )


def _checked(times: Any, q0: Any, r0: Any, s: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    moments, q, r, teacher = torch.broadcast_tensors(
        checked_times(times, infinite=True),
        checked_numbers(q0, "q0", least=0.0),
        checked_numbers(r0, "r0"),
        checked_numbers(s, "s"),
    )
    if bool((r.abs() > q * (1 + 1e-12)).any()):
        raise InputValueError(
            f"|r0| is {r.abs().max():g} and q0 {q.min():g}, expected |r0| <= q0, as r = a . W beta and "
            "q = (|a|^2 + |W beta|^2) / 2 have it"
        )
    if bool((teacher == 0).any()):
        raise InputValueError("s is 0, expected the strength of a teacher")
    return moments, q, r, teacher
