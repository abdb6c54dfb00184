"""Kernel distance, kernel velocity, and feature rate."""

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import REMAINDER, checked_kernel, checked_targets, checked_tensor, ratio, rounding, scaled
from featlearn.shapes import centered as without_constant
from featlearn.signatures import name_keywords


@name_keywords()
def kernel_distance(K1: Tensor, K2: Tensor, *, centered: bool = False) -> Tensor:
    """Compute 1 - cosine of two kernels, with cosine <K1, K2> / (|K1|_F |K2|_F).

    Stacks of equal length are compared pair by pair; a single kernel is compared with every kernel of a stack. The
    distance ignores scale: it is 0 if the kernels are proportional. nan if a kernel is zero.

    `centered=True` compares H K H, with H = I - 1 1^T / P. Kernels of networks with biases or ReLUs are dominated by a
    constant, which hides other changes: a distance of 0.005 can be 0.16 after centering.
    """
    a, b = checked_tensor(K1, "K1"), checked_tensor(K2, "K2")
    if a.dim() < 2 or b.dim() < 2 or a.shape[-2:] != b.shape[-2:] or not a.numel() or not b.numel():
        raise InputValueError(f"K1 has shape {tuple(a.shape)} and K2 {tuple(b.shape)}, expected kernels of equal size")
    _refuse_unequal_stacks(("K1", a), ("K2", b))
    a, b = (_normalized(kernel, centered) for kernel in (a, b.to(a.device)))
    # 1 - cos = |a - b|^2 / 2 keeps its digits where the kernels are nearly parallel.
    return (a - b).square().sum((-2, -1)) / 2


def _normalized(kernel: Tensor, centered: bool) -> Tensor:
    kernel = scaled(kernel, (-2, -1))[0]
    kernel = scaled(without_constant(kernel), (-2, -1))[0] if centered else kernel
    return ratio(kernel, torch.linalg.matrix_norm(kernel, keepdim=True).expand_as(kernel))


def _refuse_unequal_stacks(first: tuple[str, Tensor], second: tuple[str, Tensor]) -> None:
    shapes = [tuple(kernel.shape) for _, kernel in (first, second)]
    try:
        torch.broadcast_shapes(*(shape[:-2] for shape in shapes))
    except RuntimeError:
        raise InputValueError(
            f"{first[0]} has shape {shapes[0]} and {second[0]} {shapes[1]}, expected stacks of equal "
            "length, or a single kernel and a stack"
        ) from None


@name_keywords()
def kernel_velocity(kernels: Tensor, times: Tensor, *, centered: bool = False) -> Tensor:
    """Compute the distance between consecutive kernels of a run (T, P, P), divided by the elapsed time: (T - 1,).

    `centered` as in `kernel_distance`.
    """
    stack, moments = checked_kernel(kernels, "kernels"), checked_tensor(times, "times").to(kernels.device)
    if stack.dim() != 3 or moments.shape != stack.shape[:1] or len(moments) < 2:
        raise InputValueError(
            f"kernels have shape {tuple(stack.shape)} and times {tuple(moments.shape)}, "
            "expected (T, P, P) and (T,) with T > 1"
        )
    steps = moments.diff()
    if not bool((steps > 0).all()):
        raise InputValueError("times are not increasing, expected kernels in order of time")
    return kernel_distance(stack[1:], stack[:-1], centered=centered) / steps


@name_keywords()
def feature_rate(K0: Tensor, K1: Tensor, y: Tensor, *, normalized: bool = False, centered: bool = False) -> Tensor:
    """Compute the effective feature rate gamma: K1 has the alignment of K0 + gamma y y^T.

    See Shan & Bordelon 2021a, Eq. 20 (corrected).

    gamma = |K0|_F / |y|^2 * (A1 sqrt((1 - A0^2) / (1 - A1^2)) - A0), with A0, A1 the alignments of K0 and K1. The
    print has the numerator of the wrong kernel, and gives an alignment above 1. gamma is unique for A1 < 1, negative if
    alignment fell, and nan if an alignment is 1 up to rounding in the dtype of the kernel. `normalized=True` uses K /
    |K0| and y / |y| (Shan & Bordelon 2021a, Sec. 7), which can be compared between networks. In raw units gamma scales
    as |K0| / |y|^2. `centered=True` centers kernels and targets first, as `centered_alignment` does.

    K0 and K1 are (..., P, P) with y (P,); for several classes they are (..., C, P, P) with y (P, C), and the result is
    averaged over classes. A stack is compared with a single kernel (C kernels for classes), or with a stack of equal
    length.
    """
    first, last = checked_kernel(K0, "K0"), checked_kernel(K1, "K1").to(K0.device)
    if first.shape[-2:] != last.shape[-2:]:
        raise InputValueError(f"K0 has shape {tuple(first.shape)} and K1 {tuple(last.shape)}, expected equal sizes")
    targets = checked_targets(y, first)
    if centered:
        first, last, targets = without_constant(first), without_constant(last), targets - targets.mean(0)
    classes = targets.shape[1]
    if classes > 1 and any(kernel.dim() < 3 or kernel.shape[-3] != classes for kernel in (first, last)):
        raise InputValueError(
            f"y has {classes} columns, K0 shape {tuple(first.shape)} and K1 {tuple(last.shape)}; expected a "
            "kernel for every column, (..., C, P, P): measure them with fl.ntk(outputs='each')"
        )
    _refuse_unequal_stacks(("K0", first), ("K1", last))
    columns = targets.T if classes > 1 else targets[:, 0]
    direction, height = scaled(columns, (-1,))
    size = direction.norm(dim=-1, keepdim=True)
    direction = ratio(direction, size.expand_as(direction))
    first, largest = scaled(first, (-2, -1))
    along0, across0 = _split(first, direction, rounding(K0))
    along1, across1 = _split(scaled(last, (-2, -1))[0], direction, rounding(K1))
    rates = across0 * along1 / across1 - along0
    if normalized:
        rates = rates / torch.hypot(along0, across0)
    else:
        rates = rates * largest[..., 0, 0] / size[..., 0].square() / height[..., 0] / height[..., 0]
    return rates.mean(-1) if classes > 1 else rates


def _split(kernel: Tensor, direction: Tensor, precision: float) -> tuple[Tensor, Tensor]:
    """Return the part of kernels (..., P, P) along u u^T, for unit vectors u (..., P), and the norm of the remainder.

    The two are |K| A and |K| sqrt(1 - A^2). The second is computed from the remainder, because 1 - A^2 cancels. It is
    nan where it is within rounding, that is, where A is 1.
    """
    along = (direction * (kernel @ direction[..., None])[..., 0]).sum(-1)
    task = direction[..., :, None] * direction[..., None, :]
    across = torch.linalg.matrix_norm(kernel - along[..., None, None] * task)
    return along, torch.where(across <= max(precision, REMAINDER) * torch.hypot(along, across), torch.nan, across)
