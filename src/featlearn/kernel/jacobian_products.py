"""Products with a network's Jacobian: J^T v by a backward pass, J u by forward mode or by differentiating twice.

J u is the derivative of w^T J u by w, and J^T w is linear in w: a second backward pass through the first gives it. No
method of these works on every network: forward mode lacks fused attention and sees nothing of parameters that a model
reaches past its modules; fused ops have second derivatives that are missing, or wrong without a sign. So each method is
tried on a few samples, and taken where <w, J u> = <J^T w, u>. What is left is read from per-sample gradients.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from featlearn.contraction.factors import as_dense
from featlearn.graph.graph import backward
from featlearn.kernel.output_function import UNDIVIDED, Division, Reparametrized, changed_outputs
from featlearn.measurement import Measurement
from featlearn.network.elementary_ops import ElementaryOps
from featlearn.network.function_calls import Change, NoFastPaths
from featlearn.network.inputs import ModelWithInputs

Tangents = Mapping[str, Tensor]
"""Parameter name -> (m, *its shape): m vectors in parameter space."""
JvpMethod = Callable[[Measurement, ModelWithInputs, Tangents], Tensor]
PassContext = Callable[[], AbstractContextManager[Any]]
"""Makes what a pass runs in."""


def add_pulled_back(totals: Tangents, measurement: Measurement, batch: ModelWithInputs, cotangents: Tensor) -> None:
    """totals[k] += J^T v_k for v of shape (m, n, C), over all n samples of the batch."""
    outputs = batch.paired_outputs(_all(batch))
    if not outputs.requires_grad:
        return
    parameters = [measurement.parameters[name] for name in totals]
    for k, cotangent in enumerate(cotangents):
        found = backward([outputs], parameters, [cotangent.to(outputs)])
        for total, gradient in zip(totals.values(), found, strict=True):
            if gradient is not None:
                total[k] += gradient.detach().to(total.dtype)


def no_tangents(measurement: Measurement, count: int) -> dict[str, Tensor]:
    """`count` vectors of zeros, in the precision kernels are accumulated in."""
    return {
        name: torch.zeros(count, *p.shape, dtype=_accumulating(p.dtype), device=p.device)
        for name, p in measurement.parameters.items()
    }


def _accumulating(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _all(batch: ModelWithInputs) -> Tensor:
    return torch.arange(batch.samples, device="cpu")


def jvp_method(measurement: Measurement) -> JvpMethod:
    """The first method that the network allows and that gives what backward passes give."""
    example = measurement.example()
    indices = example.indices[: example.count]
    x = example.batch.take(indices)
    batch = replace(example.batch, x=x, samples=len(indices))
    generator = torch.Generator("cpu").manual_seed(2)
    cotangent = _gaussian(example.outputs[: example.count], generator)
    gradients = no_tangents(measurement, 1)
    add_pulled_back(gradients, measurement, batch, cotangent[None])
    tangents = _tangents(gradients, example.precision, generator)
    wanted = sum(float(inner_products(gradients[name], u)) for name, u in tangents.items())
    # What a backward pass of a backward pass needs of weights is not gathered again.
    by_layer = measurement.gathered_bytes is not None
    methods: list[JvpMethod] = [_forward_mode, _forward_mode_math]
    methods += [] if by_layer else [_twice_backward, _twice_backward_elementary]
    for method in methods:
        try:
            pushed = method(measurement, batch, tangents)[0].double()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever the network does, another method is exact
            continue
        size = float(cotangent.norm() * pushed.norm()) + abs(wanted)
        if abs(float((cotangent.to(pushed) * pushed).sum()) - wanted) <= example.precision**0.5 * size:
            return method
    return _per_sample


def _gaussian(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(like.device)


def _tangents(gradients: Tangents, precision: float, generator: torch.Generator) -> dict[str, Tensor]:
    """A random vector in which every parameter weighs as much in <g, u>: an error in a small one shows as well."""
    sizes = {name: float(g.norm()) for name, g in gradients.items()}
    # Gradients that are rounding (those of a bias that a softmax does not see) are left small.
    floor = precision**0.25 * max(sizes.values())
    return {
        name: (_gaussian(g, generator) / max(sizes[name], floor)).to(g) if floor else torch.zeros_like(g)
        for name, g in gradients.items()
    }


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """(m,) real inner products of m vectors each, a complex entry counting as two; float64."""
    return (_entries(a) * _entries(b)).sum(1, dtype=torch.float64)


def _entries(u: Tensor) -> Tensor:
    """(m, size) real entries."""
    return (torch.view_as_real(u.resolve_conj()) if u.is_complex() else u).reshape(len(u), -1)


class Linearized(NamedTuple):
    """A network and its linearization in the direction u, on n samples."""

    outputs: Tensor
    """(n, C) outputs f."""
    product: Tensor
    """(n, C) J u."""
    through_link: Tensor
    """(n, C) g(h + J_h u), for f = g(h)."""


def linearized(
    method: JvpMethod, measurement: Measurement, batch: ModelWithInputs, tangents: Tangents, division: Division
) -> Linearized:
    """Linearize a network, and its part up to h, in one direction."""
    parameters = dict(measurement.parameters)
    if division.head is None or method is _per_sample:
        if method in _FORWARD:
            outputs, product = _dual_outputs(measurement, batch, tangents, 0, _FORWARD[method])
        else:
            outputs, product = batch.outputs(_all(batch)).detach(), method(measurement, batch, tangents)[0].detach()
        return Linearized(outputs, product, outputs + product)
    if method in _FORWARD:
        heads: list[tuple[Tensor, Tensor]] = []
        keep = {division.head: lambda function, arguments, result: _seen(heads, _parts_of_dual(result), result)}
        outputs, product = _dual_outputs(measurement, batch, tangents, 0, _FORWARD[method], division, keep)
        ((h, change),) = heads
    else:
        h, change = _head_twice_backward(method, measurement, batch, tangents, division)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(h, change)
            again = changed_outputs(
                division, batch, parameters, {division.head: lambda function, arguments, result: dual}
            )
            outputs, product = _parts_of_dual(again)
    moved = h + change
    through = changed_outputs(division, batch, parameters, {division.head: lambda function, arguments, result: moved})
    return Linearized(outputs, product, through.detach())


T = TypeVar("T")


def _seen(seen: list[Any], thing: Any, result: T) -> T:
    """Note something, and return the result."""
    seen.append(thing)
    return result


def _head_twice_backward(
    method: JvpMethod, measurement: Measurement, batch: ModelWithInputs, tangents: Tangents, division: Division
) -> tuple[Tensor, Tensor]:
    """Return h and J_h u."""
    heads: list[Tensor] = []
    assert division.head is not None
    keep = {division.head: lambda function, arguments, result: _seen(heads, result, result)}
    with _TWICE_BACKWARD[method]():
        changed_outputs(division, batch, dict(measurement.parameters), keep)
        (h,) = heads
        return h.detach(), _derivatives_by_cotangent(measurement, h, tangents)[0].detach()


def _forward_mode(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """(m, n, C) J u, one forward pass for each u; nothing of the graph is kept."""
    return _forward_products(measurement, batch, tangents, nullcontext)


def _forward_mode_math(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """The same with attention from elementary ops: fused attention has no forward derivative."""
    return _forward_products(measurement, batch, tangents, _math_attention)


def _forward_products(
    measurement: Measurement, batch: ModelWithInputs, tangents: Tangents, context: PassContext
) -> Tensor:
    every = range(_count(tangents))
    return torch.stack([_dual_outputs(measurement, batch, tangents, k, context)[1] for k in every])


def _dual_outputs(
    measurement: Measurement,
    batch: ModelWithInputs,
    tangents: Tangents,
    k: int,
    context: PassContext,
    division: Division = UNDIVIDED,
    changes: Mapping[int, Change] | None = None,
) -> tuple[Tensor, Tensor]:
    """(n, C) outputs, and the product with the k-th vector."""
    with context(), forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(parameter.detach(), tangents[name][k].to(parameter))
            for name, parameter in measurement.parameters.items()
        }
        if changes is not None:
            return _parts_of_dual(changed_outputs(division, batch, duals, changes))
        return _parts_of_dual(replace(batch, model=Reparametrized(batch.model, duals)).outputs(_all(batch)))


def _parts_of_dual(dual: Tensor) -> tuple[Tensor, Tensor]:
    primal, tangent = forward_ad.unpack_dual(dual)
    primal = primal.detach().clone()
    return primal, torch.zeros_like(primal) if tangent is None else tangent.detach().clone()


def _twice_backward(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """(m, n, C) J u: one graph of J^T w for all, and a backward pass through it for each u."""
    with _math_attention():
        outputs = batch.paired_outputs(_all(batch))
        return _derivatives_by_cotangent(measurement, outputs, tangents)


def _twice_backward_elementary(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """The same with fused ops taken apart."""
    with ElementaryOps():
        outputs = batch.paired_outputs(_all(batch))
    return _derivatives_by_cotangent(measurement, outputs, tangents)


@contextmanager
def _math_attention() -> Iterator[None]:
    """Attention from elementary ops, the only one with a second derivative; encoder layers take no faster path."""
    with sdpa_kernel(SDPBackend.MATH), NoFastPaths():
        yield


_FORWARD: dict[JvpMethod, PassContext] = {_forward_mode: nullcontext, _forward_mode_math: _math_attention}
_TWICE_BACKWARD: dict[JvpMethod, PassContext] = {
    _twice_backward: _math_attention,
    _twice_backward_elementary: ElementaryOps,
}


def _derivatives_by_cotangent(measurement: Measurement, outputs: Tensor, tangents: Tangents) -> Tensor:
    count = _count(tangents)
    pushed = torch.zeros(count, *outputs.shape, dtype=outputs.dtype, device=outputs.device)
    if not outputs.requires_grad:
        return pushed
    w = torch.zeros_like(outputs, requires_grad=True)
    parameters = [measurement.parameters[name] for name in tangents]
    pulled = torch.autograd.grad(outputs, parameters, w, create_graph=True, allow_unused=True)
    pairs = [(g, u) for g, u in zip(pulled, tangents.values(), strict=True) if g is not None and g.requires_grad]
    for k in range(count if pairs else 0):
        (found,) = torch.autograd.grad(
            [g for g, _ in pairs], w, [u[k].to(g) for g, u in pairs], retain_graph=True, allow_unused=True
        )
        if found is not None:
            pushed[k] = found
    return pushed


def _per_sample(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """(m, n, C) J u from per-sample gradients, one backward pass for each output: always exact."""
    pushed: Tensor | None = None
    every = torch.eye(measurement.classes, dtype=torch.float64, device="cpu")
    chunk = measurement.chunk(batch, 0, batch.samples)
    for name, gradients in measurement.each_gradient(chunk, list(tangents), every, dense=list(tangents)):
        entries = _entries(tangents[name]).to(measurement.dtype)
        term = torch.einsum("ncj,mj->mnc", as_dense(gradients).gradient, entries)
        pushed = term if pushed is None else pushed + term
    shape = (_count(tangents), batch.samples, measurement.classes)
    return torch.zeros(shape, dtype=measurement.dtype, device=measurement.device) if pushed is None else pushed


def _count(tangents: Tangents) -> int:
    return len(next(iter(tangents.values())))
