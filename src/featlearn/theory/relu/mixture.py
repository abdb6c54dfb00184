"""How the kernels of several outputs come to prefer their own classes (Shan & Bordelon 2021b, Sec. 6.2, App. D.3)."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite
from featlearn.theory.arguments import checked_count, checked_numbers
from featlearn.theory.relu.relu_network import checked_rate


def mixture_rates(
    f: Tensor,
    samples_per_class: Any,
    overlap: Any = 1.0,
    rate: float = 1.0,
    *,
    square_norm: Any = 1.0,
    Q: Tensor | None = None,
) -> Tensor:
    """d/dt of y_d^T K_W^cc y_d for a mixture of C classes: (..., C, C), rows kernels c, columns one-hot targets d.

        2 rate n^2 [|x|^2 + (n-1) m] {1/2 sum_e s_ce + 1/2 s_cd},      s_ce = (delta_ce - f_c(e)) f_c(e)

    (Shan & Bordelon 2021b, Eq. 19-21, 100-103, corrected). Early: f_c(c) times 1 for d = c and 1/2 for d != c: each
    output's own kernel turns to its own class twice as fast as to others. Small noise, orthogonal class centers, static
    gates.

    Where no gate flips the rates with measured `Q` hold to a few percent. The ansatz overstates the growth toward the
    own class, since an output's weights are built from the features of its class: with frozen gates 0.93 of theory is
    measured at the sizes of Shan & Bordelon 2021b, 0.80 at N = 100 and M = 20000, and other classes come to 0.53 and
    0.59 of the own.

    Args:
        f: outputs at the class centers (..., C, C), rows classes e, columns outputs c, as a model gives them.
        samples_per_class: n.
        overlap: m = x . x' of two samples of a class; 1 without noise (`mixture_geometry`).
        rate: see `fl.dynamics.rate`; 2 lr / P for the loss of Shan & Bordelon 2021b, App. E.5.
        square_norm: |x|^2 of a sample.
        Q: sum_i D_i^d V_ci phi_i^e (..., C, C, C), axes c, d, e, measured, in place of the ansatz.

    Errata: Eq. 19, 20 have (P/C)^2 for 2 (P/C)^3, Eq. 100-103 (P/C)[P/C + m P^2/C^2]; the covariance of gates in
    Eq. 18 is 1/4 and not 3/4. Where f_c(c) < 0, as at initialization by chance, ratios mean nothing.
    """
    outputs, factor = _class_outputs(f), checked_rate(rate) * _class_factor(samples_per_class, overlap, square_norm)
    missing = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device) - outputs  # [e, c]
    if Q is None:
        product = (missing * outputs).mT  # s_ce
        return 2 * factor.to(outputs.device) * (product.sum(-1, keepdim=True) + product) / 2
    overlaps = checked_finite(Q, "Q").to(outputs.device)
    if overlaps.shape[-3:] != (outputs.shape[-1],) * 3:
        raise InputValueError(f"Q has shape {tuple(overlaps.shape)}, expected (..., C, C, C), axes c, d, e")
    return 2 * factor.to(outputs.device) * torch.einsum("...ec,...cde->...cd", missing, overlaps)


def mixture_readout_rates(
    f: Tensor, samples_per_class: Any, overlap: Any = 1.0, rate: float = 1.0, *, square_norm: Any = 1.0
) -> Tensor:
    """d/dt of y_d^T K_V y_d for the same mixture: (..., C), one for each target d; K_V is the same for every output.

    2 rate n^2 [|x|^2 + (n-1) m] sum_c (delta_cd - f_c(d)) f_c(d): exact for static gates, and the same for all classes
    that are learned alike: K_V aligns with the task and does not specialize (Shan & Bordelon 2021b, Fig. 7A; the rate
    is not in print). Arguments as for `mixture_rates`.
    """
    outputs, factor = _class_outputs(f), checked_rate(rate) * _class_factor(samples_per_class, overlap, square_norm)
    missing = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device) - outputs
    return 2 * factor.to(outputs.device)[..., 0] * (missing * outputs).sum(-1)


class MixtureGeometry(NamedTuple):
    """Inner products of samples of one class; those of different classes are 0."""

    square_norm: Tensor
    """|x|^2"""
    overlap: Tensor
    """m = x . x'"""


def mixture_geometry(
    variance: Any,
    dimension: int,
    *,
    variance_is: Literal["total", "per-coordinate"] = "total",
    normalized: bool = False,
) -> MixtureGeometry:
    """|x|^2 and x . x' in a class of x = center + noise, |center| = 1, typical in high dimension.

    Shan & Bordelon 2021b, App. E.5 says "variance 0.01" in 1000 dimensions, which may mean that of the whole noise,
    |noise|^2 = 0.01, or that of each coordinate, |noise|^2 = 10, where the noise is larger than the centers and the
    theory of small noise does not hold. The first gives the ratio of 1/2 that the paper reports, the second 0.65; the
    first is the default.

    `normalized`: samples are divided by their norm, so that |x|^2 = 1 and m = 1 / (1 + |noise|^2).
    """
    size, coordinates = checked_numbers(variance, "variance", least=0.0), checked_count(dimension, "dimension")
    if variance_is not in ("total", "per-coordinate"):
        raise InputValueError(f"variance_is={variance_is!r}, expected 'total' or 'per-coordinate'")
    square = 1 + (size if variance_is == "total" else coordinates * size)
    return (
        MixtureGeometry(torch.ones_like(square), 1 / square)
        if normalized
        else MixtureGeometry(square, torch.ones_like(square))
    )


def _class_outputs(f: Any) -> Tensor:
    outputs = checked_finite(f, "f")
    if outputs.dim() < 2 or outputs.shape[-1] != outputs.shape[-2]:
        raise InputValueError(
            f"f has shape {tuple(outputs.shape)}, expected (..., C, C): rows classes, columns outputs, model(centers)"
        )
    return outputs


def _class_factor(samples_per_class: Any, overlap: Any, square_norm: Any) -> Tensor:
    """n^2 [|x|^2 + (n-1) m], n^3 without noise; two more axes."""
    count = checked_numbers(samples_per_class, "samples_per_class", least=1.0)
    shared, size = checked_numbers(overlap, "overlap"), checked_numbers(square_norm, "square_norm")
    return (count.square() * (size + (count - 1) * shared))[..., None, None]
