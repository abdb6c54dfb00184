"""Test error of kernel regression from training samples alone, effective dimension and condition.

Regression is k(x) (K + ridge I)^-1 y, as in `fl.dynamics.kernel_regression`: the ridge is added to the kernel as it is,
not times P, and there is no constant: center the targets, or measure what is left of them. Errors are squares averaged
over samples and outputs, as `nn.MSELoss` has them, noise of the labels included.

Eigenvalues below the rounding of the kernel **as it was given** (1.2e-7 of the largest in float32, 1e-12 in float64)
are no numbers to divide by: a smaller ridge counts as that. So a singular kernel takes its pseudo-inverse.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.linalg.estimate import Estimate
from featlearn.shapes import (
    checked_finite,
    checked_kernel,
    checked_number,
    checked_targets,
    rounding,
    scaled,
    symmetric,
)

# A positive kernel in which rounding made eigenvalues negative; beyond this share of the largest it is none.
NEGATIVE = 1e-4
# Ridges that are tried, in each decade from ten times the largest eigenvalue down to the rounding of the kernel.
PER_DECADE = 8
# Of the ridges tried the largest one that costs no more than this share of the least error is suggested.
INDIFFERENT = 1e-3
# What rounding leaves of a difference of two equal products.
ROUNDING = 1e-15


@dataclass(frozen=True)
class Condition:
    """How well a kernel can be inverted; a number, or a tensor over the stack, in each field. `str()` is a sentence."""

    samples: int
    """P"""
    largest: Tensor
    """(...): the largest eigenvalue."""
    rank: Tensor
    """(...): how many eigenvalues are above the rounding of the kernel as it was given."""
    number: Tensor
    """(...): the largest eigenvalue over the smallest; infinite where the rank is below P."""
    least_ridge: Tensor
    """(...): the rounding of the largest eigenvalue. A smaller ridge changes nothing but lost digits."""
    suggested_ridge: Tensor | None
    """(...): the ridge with the least leave-one-out error, up to 0.1 % of that error; None without a task."""

    def __str__(self) -> str:
        if self.rank.dim():
            return f"conditions of {self.rank.numel()} kernels of {self.samples} samples"
        rank = int(self.rank)
        said = [f"rank {rank} of {self.samples}", f"condition number {float(self.number):.2g}"]
        said.append(f"no ridge below {float(self.least_ridge):.2g} has an effect")
        if self.suggested_ridge is not None:
            said.append(f"suggested ridge {float(self.suggested_ridge):.3g}")
        return ", ".join(said)


class Modes(NamedTuple):
    """Eigenbasis of kernels divided by their largest entry."""

    values: Tensor
    """(..., P), descending; those that are rounding exactly 0"""
    vectors: Tensor
    """(..., P, P), in columns"""
    size: Tensor
    """(..., 1): what the kernels were divided by; 1 for a zero kernel."""
    floor: Tensor
    """(..., 1): the least ridge, in units of size; positive."""

    def scaled(self, ridge: Tensor) -> Tensor:
        """(..., 1): a ridge (...) in units of size, at least the floor."""
        return torch.maximum((ridge[..., None] / self.size).clamp_max(1e150), self.floor)


def modes(K: Any) -> Modes:
    """The eigenbasis of positive kernels (..., P, P)."""
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
    """Tr K (K + ridge I)^-1: how many directions kernel regression fits, for kernels (..., P, P).

    The rank without a ridge, 0 for a large one; the training outputs are those of a linear fit of that many
    parameters (Hastie et al. 2009, Sec. 7.6).
    """
    basis = modes(K)
    return _dimension(basis, basis.scaled(_given(ridge, basis)))


def _given(ridge: Any, basis: Modes) -> Tensor:
    """(...): the same ridge for every kernel."""
    number = checked_number(ridge, "ridge")
    if number < 0:
        raise InputValueError(f"ridge={ridge!r}, expected a number >= 0, which is added to the diagonal of K")
    return torch.full_like(basis.size[..., 0], number)


def _dimension(basis: Modes, ridge: Tensor) -> Tensor:
    # without a ridge every eigenvalue above the rounding counts in full
    share = torch.where(
        ridge <= basis.floor, (basis.values > basis.floor).double(), basis.values / (basis.values + ridge)
    )
    return share.sum(-1)


def condition(K: Tensor, y: Tensor | None = None) -> Condition:
    """How well kernels (..., P, P) can be inverted and, for a task y, (P,) or (P, C), which ridge to add.

    The suggested ridge is the one with the least leave-one-out error; see `predicted_risk`. Of those that cost no more
    than 0.1 % of it the largest is taken, for the sake of the condition.
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
    """Targets (P, C) divided by the largest of them, and that one."""
    checked_finite(y, "y")
    targets, largest = scaled(checked_targets(y, basis.vectors), (0, 1))
    return targets, largest.reshape(())


def used_ridge(ridge: Any, basis: Modes, targets: Tensor) -> Tensor:
    """(...): the ridge as it was given, the suggested one for None."""
    return suggested_ridge(basis, targets) if ridge is None else _given(ridge, basis)


