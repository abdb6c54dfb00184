"""How far a kernel has moved, how fast, and at which feature rate."""

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.metrics.alignment import alignment
from featlearn.shapes import checked_kernel, checked_targets, checked_tensor, ratio


def kernel_distance(K1: Tensor, K2: Tensor) -> Tensor:
    """1 - cosine of two kernels, <K1, K2> / (|K1|_F |K2|_F); stacks are compared pair by pair, or with one kernel.

    Insensitive to scale: 0 where one kernel is a multiple of the other.
    """
    a, b = checked_tensor(K1, "K1"), checked_tensor(K2, "K2")
    if a.dim() < 2 or b.dim() < 2 or a.shape[-2:] != b.shape[-2:]:
        raise InputValueError(f"K1 has shape {tuple(a.shape)} and K2 {tuple(b.shape)}, expected kernels of equal size")
    b = b.to(a.device)
    sizes = torch.linalg.matrix_norm(a), torch.linalg.matrix_norm(b)
    # 1 - cos = |a/|a| - b/|b||^2 / 2 keeps its digits where the kernels are nearly parallel.
    difference = ratio(a, sizes[0][..., None, None].expand_as(a)) - ratio(b, sizes[1][..., None, None].expand_as(b))
    return difference.square().sum((-2, -1)) / 2


def kernel_velocity(kernels: Tensor, times: Tensor) -> Tensor:
    """Distance between neighbouring kernels of a run (T, P, P), divided by the time between them: (T - 1,)."""
    stack, moments = checked_kernel(kernels, "kernels"), checked_tensor(times, "times").to(kernels.device)
    if stack.dim() != 3 or moments.shape != stack.shape[:1] or len(moments) < 2:
        raise InputValueError(
            f"kernels have shape {tuple(stack.shape)} and times {tuple(moments.shape)}, "
            "expected (T, P, P) and (T,) with T > 1"
        )
    steps = moments.diff()
    if not bool((steps > 0).all()):
        raise InputValueError("times do not increase, expected the times of the kernels in order")
    return kernel_distance(stack[1:], stack[:-1]) / steps


def feature_rate(K0: Tensor, K1: Tensor, y: Tensor, *, normalized: bool = False) -> Tensor:
    """The effective feature rate gamma: K1 aligns with the task as K0 + gamma y y^T would (000 Eq. 20, corrected).

    gamma = |K0|_F / |y|^2 * (A1 sqrt((1 - A0^2) / (1 - A1^2)) - A0), with A0, A1 the alignments of K0 and K1. The
    print has the numerator of the wrong kernel, and gives an alignment above 1. Unique for A1 < 1; negative where
    alignment fell; nan where an alignment is 1. `normalized=True` measures it for K / |K0| and y / |y| (000 Sec. 7),
    which is comparable between networks; in raw units gamma scales as |K0| / |y|^2.

    K0 and K1 are (..., P, P) with y (P,); for several classes (..., C, P, P) with y (P, C): the mean over classes.
    """
    first, last = checked_kernel(K0, "K0"), checked_kernel(K1, "K1")
    if first.shape[-2:] != last.shape[-2:]:
        raise InputValueError(f"K0 has shape {tuple(first.shape)} and K1 {tuple(last.shape)}, expected equal sizes")
    targets = checked_targets(y, first)
    if targets.shape[1] == 1:
        return _feature_rate(first, last, targets[:, 0], normalized)
    if first.dim() < 3 or first.shape[-3] != targets.shape[1] or last.dim() < 3 or last.shape[-3] != targets.shape[1]:
        raise InputValueError(
            f"y has {targets.shape[1]} columns, K0 shape {tuple(first.shape)} and K1 {tuple(last.shape)}; expected a "
            "kernel for every column, (..., C, P, P): measure them with fl.ntk(outputs='each')"
        )
    rates = [
        _feature_rate(first[..., c, :, :], last[..., c, :, :], targets[:, c], normalized)
        for c in range(targets.shape[1])
    ]
    return torch.stack(rates).mean(0)


def _feature_rate(first: Tensor, last: Tensor, target: Tensor, normalized: bool) -> Tensor:
    before, after = alignment(first, target), alignment(last, target)
    scale = torch.linalg.matrix_norm(first) / target.square().sum()
    rate = after * ratio((1 - before.square()).expand_as(after), 1 - after.square()).sqrt() - before
    return rate if normalized else scale * rate
