"""A common form for kernels and targets: independent square problems, each with separate right-hand sides."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.shapes import checked_finite, checked_tensor, refuse_labels, rounding, symmetric


@dataclass(frozen=True)
class BatchedProblem:
    """B independent problems of size N with R columns each, and the map back to the shape of y.

    A shared kernel (P, P) is a single problem with C columns. (C, P, P) are C problems with a single column. A full
    kernel (P, P, C, C) is a single problem of size P C with a single column.
    """

    kernel: Tensor
    """(B, N, N)"""
    targets: Tensor
    """(B, N, R)"""
    start: Tensor
    """(B, N, R), the outputs at time 0."""
    test_kernel: Tensor | None
    """(B, N2, N)"""
    test_start: Tensor | None
    """(B, N2, R)"""
    kind: str
    single: bool
    """Whether y has no output axis."""
    outputs: int
    precision: float
    """Eigenvalues below this fraction of the largest eigenvalue are rounding; see `eigenbasis`."""

    def back(self, values: Tensor) -> Tensor:
        """Map (..., B, N, R) to (..., P) or (..., P, C)."""
        if self.kind == "each":
            values = values[..., 0].transpose(-1, -2)
        elif self.kind == "full":
            values = values[..., 0, :, 0].unflatten(-1, (-1, self.outputs))
        else:
            values = values[..., 0, :, :]
        return values[..., 0] if self.single else values

    def forth(self, values: Tensor) -> Tensor:
        """Map (P, C) to (B, N, R), the inverse of `back`."""
        return _columns(values, self.kind)


def problem(K: Any, y: Any, f0: Any, K_test: Any, f0_test: Any) -> BatchedProblem:
    """Check shapes and bring all arguments to the common form."""
    kernel = checked_finite(K, "K")
    targets = checked_finite(y, "y").to(kernel.device)
    if targets.dim() not in (1, 2) or targets.numel() == 0:
        raise InputValueError(f"y has shape {tuple(targets.shape)}, expected (P,) or (P, C)")
    refuse_labels(y, "y")
    single = targets.dim() == 1
    columns = targets[:, None] if single else targets
    samples, outputs = columns.shape
    shapes = {
        (samples, samples): "shared",
        (outputs, samples, samples): "each",
        (samples, samples, outputs, outputs): "full",
    }
    kind = shapes.get(tuple(kernel.shape))
    if kind is None:
        expected = " or ".join(str(shape) for shape in shapes)
        raise InputValueError(
            f"K has shape {tuple(kernel.shape)} and y {tuple(targets.shape)}, expected K of shape {expected}: "
            "(P, P), (C, P, P) or (P, P, C, C)"
        )
    start = outputs_at_start(f0, "f0", samples, outputs, single, kernel)
    test_kernel, test_start = _test(K_test, f0_test, kernel, kind, samples, outputs, single)
    return BatchedProblem(
        symmetric(_square(kernel, kind)),
        _columns(columns, kind),
        _columns(start, kind),
        test_kernel,
        test_start,
        kind,
        single,
        outputs,
        max(rounding(K), 1e-12),
    )


def _square(kernel: Tensor, kind: str) -> Tensor:
    """Bring a kernel to shape (B, N2, N)."""
    if kind == "full":
        rows, columns, outputs = kernel.shape[:3]
        return kernel.transpose(1, 2).reshape(1, rows * outputs, columns * outputs)
    return kernel[None] if kind == "shared" else kernel


def _columns(values: Tensor, kind: str) -> Tensor:
    """Map (P, C) to (B, N, R)."""
    if kind == "full":
        return values.reshape(1, -1, 1)
    return values.T[..., None] if kind == "each" else values[None]


def outputs_at_start(values: Any, name: str, samples: int, outputs: int, single: bool, like: Tensor) -> Tensor:
    """Return outputs at time 0 as (P, C), checked against the shape of y; zero if None."""
    if values is None:
        return like.new_zeros(samples, outputs)
    start = checked_finite(values, name).to(like.device)
    shape = (samples,) if single else (samples, outputs)
    if tuple(start.shape) != shape:
        raise InputValueError(f"{name} has shape {tuple(start.shape)}, expected {shape} like y")
    return start[:, None] if single else start


def _test(
    K_test: Any, f0_test: Any, kernel: Tensor, kind: str, samples: int, outputs: int, single: bool
) -> tuple[Tensor | None, Tensor | None]:
    if K_test is None:
        if f0_test is not None:
            raise InputValueError("f0_test is passed without K_test, expected both or none")
        return None, None
    cross = checked_finite(K_test, "K_test").to(kernel.device)
    size = cross.shape[1 if kind == "each" else 0] if cross.dim() == kernel.dim() else -1
    shape = {
        "shared": (size, samples),
        "each": (outputs, size, samples),
        "full": (size, samples, outputs, outputs),
    }[kind]
    if tuple(cross.shape) != shape:
        raise InputValueError(
            f"K_test has shape {tuple(cross.shape)} and K {tuple(kernel.shape)}, expected the kernel of test points "
            "with training points, (P2, P), (C, P2, P) or (P2, P, C, C): fl.ntk(model, x_test, x2=x)"
        )
    start = outputs_at_start(f0_test, "f0_test", size, outputs, single, kernel)
    return _square(cross, kind), _columns(start, kind)


class Eigenbasis(NamedTuple):
    """Eigenvalues and eigenvectors of kernels (B, N, N)."""

    values: Tensor
    """(B, N); values below the cutoff are set to 0."""
    vectors: Tensor
    """(B, N, N), in columns."""
    cutoff: Tensor
    """(B, 1)"""


def eigenbasis(problem: BatchedProblem) -> Eigenbasis:
    """Return the eigenbasis of the kernels, with eigenvalues within rounding set to 0.

    The cutoff depends on the **input dtype** of the kernel: 1.2e-7 of the largest eigenvalue for float32, 1e-12 for
    float64. A float32 kernel of a network with fewer parameters than samples has meaningless eigenvalues of either sign
    below it.
    """
    values, vectors = torch.linalg.eigh(problem.kernel)
    cutoff = problem.precision * values.abs().amax(-1, keepdim=True)
    return Eigenbasis(torch.where(values.abs() <= cutoff, 0.0, values), vectors, cutoff)


def as_times(times: Any) -> Tensor:
    """Convert a tensor, an array, or a sequence of numbers to times (T,) in float64."""
    try:
        values = times if isinstance(times, Tensor) else torch.as_tensor(times, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(f"times are {times!r}, expected a tensor or a sequence of numbers") from None
    return checked_tensor(values, "times").reshape(-1)
