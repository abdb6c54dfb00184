"""Test error of kernel regression from training samples alone, effective dimension, and condition.

Regression is k(x) (K + ridge I)^-1 y, as in `fl.dynamics.kernel_regression`: the ridge is added to the kernel without a
factor P. There is no intercept: center the targets. Errors are squared errors averaged over samples and outputs, as in
`nn.MSELoss`, and include label noise.

Eigenvalues below the rounding of the kernel in its **input dtype** (1.2e-7 of the largest in float32, 1e-12 in float64)
count as 0, and smaller ridges are raised to that value. A singular kernel is thus inverted by its pseudo-inverse.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.linalg.conjugate_gradients import solution
from featlearn.linalg.estimate import Estimate
from featlearn.linalg.stored_kernel import StoredKernel, stored_square
from featlearn.shapes import (
    checked_finite,
    checked_kernel,
    checked_number,
    checked_targets,
    rounding,
    scaled,
    symmetric,
)

# Largest negative eigenvalue of a positive kernel due to rounding, as a fraction of the largest eigenvalue.
NEGATIVE = 1e-4
# Candidate ridges per decade, from ten times the largest eigenvalue down to the rounding of the kernel.
PER_DECADE = 8
# The suggested ridge is the largest candidate whose error exceeds the minimum by at most this fraction.
INDIFFERENT = 1e-3
# Random vectors for the diagonal of the inverse of a stored kernel.
VECTORS = 64
# Relative rounding error of a difference of two equal products.
ROUNDING = 1e-15


@dataclass(frozen=True)
class Condition:
    """Conditioning of a kernel: a number, or a tensor over the stack, in each field. `str()` gives a summary."""

    samples: int
    """Number of samples P."""
    largest: Tensor
    """(...): the largest eigenvalue."""
    rank: Tensor
    """(...): number of eigenvalues above the rounding of the kernel in its input dtype."""
    number: Tensor
    """(...): the largest eigenvalue over the smallest; infinite if the rank is below P."""
    least_ridge: Tensor
    """(...): the rounding error of the largest eigenvalue. Smaller ridges have no effect."""
    suggested_ridge: Tensor | None
    """(...): the largest ridge within 0.1% of the minimal leave-one-out error; None without a task."""

    def __str__(self) -> str:
        if self.rank.dim():
            return f"conditions of {self.rank.numel()} kernels of {self.samples} samples"
        rank = int(self.rank)
        parts = [f"rank {rank} of {self.samples}", f"condition number {float(self.number):.2g}"]
        parts.append(f"no ridge below {float(self.least_ridge):.2g} has an effect")
        if self.suggested_ridge is not None:
            parts.append(f"suggested ridge {float(self.suggested_ridge):.3g}")
        return ", ".join(parts)


class Modes(NamedTuple):
    """Eigenbasis of kernels divided by their largest entry."""

    values: Tensor
    """(..., P), descending; values within rounding are set to 0"""
    vectors: Tensor
    """(..., P, P), in columns"""
    size: Tensor
    """(..., 1): divisor of the kernels; 1 for a zero kernel."""
    floor: Tensor
    """(..., 1): the least ridge, in units of size; positive."""

    def scaled(self, ridge: Tensor) -> Tensor:
        """(..., 1): a ridge (...) in units of size, at least the floor."""
        return torch.maximum((ridge[..., None] / self.size).clamp_max(1e150), self.floor)


def modes(K: Any) -> Modes:
    """Return the eigenbasis of positive kernels (..., P, P)."""
    kernel, size = scaled(symmetric(checked_kernel(K)), (-2, -1))
    values, vectors = torch.linalg.eigh(kernel)
    largest = values.abs().amax(-1, keepdim=True)
    if bool((values < -NEGATIVE * largest).any()):
        raise InputValueError(
            f"K has the eigenvalue {float((values * size[..., 0]).min()):.3g} beside the largest, "
            f"{float((values * size[..., 0]).max()):.3g}, expected none below 0: a kernel J J^T; a sketched one is an "
            "estimate, measure it without sketch"
        )
    floor = max(rounding(K), 1e-12) * torch.where(largest == 0, 1.0, largest)
    size = torch.where(size == 0, 1.0, size)[..., 0]
    return Modes(torch.where(values <= floor, 0.0, values).flip(-1), vectors.flip(-1), size, floor)


def effective_dimension(K: Tensor, ridge: float) -> Tensor:
    """Compute Tr K (K + ridge I)^-1, the number of directions kernel regression fits, for kernels (..., P, P).

    It is the rank for ridge 0, and goes to 0 for large ridges. The training outputs are those of a linear fit with that
    many parameters (Hastie et al. 2009, Sec. 7.6).
    """
    basis = modes(K)
    return _dimension(basis, basis.scaled(_constant_ridge(ridge, basis)))


def _constant_ridge(ridge: Any, basis: Modes) -> Tensor:
    """Return the same ridge for every kernel, (...)."""
    number = checked_number(ridge, "ridge")
    if number < 0:
        raise InputValueError(f"ridge={ridge!r}, expected a number >= 0 to add to the diagonal of K")
    return torch.full_like(basis.size[..., 0], number)


def _dimension(basis: Modes, ridge: Tensor) -> Tensor:
    # without a ridge every eigenvalue above the rounding counts in full
    share = torch.where(
        ridge <= basis.floor, (basis.values > basis.floor).double(), basis.values / (basis.values + ridge)
    )
    return share.sum(-1)


def condition(K: Tensor, y: Tensor | None = None) -> Condition:
    """Measure how well kernels (..., P, P) can be inverted and, for a task y, (P,) or (P, C), suggest a ridge.

    The suggested ridge is the largest one within 0.1% of the minimal leave-one-out error; see `predicted_risk`.
    """
    basis = modes(K)
    return _condition(basis, None if y is None else suggested_ridge(basis, unit_targets(y, basis)[0]))


def _condition(basis: Modes, suggested: Tensor | None) -> Condition:
    size, floor = basis.size[..., 0], basis.floor[..., 0]
    values = basis.values
    rank = (values > 0).sum(-1)
    full = rank == values.shape[-1]
    number = torch.where(full, values[..., 0] / torch.where(full, values[..., -1], 1.0), torch.inf)
    least = torch.where(values[..., 0] > 0, floor, 0.0) * size
    return Condition(values.shape[-1], values[..., 0] * size, rank, number, least, suggested)


def unit_targets(y: Any, basis: Modes) -> tuple[Tensor, Tensor]:
    """Return targets (P, C) divided by their largest absolute value, and that value."""
    checked_finite(y, "y")
    targets, largest = scaled(checked_targets(y, basis.vectors), (0, 1))
    return targets, largest.reshape(())


def used_ridge(ridge: Any, basis: Modes, targets: Tensor) -> Tensor:
    """Return the given ridge, or the suggested ridge if None, (...)."""
    return suggested_ridge(basis, targets) if ridge is None else _constant_ridge(ridge, basis)


@dataclass(frozen=True)
class PredictedRisk:
    """Predicted test error of kernel regression, estimated without test samples."""

    ridge: Tensor
    """(...): the ridge added to K."""
    leave_one_out: Estimate
    """Mean squared error on each sample, predicted from the P - 1 others; exact for any kernel. The standard error is
    by jackknife, which is 1.1 to 1.9 times the spread of repeated designs."""
    gcv: Tensor
    """(...): generalized cross-validation, (1/P) |(I - H) y|^2 / (1 - Tr H / P)^2 with H = K (K + ridge I)^-1."""
    effective_dimension: Tensor
    """(...): Tr H."""
    condition: Condition | None
    """Rank, condition number and suggested ridge of K; None for a stored kernel."""
    dimension_stderr: float = 0.0
    """Standard error of `effective_dimension`, which is estimated for a stored kernel; 0 where it is exact."""

    @property
    def kare(self) -> Tensor:
        """(...): kernel alignment risk estimator (Jacot et al. 2020), equal to `gcv`.

        (1/P) y^T (K/P + l)^-2 y / ((1/P) Tr (K/P + l)^-1)^2 with l = ridge / P. It equals `gcv` because I - H = ridge
        (K + ridge I)^-1, and the ridge cancels.
        """
        return self.gcv


def predicted_risk(K: Tensor | StoredKernel, y: Tensor, ridge: float | None = None) -> PredictedRisk:
    """Predict the test error of kernel regression of y, for kernels (..., P, P), from K and y alone.

    Three estimates of E[(f(x) - y(x))^2], averaged over outputs, from one eigendecomposition:

    - `.leave_one_out`: every sample is predicted from the others. Unbiased (for P - 1 samples) for every kernel. The
      standard error is infinite for P = 1.
    - `.gcv`, `.kare`: generalized cross-validation and the kernel alignment risk estimator, which are equal (Wei et al.
      2022). They assume that 1 / [(K + ridge I)^-1]_ii is the same for all samples, and vary less if it is. If K_ii
      differ and the ridge is small, they are wrong: by a third for tangent kernels of ReLU networks on centered MNIST
      and CIFAR-10 images.

    Use samples that were not trained on. A kernel trained on the same samples underestimates the error.

    Args:
        K: (..., P, P), symmetric, positive.
        y: (P,) or (P, C).
        ridge: Number >= 0 added to the diagonal of K; by default `condition(K, y).suggested_ridge`.

    The result is never nan for finite K and y.

    A stored kernel is read by blocks, about once for every step of conjugate gradients, and needs a ridge. The diagonal
    of (K + ridge I)^-1 is estimated from 64 random vectors. The error of `.leave_one_out` is then that of the mean over
    samples and of these vectors, without the jackknife, which needs the whole inverse.
    """
    if isinstance(K, StoredKernel):
        return _stored_risk(stored_square(K), y, ridge)
    basis = modes(K)
    targets, size = unit_targets(y, basis)
    suggested = suggested_ridge(basis, targets)
    ridges = suggested if ridge is None else _constant_ridge(ridge, basis)
    scaled_ridges = basis.scaled(ridges)
    inverse = (basis.vectors * _inverse(basis, scaled_ridges)) @ basis.vectors.mT
    left_out = leave_one_out(inverse, targets)
    gcv = _generalized(basis, targets, scaled_ridges)
    # multiply twice: the square of the largest target may overflow when the error does not
    error, stderr, gcv = (size * (size * part) for part in (left_out.error, left_out.stderr, gcv))
    stderr = stderr if len(targets) > 1 else torch.full_like(stderr, torch.inf)
    estimate = Estimate(error, stderr, len(targets))
    return PredictedRisk(ridges, estimate, gcv, _dimension(basis, scaled_ridges), _condition(basis, suggested))


def _stored_risk(kernel: StoredKernel, y: Any, ridge: float | None) -> PredictedRisk:
    number = 0.0 if ridge is None else checked_number(ridge, "ridge")
    if number <= 0:
        raise InputValueError(f"ridge={ridge!r}, expected a positive number for a stored kernel: none can be suggested")
    checked_finite(y, "y")
    targets, samples = checked_targets(y, kernel), len(kernel)
    generator = torch.Generator("cpu").manual_seed(0)
    signs = 2.0 * torch.randint(2, (samples, VECTORS), generator=generator, device="cpu").double() - 1.0
    solved = solution(kernel.__matmul__, torch.cat([targets, signs], 1), number, 1e-6, kernel.precision)
    along, probes = (number * solved).split([targets.shape[1], VECTORS], 1)  # by G = ridge (K + ridge I)^-1
    diagonals = signs * probes
    diagonal = diagonals.mean(1).clamp_min(ROUNDING)
    noise = diagonals.var(1) / VECTORS / diagonal.square()  # relative variance of the diagonal
    # E[1 / d^2] of a noisy d is 1 + 3 noise times larger to first order.
    errors = (along / diagonal[:, None]).square().mean(1) / (1 + 3 * noise)
    traces = diagonals.sum(0)
    stderr = (errors.var() / samples + (2 * errors * noise.sqrt()).square().mean() / samples).sqrt()
    estimate = Estimate(errors.mean(), stderr, samples)
    gcv = along.square().mean() / (traces.mean() / samples).square()
    dimension_stderr = float(traces.std() / VECTORS**0.5)
    return PredictedRisk(torch.tensor(number), estimate, gcv, samples - traces.mean(), None, dimension_stderr)


def _inverse(basis: Modes, ridges: Tensor) -> Tensor:
    """Return eigenvalues of (K + ridge I)^-1 times the smallest of K + ridge I, (..., R, P), for ridges (..., R)."""
    shifted = basis.values[..., None, :] + ridges[..., None]
    return shifted[..., -1:] / shifted


def _left_out(basis: Modes, targets: Tensor, ridges: Tensor) -> Tensor:
    """Return the leave-one-out squared error of every sample, (..., R, P), averaged over outputs, for ridges (..., R).

    The residual is [G y]_i / G_ii with G = (K + ridge I)^-1.
    """
    inverse = _inverse(basis, ridges)
    diagonal = inverse @ basis.vectors.square().mT
    along = basis.vectors.mT @ targets  # (..., P, C)
    total = torch.zeros_like(diagonal)
    for column in range(targets.shape[1]):
        total += ((inverse * along[..., None, :, column]) @ basis.vectors.mT / diagonal).square()
    return total / targets.shape[1]


class LeftOut(NamedTuple):
    """Leave-one-out error (...) and its standard error."""

    error: Tensor
    stderr: Tensor


def leave_one_out(inverse: Tensor, targets: Tensor) -> LeftOut:
    """Compute the leave-one-out error and its jackknife error from G = (K + ridge I)^-1 and targets (P, C).

    G is (..., P, P); a constant factor of G cancels. The jackknife leaves out every sample k and takes the
    leave-one-out error of the rest. Their residuals are those of pairs left out, e_i = (a_i G_kk - a_k G_ik) / (G_ii
    G_kk - G_ik^2) with a = G y.
    """
    samples, outputs = targets.shape
    diagonal = inverse.diagonal(dim1=-2, dim2=-1)
    along = inverse @ targets
    error = (along / diagonal[..., None]).square().mean((-2, -1))
    both = diagonal[..., :, None] * diagonal[..., None, :]
    pairs = (both - inverse.square()).clamp_min(ROUNDING * both)
    error_without = torch.zeros_like(diagonal)
    for column in range(outputs):
        a = along[..., column]
        left = (a[..., :, None] * diagonal[..., None, :] - a[..., None, :] * inverse) / pairs
        left.diagonal(dim1=-2, dim2=-1).zero_()
        error_without += left.square().sum(-2) / max(1, samples - 1) / outputs
    spread = (error_without - error_without.mean(-1, keepdim=True)).square().sum(-1)
    return LeftOut(error, ((samples - 1) / samples * spread).sqrt())


def _generalized(basis: Modes, targets: Tensor, ridge: Tensor) -> Tensor:
    inverse = _inverse(basis, ridge)[..., 0, :]
    power = (basis.vectors.mT @ targets).square().mean(-1)
    return (power * inverse.square()).mean(-1) / inverse.mean(-1).square()


def suggested_ridge(basis: Modes, targets: Tensor) -> Tensor:
    """Return the ridge to add, (...); see `condition`."""
    top = torch.maximum(10 * basis.values[..., :1], basis.floor)
    steps = math.ceil(PER_DECADE * float((top / basis.floor).log10().max()))
    factors = 10 ** (-torch.arange(steps + 1, dtype=top.dtype, device=top.device) / PER_DECADE)
    ridges = torch.maximum(top * factors, basis.floor)
    errors = _left_out(basis, targets, ridges).mean(-1)
    near_best = errors <= (1 + INDIFFERENT) * errors.amin(-1, keepdim=True)
    return torch.where(near_best, ridges, 0.0).amax(-1) * basis.size[..., 0]
