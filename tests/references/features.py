"""Neural features the slow, obvious way: zeros are added where a weight is applied, and differentiated by one by one.

Where the model computes h = W x for the rows x of one weight, h + W e + d is computed instead, e = 0 and d = 0. The
derivative by d is df/dh, the derivative by e is that of the rows *through this weight alone*. Each takes one backward
pass per scalar output. Functions of torch are replaced for one forward pass; nothing of the library is used.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .jacobian import Readout, eval_mode, outputs_of


@dataclass(frozen=True)
class Features:
    """A weight (k, n), and for its R rows (samples times positions, all calls one after the other) all derivatives."""

    weight: Tensor
    rows: Tensor
    """(R, n)"""
    deltas: Tensor
    """df/dh, (P, C, R, k)"""
    through: Tensor
    """Derivatives by the rows through this weight alone, (P, C, R, n)"""

    @property
    def K(self) -> Tensor:
        """Average over rows, sum over outputs; the row of another sample contributes zero."""
        return torch.einsum("pcrk,pcrl->kl", self.deltas, self.deltas) / len(self.rows)

    @property
    def G(self) -> Tensor:
        return torch.einsum("pcrn,pcrm->nm", self.through, self.through) / len(self.rows)

    @property
    def F(self) -> Tensor:
        return self.weight.T @ self.weight

    def tangent_kernel(self) -> Tensor:
        """Of this weight, summed over outputs, (P, P): gradients sum_r delta_r x_r^T, multiplied out."""
        gradients = torch.einsum("pcrk,rn->pckn", self.deltas, self.rows)
        return torch.einsum("pckn,qckn->pq", gradients, gradients)


def features(
    model: nn.Module,
    x: Any,
    parameter: str,
    *,
    readout: Readout = None,
    units: Sequence[int] | None = None,
    calls: Sequence[int] | None = None,
    outputs: Sequence[int] | None = None,
) -> Features:
    """Of the weight that a parameter is or is turned into; of some of its units alone, or of some of its calls."""
    weight = dict(model.named_parameters())[parameter]
    with eval_mode(model), torch.enable_grad():
        with _Spy(weight, units, calls) as spy:
            f = outputs_of(model, x, readout)
        assert spy.found, f"{parameter} is never applied"
        f = f if outputs is None else f[:, list(outputs)]
        wanted = [zero for call in spy.found for zero in (call.shift, call.step)]
        lines = []
        for scalar in f.flatten():
            found = torch.autograd.grad(scalar, wanted, retain_graph=True, allow_unused=True)
            lines.append([torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True)])
    P, C = f.shape
    deltas, through = [], []
    for number, call in enumerate(spy.found):
        deltas.append(torch.stack([call.flat_grads(line[2 * number]) for line in lines]).unflatten(0, (P, C)))
        through.append(torch.stack([call.flat_rows(line[2 * number + 1]) for line in lines]).unflatten(0, (P, C)))
    matrix = spy.found[0].matrix
    assert all(torch.equal(matrix, call.matrix) for call in spy.found)
    rows = torch.cat([call.flat_rows(call.rows) for call in spy.found])
    return Features(*(part.detach().double() for part in (matrix, rows, torch.cat(deltas, 2), torch.cat(through, 2))))


@dataclass
class _Call:
    matrix: Tensor
    rows: Tensor
    """What the weight multiplies, as the op has it"""
    shift: Tensor
    """d, shaped as h"""
    step: Tensor
    """e, shaped as `rows`"""
    flat_rows: Callable[[Tensor], Tensor]
    """(R, n) from something shaped as `rows`"""
    flat_grads: Callable[[Tensor], Tensor]
    """(R, k) from something shaped as h"""


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _columns(tensor: Tensor) -> Tensor:
    """(N, n, L) -> (N L, n)"""
    return tensor.transpose(-1, -2).reshape(-1, tensor.shape[-2])


class _Spy(TorchFunctionMode):
    """Looks out for calls that multiply by a weight made of one parameter."""

    def __init__(self, parameter: Tensor, units: Sequence[int] | None, calls: Sequence[int] | None) -> None:
        super().__init__()
        self.parameter, self.units, self.calls = parameter, units, calls
        self.found: list[_Call] = []
        self._seen = 0
        self._patches: Any = None

    def __enter__(self) -> "_Spy":
        self._patches = _replaced(self)
        self._patches.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.__matmul__, torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm):
            left, right = args
            if self._is(right) and right.dim() == 2:
                return self.row_product(out, left, right.T)
            if self._is(left) and left.dim() == 2:
                return self.column_product(out, right, left)
        return out

    def _is(self, tensor: Any) -> bool:
        """The parameter itself, or a transpose of it."""
        own = self.parameter
        return tensor.numel() == own.numel() and tensor.data_ptr() == own.data_ptr() and tensor.requires_grad

    def made_of(self, tensor: Any) -> bool:
        """Whether the parameter is in a weight's computation."""
        if tensor is self.parameter:
            return True
        stack, seen = [tensor.grad_fn], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if getattr(node, "variable", None) is self.parameter:
                return True
            stack += [child for child, _ in node.next_functions]
        return False

    def _wanted(self) -> bool:
        self._seen += 1
        return self.calls is None or self._seen - 1 in self.calls

    def _chosen(self, count: int) -> Tensor:
        return torch.arange(count) if self.units is None else torch.tensor(list(self.units))

    def row_product(self, out: Tensor, x: Tensor, matrix: Tensor, scale: float = 1.0) -> Tensor:
        """out = scale * x matrix^T (+ bias), rows in the last axis."""
        if not self._wanted():
            return out
        chosen = self._chosen(len(matrix))
        part = matrix[chosen]
        step = torch.zeros_like(x).detach().requires_grad_()
        shift = out.new_zeros(*out.shape[:-1], len(chosen)).requires_grad_()
        self.found.append(_Call(part.detach().clone(), x.detach().clone(), shift, step, _flat, _flat))
        return out.index_add(-1, chosen, scale * (step @ part.detach().T + shift))

    def column_product(self, out: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
        """out = matrix x, rows of the weight's input in the second last axis."""
        if not self._wanted():
            return out
        step = torch.zeros_like(x).detach().requires_grad_()
        shift = torch.zeros_like(out).detach().requires_grad_()
        self.found.append(_Call(matrix.detach().clone(), x.detach().clone(), shift, step, _columns, _columns))
        return out + matrix.detach() @ step + shift

    def convolution(
        self, out: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
    ) -> Tensor:
        """Rows are patches of the padded image."""
        if not self._wanted():
            return out
        patches = _patches(x.detach(), weight.shape[2:], stride, padding, dilation)
        matrix = torch.block_diag(*weight.detach().reshape(groups, len(weight) // groups, -1))
        step = torch.zeros_like(patches).requires_grad_()
        shift = torch.zeros_like(out.flatten(2)).detach().requires_grad_()
        self.found.append(_Call(matrix, patches, shift, step, _columns, _columns))
        return out + (matrix @ step + shift).reshape(out.shape)

    def transposed_convolution(
        self, out: Tensor, x: Tensor, weight: Tensor, groups: int, settings: dict[str, Any]
    ) -> Tensor:
        """Each pixel gives a window, windows are added up where they overlap."""
        if not self._wanted():
            return out
        kernel = weight.shape[2:]
        matrix = torch.block_diag(*weight.detach().reshape(groups, len(weight) // groups, -1).mT)
        pixels = x.detach().flatten(2)
        step = torch.zeros_like(pixels).requires_grad_()
        shift = out.new_zeros(len(out), len(matrix), pixels.shape[2]).requires_grad_()
        windows = (matrix @ step + shift).reshape(len(x), len(matrix), *x.shape[2:])
        # A transposed convolution that only puts entry (channel, place) of a window into its place.
        placing = torch.eye(len(matrix), dtype=out.dtype).reshape(len(matrix), out.shape[1], *kernel)
        self.found.append(_Call(matrix, pixels, shift, step, _columns, _columns))
        return out + _TRANSPOSED[weight.dim()](windows, placing, **settings)


def _patches(image: Tensor, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> Tensor:
    """(N, channels * kernel area, places), zero-padded."""
    axes = len(kernel)
    strides, holes = _each(stride, axes), _each(dilation, axes)
    spans = [hole * (size - 1) for hole, size in zip(holes, kernel, strict=True)]
    if padding == "same":
        ends = [(span // 2, span - span // 2) for span in spans]
    else:
        ends = [(size, size) for size in _each(0 if padding == "valid" else padding, axes)]
    image = F.pad(image, [size for pair in reversed(ends) for size in pair])
    for axis, (span, step, hole) in enumerate(zip(spans, strides, holes, strict=True)):
        image = image.unfold(2 + axis, span + 1, step)[..., ::hole]
    places = range(2, 2 + axes)
    taps = range(2 + axes, 2 + 2 * axes)
    return image.permute(0, 1, *taps, *places).reshape(len(image), image.shape[1] * math.prod(kernel), -1)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) < axes else values


_TRANSPOSED = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}


@contextmanager
def _replaced(spy: _Spy) -> Iterator[None]:
    """torch's own functions, with the spy looking at their results."""
    spatial = ("1d", "2d", "3d")
    originals = {(F, name): getattr(F, name) for name in ("linear", *(f"conv{d}" for d in spatial))}
    originals |= {(F, name): getattr(F, name) for name in (f"conv_transpose{d}" for d in spatial)}
    originals[torch, "addmm"] = torch.addmm

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = originals[F, "linear"](x, weight, bias)
        return spy.row_product(out, x, weight) if spy.made_of(weight) else out

    def addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        out = originals[torch, "addmm"](bias, x, weight, beta=beta, alpha=alpha)
        return spy.row_product(out, x, weight.T, alpha) if spy.made_of(weight) else out

    def convolution(name: str) -> Callable[..., Tensor]:
        def convolve(
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            stride: Any = 1,
            padding: Any = 0,
            dilation: Any = 1,
            groups: int = 1,
        ) -> Tensor:
            out = originals[F, name](x, weight, bias, stride, padding, dilation, groups)
            return spy.convolution(out, x, weight, stride, padding, dilation, groups) if spy.made_of(weight) else out

        return convolve

    def transposed(name: str) -> Callable[..., Tensor]:
        def convolve(
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            stride: Any = 1,
            padding: Any = 0,
            output_padding: Any = 0,
            groups: int = 1,
            dilation: Any = 1,
        ) -> Tensor:
            out = originals[F, name](x, weight, bias, stride, padding, output_padding, groups, dilation)
            if not spy.made_of(weight):
                return out
            settings = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
            return spy.transposed_convolution(out, x, weight, groups, settings)

        return convolve

    try:
        F.linear, torch.addmm = linear, addmm
        for dimension in spatial:
            setattr(F, f"conv{dimension}", convolution(f"conv{dimension}"))
            setattr(F, f"conv_transpose{dimension}", transposed(f"conv_transpose{dimension}"))
        yield
    finally:
        for (home, name), original in originals.items():
            setattr(home, name, original)
