"""Eigenvalues of a kernel, the task in its eigenbasis, power laws, and effective rank."""

import operator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.linalg.krylov import top_eigenpairs
from featlearn.linalg.stored_kernel import StoredKernel, stored_square
from featlearn.shapes import centered as without_constant
from featlearn.shapes import checked_kernel, checked_targets, checked_tensor, deviations, ratio, scaled, symmetric
from featlearn.signatures import name_keywords


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues in descending order, and the power of the task along each eigenvector."""

    eigenvalues: Tensor
    """(..., P), descending; (..., k) with `top=k`."""
    eigenvectors: Tensor
    """(..., P, P), columns in the same order."""
    task_power: Tensor | None
    """(..., P): (u_k . y)^2, summed over the columns of y, not divided by |y|^2; None without a task."""
    task_size: Tensor | None = None
    """|y|^2; None without a task."""
    residuals: Tensor | None = None
    """(k,) |K u - value u| of a stored kernel: an eigenvalue lies within this distance of the value. Else None."""

    @property
    def cumulative_power(self) -> Tensor:
        """(..., P): the share of |y|^2 in the first k eigenvectors."""
        if self.task_power is None:
            raise InputValueError("this spectrum has no task; pass y to spectrum(K, y)")
        assert self.task_size is not None
        sums = self.task_power.cumsum(-1)
        return ratio(sums, self.task_size.expand_as(sums))


@name_keywords()
def spectrum(
    K: Tensor | StoredKernel, y: Tensor | None = None, *, centered: bool = False, top: int | None = None
) -> Spectrum:
    """Compute the spectrum of a symmetric kernel (..., P, P), and of the task y, (P,) or (P, C), in its eigenbasis.

    `centered=True` uses H K H, with H = I - 1 1^T / P, which removes the constant mode. The task is not centered.
    `top` is the number of largest eigenvalues to return. A stored kernel needs it: they come from a block Krylov
    iteration, with `residuals`, which reads the file up to 24 times.
    """
    if top is not None and (not isinstance(top, int) or isinstance(top, bool) or not 1 <= top <= K.shape[-1]):
        raise InputValueError(f"top={top!r}, expected a number of eigenvalues between 1 and P = {K.shape[-1]}")
    if isinstance(K, StoredKernel):
        return _stored_spectrum(stored_square(K), y, centered, top)
    kernel = symmetric(checked_kernel(K))
    kernel = without_constant(kernel) if centered else kernel
    values, vectors = torch.linalg.eigh(kernel)
    values, vectors = values.flip(-1)[..., :top], vectors.flip(-1)[..., :top]
    return _with_task(values, vectors, None if y is None else checked_targets(y, kernel))


def _with_task(values: Tensor, vectors: Tensor, targets: Tensor | None, residuals: Tensor | None = None) -> Spectrum:
    if targets is None:
        return Spectrum(values, vectors, None, None, residuals)
    return Spectrum(values, vectors, (vectors.mT @ targets).square().sum(-1), targets.square().sum(), residuals)


def _stored_spectrum(kernel: StoredKernel, y: Tensor | None, centered: bool, top: int | None) -> Spectrum:
    if top is None:
        raise InputValueError("top=None, expected the number of eigenvalues to compute for a stored kernel: top=10")
    width = min(len(kernel), top + 4)
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(len(kernel), width, generator=generator, dtype=torch.float64, device="cpu")

    def product(v: Tensor) -> Tensor:
        return kernel @ v if not centered else deviations(kernel @ deviations(v, (0,)), (0,))

    pairs = top_eigenpairs(product, start, top, kernel.precision**0.5, 24 * width)
    targets = None if y is None else checked_targets(y, kernel)
    return _with_task(pairs.values, pairs.vectors, targets, pairs.residuals)


class PowerLaw(NamedTuple):
    """Fit values ~ prefactor * k^-exponent, for k from `first` to `last`."""

    exponent: float
    stderr: float
    """Standard error of the exponent, from the residuals of the fit."""
    prefactor: float
    first: int
    last: int


def power_law(values: Tensor, first: int, last: int) -> PowerLaw:
    """Fit log values against log k by least squares over the window first <= k <= last, counted from 1.

    The ends of a spectrum deviate from the power law (few modes, finite size): choose a window that excludes them.
    """
    spectrum = checked_tensor(values, "values")
    if spectrum.dim() != 1:
        raise InputValueError(f"values have shape {tuple(spectrum.shape)}, expected one axis")
    first, last = _index(first, "first"), _index(last, "last")
    if not 1 <= first <= last - 2 < len(spectrum) - 1:
        raise InputValueError(
            f"the window is {first} to {last}, expected at least three values within 1 to {len(spectrum)}"
        )
    window = spectrum[first - 1 : last]
    if not bool(((window > 0) & torch.isfinite(window)).all()):
        raise InputValueError(
            f"values {first} to {last} are not all positive and finite; choose a window in which they are"
        )
    k = torch.arange(first, last + 1, dtype=torch.float64, device=spectrum.device).log()
    logs = window.log()
    spread = (k - k.mean()).square().sum()
    slope = ((k - k.mean()) * logs).sum() / spread
    residuals = logs - logs.mean() - slope * (k - k.mean())
    error = (residuals.square().sum() / (len(k) - 2) / spread).sqrt()
    return PowerLaw(-float(slope), float(error), float((logs.mean() - slope * k.mean()).exp()), first, last)


def _index(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InputTypeError(f"{name}={value!r}, expected an integer, counted from 1") from None


@name_keywords()
def effective_rank(
    K: Tensor, kind: Literal["entropy", "participation"] = "entropy", *, centered: bool = False
) -> Tensor:
    """Compute the effective number of modes of a kernel: P for the identity, 1 for a rank-one kernel.

    `"entropy"` is the exponential of the entropy of the eigenvalues divided by their sum (Roy and Vetterli 2007).
    `"participation"` is (Tr K)^2 / |K|_F^2. nan for a zero kernel. Kernels must be symmetric and positive; eigenvalues
    that are negative by rounding count as 0.

    `centered=True` uses H K H, with H = I - 1 1^T / P. In ReLU networks the constant mode can dominate the kernel, and
    its change would then decide whether the rank rises or falls.
    """
    kernel = scaled(symmetric(checked_kernel(K)), (-2, -1))[0]
    kernel = without_constant(kernel) if centered else kernel
    if kind == "participation":
        trace = kernel.diagonal(dim1=-2, dim2=-1).sum(-1)
        return ratio(trace.square(), kernel.square().sum((-2, -1)))
    if kind != "entropy":
        raise InputValueError(f"kind={kind!r}, expected 'entropy' or 'participation'")
    values = torch.linalg.eigvalsh(kernel).clamp_min(0.0)
    total = values.sum(-1, keepdim=True)
    share = ratio(values, total.expand_as(values))
    entropy: Tensor = torch.special.entr(share).sum(-1)
    return entropy.exp()
