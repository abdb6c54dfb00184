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
    """(S,): n."""
    error: Tensor
    """(..., S): mean over samples and outputs of the squared error on new samples."""
    stderr: Tensor
    """(..., S): its standard error, by the spread over test samples and over training sets."""
    extrapolated: Tensor
    """(S,): whether n is above the number of samples of the kernel, where the curve is continued and not measured."""
    ridge: Tensor
    """(...): the ridge that was used, as added to K, for every n."""


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
    """Test error of regression of y with this kernel on n samples, for each n in `sizes`.

    Regression is k(x) (K + ridge I)^-1 y, with the same ridge for every n; errors are squares averaged over samples and
    outputs. n <= P: n of the P samples are drawn; each of the others is predicted from them, and each of them from the
    n - 1 others of the draw (leave-one-out). So all P samples are test samples of every draw. This assumes nothing of
    the kernel, where the theory of learning curves (`theory.transfer`) with the measured spectrum in place of the true
    one goes to 0 as n comes near P.

    n > P: the power law of n = P/4, P/2, P is continued, level where the error rises. `.extrapolated` marks it. It
    knows nothing of a floor (noise of the labels) or a peak (n near the rank of the kernel) beyond P.

    Args:
        K: (..., P, P), symmetric, positive; of samples whose labels the kernel has not seen.
        y: (P,) or (P, C).
        sizes: numbers of training samples >= 1.
        ridge: >= 0, added to the diagonal; None takes `condition(K, y).suggested_ridge` of all P samples.
        draws: training sets for each n < P; kernels of a stack share them.
        generator: where they come from; by default the same ones at every call.

    Never nan for finite K and y.
    """
    basis = modes(K)
    targets, size = unit_targets(y, basis)
    wanted, draws = _sizes(sizes), _count(draws, "draws")
    used = used_ridge(ridge, basis, targets)
    # without the negative eigenvalues of rounding, every part of it has a Cholesky factor once the floor is added
    shifted = (basis.vectors * (basis.values + basis.scaled(used))[..., None, :]) @ basis.vectors.mT
    source = torch.Generator().manual_seed(0) if generator is None else generator
    samples = len(targets)
    needed = {min(n, samples) for n in wanted} | (_anchors(samples) if max(wanted) > samples else set())
    measured = {n: _point(shifted, targets, n, draws, source) for n in sorted(needed)}
    points = [measured[n] if n <= samples else _continued(measured, samples, n) for n in wanted]
    error, stderr = (size * (size * torch.stack(part, -1)) for part in zip(*points, strict=True))
    n = torch.tensor(wanted, device=error.device)
    return RiskCurve(n, error, stderr, n > samples, used)


def _sizes(given: Any) -> list[int]:
    values = given.tolist() if isinstance(given, Tensor) else given
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise InputTypeError(f"sizes={given!r}, expected a sequence of numbers of training samples")
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
    """The error at n, and its standard error."""
    samples = len(targets)
    if n == samples:
        return leave_one_out(torch.cholesky_inverse(torch.linalg.cholesky(shifted)), targets)
    errors = shifted.new_empty(draws, *shifted.shape[:-2], samples)
    for draw in range(draws):
        order = torch.randperm(samples, generator=source, device=source.device).to(targets.device)
        errors[draw][..., order] = _squares(shifted, targets, order[:n], order[n:])
    tested = errors.mean(0).var(-1, correction=0) / samples
    # draws share samples: they vary less than new training sets would, and their mean varies more
    share = n / samples
    trained = errors.mean(-1).var(0, correction=min(1, draws - 1)) * (share / (1 - share) + 1 / draws)
    return LeftOut(errors.mean((0, -1)), (tested + trained).sqrt())


def _squares(shifted: Tensor, targets: Tensor, chosen: Tensor, others: Tensor) -> Tensor:
    """(..., P): squared errors, mean over outputs: of the chosen samples each left out, then of the others."""
    part = shifted[..., chosen[:, None], chosen]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(part))
    weights = inverse @ targets[chosen]
    left_out = weights / inverse.diagonal(dim1=-2, dim2=-1)[..., None]
    rest = targets[others] - shifted[..., others[:, None], chosen] @ weights
    return torch.cat([left_out, rest], -2).square().mean(-1)


def _continued(measured: dict[int, LeftOut], samples: int, n: int) -> LeftOut:
    """The power law through the anchors, from the last of them on."""
    anchors = sorted(_anchors(samples))
    last, first = measured[samples], measured[anchors[0]]
    logs = torch.stack([measured[m].error.clamp_min(1e-300).log() for m in anchors])
    where = torch.tensor(anchors, dtype=logs.dtype, device=logs.device).log()
    spread = float((where - where.mean()).square().sum())
    slope = torch.tensordot(where - where.mean(), logs, 1) / (spread or 1.0)
    far = math.log(n / samples)
    error = last.error * (slope.clamp(max=0.0) * far).exp()
    near, early = (point.stderr / point.error.clamp_min(1e-300) for point in (last, first))
    unsure = (near.square() + early.square()).sqrt() / max(math.log(samples / anchors[0]), 1e-3)
    return LeftOut(error, error * (near.square() + (far * unsure).square()).sqrt())