@dataclass(frozen=True)
class PredictedRisk:
    """What kernel regression will err on new samples, by estimates that see no test sample."""

    ridge: Tensor
    """(...): the ridge that was used, as added to K."""
    leave_one_out: Estimate
    """Mean squared error on each sample of regression on the P - 1 others: exact, whatever the kernel. Its standard
    error is the jackknife's, which is rather too large: 1.1 to 1.9 times the spread of repeated designs."""
    gcv: Tensor
    """(...): generalized cross-validation, (1/P) |(I - H) y|^2 / (1 - Tr H / P)^2 with H = K (K + ridge I)^-1."""
    effective_dimension: Tensor
    """(...): Tr H."""
    condition: Condition
    """Rank, condition number and suggested ridge of K."""

    @property
    def kare(self) -> Tensor:
        """(...): kernel alignment risk estimator (Jacot et al. 2020), which is the number of `gcv`.

        (1/P) y^T (K/P + l)^-2 y / ((1/P) Tr (K/P + l)^-1)^2 with l = ridge / P: I - H is ridge (K + ridge I)^-1, and
        the ridge cancels.
        """
        return self.gcv


def predicted_risk(K: Tensor, y: Tensor, ridge: float | None = None) -> PredictedRisk:
    """Test error of regression of y with a kernel (..., P, P), from K and y alone.

    Three estimates of E[(f(x) - y(x))^2], averaged over outputs, from one eigendecomposition:

    - `.leave_one_out`: every sample is predicted from the others. Unbiased (for P - 1 samples) for every kernel. Its
      standard error is infinite for P = 1.
    - `.gcv`, `.kare`: generalized cross-validation and the kernel alignment risk estimator, one number (Wei et al. 2022
      say so too). They take what a sample adds, 1 / [(K + ridge I)^-1]_ii, to be the same for all samples, which is
      so for many samples of one length and one kind; then they spread less. Where K_ii differ and the ridge is
      small, they are wrong: by a third for tangent kernels of ReLU networks on centered MNIST and CIFAR-10 images.

    The kernel must not have seen the labels: measured after training on these very samples it promises too much. Take
    samples that were not trained on.

    Args:
        K: (..., P, P), symmetric, positive.
        y: (P,) or (P, C).
        ridge: >= 0, added to the diagonal of K; None takes `condition(K, y).suggested_ridge`.

    Never nan for finite K and y.
    """
    basis = modes(K)
    targets, size = unit_targets(y, basis)
    suggested = suggested_ridge(basis, targets)
    used = suggested if ridge is None else _given(ridge, basis)
    added = basis.scaled(used)
    inverse = (basis.vectors * _inverse(basis, added)) @ basis.vectors.mT
    left_out = leave_one_out(inverse, targets)
    gcv = _generalized(basis, targets, added)
    # once and again: the square of the largest target may overflow where the error does not
    error, stderr, gcv = (size * (size * part) for part in (left_out.error, left_out.stderr, gcv))
    stderr = stderr if len(targets) > 1 else torch.full_like(stderr, torch.inf)
    estimate = Estimate(error, stderr, len(targets))
    return PredictedRisk(used, estimate, gcv, _dimension(basis, added), _condition(basis, suggested))


def _inverse(basis: Modes, ridges: Tensor) -> Tensor:
    """(..., R, P): eigenvalues of (K + ridge I)^-1, times the smallest of K + ridge I, for ridges (..., R)."""
    shifted = basis.values[..., None, :] + ridges[..., None]
    return shifted[..., -1:] / shifted


def _left_out(basis: Modes, targets: Tensor, ridges: Tensor) -> Tensor:
    """(..., R, P): squared error on every sample, mean over outputs, of regression on the others, for ridges (..., R).

    The residual is [G y]_i / G_ii with G = (K + ridge I)^-1: a row of the inverse is the regression on the others.
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
    """From G = (K + ridge I)^-1, (..., P, P), up to a factor, and targets (P, C); the jackknife's standard error.

    The jackknife leaves out every sample k and takes the leave-one-out error of the rest, whose residuals are those of
    pairs left out, e_i = (a_i G_kk - a_k G_ik) / (G_ii G_kk - G_ik^2) with a = G y.
    """
    samples, outputs = targets.shape
    own = inverse.diagonal(dim1=-2, dim2=-1)
    along = inverse @ targets
    error = (along / own[..., None]).square().mean((-2, -1))
    both = own[..., :, None] * own[..., None, :]
    pairs = (both - inverse.square()).clamp_min(ROUNDING * both)
    without = torch.zeros_like(own)
    for column in range(outputs):
        a = along[..., column]
        left = (a[..., :, None] * own[..., None, :] - a[..., None, :] * inverse) / pairs
        left.diagonal(dim1=-2, dim2=-1).zero_()
        without += left.square().sum(-2) / max(1, samples - 1) / outputs
    spread = (without - without.mean(-1, keepdim=True)).square().sum(-1)
    return LeftOut(error, ((samples - 1) / samples * spread).sqrt())


def _generalized(basis: Modes, targets: Tensor, ridge: Tensor) -> Tensor:
    inverse = _inverse(basis, ridge)[..., 0, :]
    power = (basis.vectors.mT @ targets).square().mean(-1)
    return (power * inverse.square()).mean(-1) / inverse.mean(-1).square()


def suggested_ridge(basis: Modes, targets: Tensor) -> Tensor:
    """(...): the ridge with the least leave-one-out error; see `condition`."""
    top = torch.maximum(10 * basis.values[..., :1], basis.floor)
    steps = math.ceil(PER_DECADE * float((top / basis.floor).log10().max()))
    down = 10 ** (-torch.arange(steps + 1, dtype=top.dtype, device=top.device) / PER_DECADE)
    ridges = torch.maximum(top * down, basis.floor)
    errors = _left_out(basis, targets, ridges).mean(-1)
    good = errors <= (1 + INDIFFERENT) * errors.amin(-1, keepdim=True)
    return torch.where(good, ridges, 0.0).amax(-1) * basis.size[..., 0]
