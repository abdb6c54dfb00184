"""The learning curve of kernel regression, from one measured kernel."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.metrics.risk import LeftOut, leave_one_out, modes, unit_targets, used_ridge
from featlearn.signatures import name_keywords


@dataclass(frozen=True)
class RiskCurve:
    """Predicted test error of kernel regression against the number of training samples."""

    sizes: Tensor
    """(S,): numbers of training samples n."""
    error: Tensor
    """(..., S): squared error on new samples, averaged over samples and outputs."""
    stderr: Tensor
    """(..., S): standard error, from the spread over test samples and over training sets."""
    extrapolated: Tensor
    """(S,): whether n exceeds the number of samples of the kernel, so that the point is extrapolated."""
    ridge: Tensor
    """(...): ridge added to K, the same for every n."""


@name_keywords()
def learning_curve(
    K: Tensor,
    y: Tensor,
    sizes: Sequence[int] | Tensor,
    ridge: float | None = None,
    *,
    draws: int = 10,
    generator: torch.Generator | None = None,
) -> RiskCurve:
    """Estimate the test error of kernel regression of y on n samples, for each n in `sizes`.

    Regression is k(x) (K + ridge I)^-1 y, with the same ridge for every n. Errors are squared errors averaged over
    samples and outputs. For n <= P, n of the P samples are drawn for training. The other samples are predicted from
    them, and each drawn sample from the n - 1 others (leave-one-out). All P samples are thus test samples of every
    draw. This makes no assumption about the kernel. The theory of learning curves (`theory.transfer`) on the measured
    spectrum would go to 0 as n approaches P.

    For n > P, the power law through n = P/4, P/2, P is extrapolated, or held constant if the error rises;
    `.extrapolated` marks these points. Beyond P, it misses a floor (label noise) or a peak (n near the rank of the
    kernel).

    Args:
        K: (..., P, P), symmetric, positive, of samples that were not trained on.
        y: (P,) or (P, C).
        sizes: Numbers of training samples, each >= 1.
        ridge: Number >= 0 added to the diagonal; by default `condition(K, y).suggested_ridge` of all P samples.
        draws: Training sets for each n < P, shared by the kernels of a stack.
        generator: Source of the draws; by default a fixed seed.

    The result is never nan for finite K and y.
    """
    basis = modes(K)
    targets, size = unit_targets(y, basis)
    counts, draws = _sizes(sizes), _count(draws, "draws")
    ridges = used_ridge(ridge, basis, targets)
    # with negative eigenvalues from rounding set to 0, adding the floor makes every submatrix positive definite
    shifted = (basis.vectors * (basis.values + basis.scaled(ridges))[..., None, :]) @ basis.vectors.mT
    source = torch.Generator().manual_seed(0) if generator is None else generator
    samples = len(targets)
    needed = {min(n, samples) for n in counts} | (_anchors(samples) if max(counts) > samples else set())
    measured = {n: _point(shifted, targets, n, draws, source) for n in sorted(needed)}
    estimates = [measured[n] if n <= samples else _extrapolate(measured, samples, n) for n in counts]
    error, stderr = (size * (size * torch.stack(part, -1)) for part in zip(*estimates, strict=True))
    n = torch.tensor(counts, device=error.device)
    return RiskCurve(n, error, stderr, n > samples, ridges)


def _sizes(sizes: Any) -> list[int]:
    values = sizes.tolist() if isinstance(sizes, Tensor) else sizes
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise InputTypeError(f"sizes={sizes!r}, expected a sequence of numbers of training samples")
    return [_count(n, "sizes") for n in values]


def _count(value: Any, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InputTypeError(f"{name}: {value!r}, expected a whole number >= 1") from None
    if number < 1:
        raise InputValueError(f"{name}: {value!r}, expected a whole number >= 1")
    return number


def _anchors(samples: int) -> set[int]:
    return {max(1, samples // 4), max(1, samples // 2), samples}


def _point(shifted: Tensor, targets: Tensor, n: int, draws: int, source: torch.Generator) -> LeftOut:
    """Return the error at n, and its standard error."""
    samples = len(targets)
    if n == samples:
        return leave_one_out(torch.cholesky_inverse(torch.linalg.cholesky(shifted)), targets)
    errors = shifted.new_empty(draws, *shifted.shape[:-2], samples)
    for draw in range(draws):
        order = torch.randperm(samples, generator=source, device=source.device).to(targets.device)
        errors[draw][..., order] = _squares(shifted, targets, order[:n], order[n:])
    tested = errors.mean(0).var(-1, correction=0) / samples
    # draws overlap: they vary less than independent training sets, and their mean varies more
    share = n / samples
    trained = errors.mean(-1).var(0, correction=min(1, draws - 1)) * (share / (1 - share) + 1 / draws)
    return LeftOut(errors.mean((0, -1)), (tested + trained).sqrt())


def _squares(shifted: Tensor, targets: Tensor, train: Tensor, test: Tensor) -> Tensor:
    """Return (..., P): squared errors averaged over outputs, for `train` by leave-one-out, then for `test`."""
    part = shifted[..., train[:, None], train]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(part))
    weights = inverse @ targets[train]
    left_out = weights / inverse.diagonal(dim1=-2, dim2=-1)[..., None]
    rest = targets[test] - shifted[..., test[:, None], train] @ weights
    return torch.cat([left_out, rest], -2).square().mean(-1)


def _extrapolate(measured: dict[int, LeftOut], samples: int, n: int) -> LeftOut:
    """Extrapolate the power law through the anchors, starting at the last anchor."""
    anchors = sorted(_anchors(samples))
    last, first = measured[samples], measured[anchors[0]]
    logs = torch.stack([measured[m].error.clamp_min(1e-300).log() for m in anchors])
    log_sizes = torch.tensor(anchors, dtype=logs.dtype, device=logs.device).log()
    spread = float((log_sizes - log_sizes.mean()).square().sum())
    slope = torch.tensordot(log_sizes - log_sizes.mean(), logs, 1) / (spread or 1.0)
    distance = math.log(n / samples)
    error = last.error * (slope.clamp(max=0.0) * distance).exp()
    last_error, first_error = (point.stderr / point.error.clamp_min(1e-300) for point in (last, first))
    slope_error = (last_error.square() + first_error.square()).sqrt() / max(math.log(samples / anchors[0]), 1e-3)
    return LeftOut(error, error * (last_error.square() + (distance * slope_error).square()).sqrt())
