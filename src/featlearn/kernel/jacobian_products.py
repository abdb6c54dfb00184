"""Compute products with a network's Jacobian: J^T v by a backward pass, J u by forward mode or by two backward passes.

J u is the derivative of w^T J u by w, and J^T w is linear in w, so that a second backward pass through the first gives
it. No method works on every network. Fused attention has no forward derivative. Forward mode misses parameters that a
model reaches past its modules. Some fused ops have no second derivative, or a wrong one. So each method is tried on a
few samples, and used where <w, J u> = <J^T w, u>. The last resort are per-sample gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from featlearn.contraction.factors import as_dense
from featlearn.graph.graph import backward
from featlearn.kernel.effective_weights import Steps, applied_map
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
    """Add J^T v_k to totals[k], for v of shape (m, n, C), over all n samples of the batch."""
    outputs = batch.paired_outputs(_all(batch))
    if not outputs.requires_grad:
        return
    parameters = [measurement.parameters[name] for name in totals]
    for k, cotangent in enumerate(cotangents):
        gradients = backward([outputs], parameters, [cotangent.to(outputs)])
        for total, gradient in zip(totals.values(), gradients, strict=True):
            if gradient is not None:
                total[k] += gradient.detach().to(total.dtype)


def no_tangents(measurement: Measurement, count: int) -> dict[str, Tensor]:
    """Return `count` vectors of zeros, in the precision kernels are accumulated in."""
    return {
        name: torch.zeros(count, *p.shape, dtype=_accumulating(p.dtype), device=p.device)
        for name, p in measurement.parameters.items()
    }


def _accumulating(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _all(batch: ModelWithInputs) -> Tensor:
    return torch.arange(batch.samples, device="cpu")


def jvp_method(measurement: Measurement) -> JvpMethod:
    """Return the first method that works on the network and agrees with backward passes."""
    example = measurement.example()
    indices = example.indices[: example.count]
    x = example.batch.take(indices)
    batch = replace(example.batch, x=x, samples=len(indices))
    generator = torch.Generator("cpu").manual_seed(2)
    cotangent = _gaussian(example.outputs[: example.count], generator)
    gradients = no_tangents(measurement, 1)
    add_pulled_back(gradients, measurement, batch, cotangent[None])
    tangents = _tangents(gradients, example.precision, generator)
    expected = sum(float(inner_products(gradients[name], u)) for name, u in tangents.items())
    # A backward pass through a backward pass would need weights that are no longer gathered.
    by_layer = measurement.gathered_bytes is not None
    methods: list[JvpMethod] = [_forward_mode, _forward_mode_math]
    methods += [] if by_layer else [_twice_backward, _twice_backward_elementary]
    for method in methods:
        try:
            pushed = method(measurement, batch, tangents)[0].double()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # from any code of the network; another method is exact
            continue
        size = float(cotangent.norm() * pushed.norm()) + abs(expected)
        if abs(float((cotangent.to(pushed) * pushed).sum()) - expected) <= example.precision**0.5 * size:
            return method
    return _per_sample


def divides(method: JvpMethod) -> bool:
    """Whether a network can be linearized in parts by this method."""
    return method is not _per_sample


def is_functional(method: JvpMethod) -> bool:
    """Whether a method runs the network with the tensors of `Measurement.parameters`, wherever they come from."""
    return method in _FORWARD


def _gaussian(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(like.device)


def _tangents(gradients: Tangents, precision: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a random u in which every parameter has the same weight in <g, u>, so that an error in any one shows."""
    sizes = {name: float(g.norm()) for name, g in gradients.items()}
    # Gradients that are rounding errors (of a bias in front of a softmax) stay small.
    floor = precision**0.25 * max(sizes.values())
    return {
        name: (_gaussian(g, generator) / max(sizes[name], floor)).to(g) if floor else torch.zeros_like(g)
        for name, g in gradients.items()
    }


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Return (m,) real inner products of m vectors each in float64; a complex entry counts as two."""
    return (_entries(a) * _entries(b)).sum(1, dtype=torch.float64)


def _entries(u: Tensor) -> Tensor:
    """Return (m, size) real entries."""
    return (torch.view_as_real(u.resolve_conj()) if u.is_complex() else u).reshape(len(u), -1)


class Linearized(NamedTuple):
    """A network and its linearization in the direction u, on n samples."""

    outputs: Tensor
    """(n, C) outputs f."""
    product: Tensor
    """(n, C) J u."""
    through_link: Tensor
    """(n, C) g(h + J_h u), for f = g(h), in effective weights."""


def linearized(
    method: JvpMethod,
    measurement: Measurement,
    batch: ModelWithInputs,
    tangents: Tangents,
    division: Division = UNDIVIDED,
    steps: Steps | None = None,
) -> Linearized:
    """Linearize a network in one direction, and its part up to h in effective weights whose changes are `steps`."""
    head, seen = division.head, list[tuple[Tensor, Tensor]]()
    merging = steps is not None and bool(division.merged)
    if head is None or merging or not divides(method):
        outputs, product = _outputs_and_product(method, measurement, batch, tangents)
    if not divides(method) or not (merging or head is not None):
        return Linearized(outputs, product, outputs + product)
    if method in _FORWARD:
        changes = _forward_changes(steps) if merging and steps is not None else {}
        if head is not None:
            changes[head] = _then_seen(changes.get(head), lambda result: seen.append(_parts_of_dual(result)))
        again, along = _dual_outputs(measurement, batch, tangents, 0, _FORWARD[method], division, changes)
        h, change = seen[0] if head is not None else (again, along)
    else:
        h, change = _twice_backward_divided(method, measurement, batch, tangents, division, steps if merging else None)
        if head is not None and not merging:
            again, along = _behind_head(measurement, batch, division, head, h, change)
    if not merging:
        outputs, product = again, along
    if head is None:
        return Linearized(outputs, product, h + change)
    moved = h + change
    replacing: dict[int, Change] = {head: lambda function, arguments, result: moved}
    through = changed_outputs(division, batch, dict(measurement.parameters), replacing)
    return Linearized(outputs, product, through.detach())


def _outputs_and_product(
    method: JvpMethod, measurement: Measurement, batch: ModelWithInputs, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    if method in _FORWARD:
        return _dual_outputs(measurement, batch, tangents, 0, _FORWARD[method])
    return batch.outputs(_all(batch)).detach(), method(measurement, batch, tangents)[0].detach()


def _forward_changes(steps: Steps) -> dict[int, Change]:
    """Give merged weights their own changes as tangents."""
    changes: dict[int, Change] = {}
    inputs: dict[int, tuple[Any, tuple[Any, ...], Tensor]] = {}

    def form(function: Any, arguments: tuple[Any, ...], result: Tensor, change: Tensor) -> Tensor:
        dual: Tensor = forward_ad.make_dual(_parts_of_dual(result)[0], change.to(result.dtype))
        return dual

    def note(function: Any, arguments: tuple[Any, ...], result: Tensor, inner: int) -> Tensor:
        inputs[inner] = (function, arguments, _parts_of_dual(arguments[0])[0])
        return result

    def add(function: Any, arguments: tuple[Any, ...], result: Tensor, step: tuple[int, Tensor, Tensor]) -> Tensor:
        primal, tangent = _parts_of_dual(result)
        dual: Tensor = forward_ad.make_dual(primal, tangent + _both_maps(inputs[step[0]], function, arguments, step))
        return dual

    for number, change in steps.formed.items():
        changes[number] = partial(form, change=change)
    for outer, step in steps.adapters.items():
        changes[step[0]] = partial(note, inner=step[0])
        changes[outer] = partial(add, step=step)
    return changes


def _both_maps(
    first: tuple[Any, tuple[Any, ...], Tensor],
    function: Any,
    arguments: tuple[Any, ...],
    step: tuple[int, Tensor, Tensor],
) -> Tensor:
    """Apply the changes of both maps of an adapter, one after the other: what the product rule leaves out."""
    inner_function, inner_arguments, x = first
    _, inner, outer = step
    between = applied_map(inner_function, inner_arguments, x, inner.to(x))
    return applied_map(function, arguments, between, outer.to(x))


def _then_seen(change: Change | None, see: Callable[[Tensor], None]) -> Change:
    """Return a change that passes its result to `see`: the head may be the second map of an adapter."""

    def changed(function: Callable[..., Any], arguments: tuple[Any, ...], result: Any) -> Any:
        last = result if change is None else change(function, arguments, result)
        see(last)
        return last

    return changed


T = TypeVar("T")


def _seen(seen: list[Any], thing: Any, result: T) -> T:
    """Note something, and return the result."""
    seen.append(thing)
    return result


def _behind_head(
    measurement: Measurement, batch: ModelWithInputs, division: Division, head: int, h: Tensor, change: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs g(h) and J_g times the change of h."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(h, change)
        replacing: dict[int, Change] = {head: lambda function, arguments, result: dual}
        return _parts_of_dual(changed_outputs(division, batch, dict(measurement.parameters), replacing))


def _twice_backward_divided(
    method: JvpMethod,
    measurement: Measurement,
    batch: ModelWithInputs,
    tangents: Tangents,
    division: Division,
    steps: Steps | None,
) -> tuple[Tensor, Tensor]:
    """Return h, or the outputs without a head, and their change in effective weights."""
    heads: list[Tensor] = []
    leaves: list[tuple[Tensor, Tensor]] = []
    inputs: dict[int, tuple[Any, tuple[Any, ...], Tensor]] = {}
    changes: dict[int, Change] = {}

    def form(function: Any, arguments: tuple[Any, ...], result: Tensor, change: Tensor) -> Tensor:
        leaf = result.detach().requires_grad_()
        return _seen(leaves, (leaf, change[None].to(leaf)), leaf)

    def note(function: Any, arguments: tuple[Any, ...], result: Tensor, inner: int) -> Tensor:
        inputs[inner] = (function, arguments, arguments[0].detach())
        return result

    def add(function: Any, arguments: tuple[Any, ...], result: Tensor, step: tuple[int, Tensor, Tensor]) -> Tensor:
        leaf = torch.zeros_like(result, requires_grad=True)
        leaves.append((leaf, _both_maps(inputs[step[0]], function, arguments, step)[None].detach()))
        return result + leaf

    for number, change in (steps.formed if steps else {}).items():
        changes[number] = partial(form, change=change)
    for outer, step in (steps.adapters if steps else {}).items():
        changes[step[0]] = partial(note, inner=step[0])
        changes[outer] = partial(add, step=step)
    if division.head is not None:
        changes[division.head] = _then_seen(changes.get(division.head), heads.append)
    with _TWICE_BACKWARD[method]():
        outputs = changed_outputs(division, batch, dict(measurement.parameters), changes)
        h = heads[0] if heads else outputs
        return h.detach(), _derivatives_by_cotangent(h, [*_pairs(measurement, tangents), *leaves])[0].detach()


def _forward_mode(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """Return (m, n, C) J u, by one forward pass for each u. No graph is kept."""
    return _forward_products(measurement, batch, tangents, nullcontext)


def _forward_mode_math(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """Return the same with attention from elementary ops: fused attention has no forward derivative."""
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
    """Return (n, C) outputs, and the product with the k-th vector."""
    with context(), forward_ad.dual_level():
        plain = {name: parameter.detach() for name, parameter in measurement.parameters.items()}
        duals = plain | {name: forward_ad.make_dual(plain[name], u[k].to(plain[name])) for name, u in tangents.items()}
        if changes is not None:
            return _parts_of_dual(changed_outputs(division, batch, duals, changes))
        return _parts_of_dual(replace(batch, model=Reparametrized(batch.model, duals)).outputs(_all(batch)))


def _parts_of_dual(dual: Tensor) -> tuple[Tensor, Tensor]:
    primal, tangent = forward_ad.unpack_dual(dual)
    primal = primal.detach().clone()
    return primal, torch.zeros_like(primal) if tangent is None else tangent.detach().clone()


def _twice_backward(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """Return (m, n, C) J u: one graph of J^T w for all, and a backward pass through it for each u."""
    with _math_attention():
        outputs = batch.paired_outputs(_all(batch))
        return _derivatives_by_cotangent(outputs, _pairs(measurement, tangents))


def _twice_backward_elementary(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """Return the same with fused ops taken apart."""
    with ElementaryOps():
        outputs = batch.paired_outputs(_all(batch))
    return _derivatives_by_cotangent(outputs, _pairs(measurement, tangents))


@contextmanager
def _math_attention() -> Iterator[None]:
    """Compute attention from elementary ops, which have all derivatives, also in encoder layers of torch."""
    with sdpa_kernel(SDPBackend.MATH), NoFastPaths():
        yield


_FORWARD: dict[JvpMethod, PassContext] = {_forward_mode: nullcontext, _forward_mode_math: _math_attention}
_TWICE_BACKWARD: dict[JvpMethod, PassContext] = {
    _twice_backward: _math_attention,
    _twice_backward_elementary: ElementaryOps,
}


def _pairs(measurement: Measurement, tangents: Tangents) -> list[tuple[Tensor, Tensor]]:
    return [(measurement.parameters[name], u) for name, u in tangents.items()]


def _derivatives_by_cotangent(outputs: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the (m, *outputs) derivatives of the outputs in the directions of m vectors for each tensor."""
    count = len(pairs[0][1])
    pushed = torch.zeros(count, *outputs.shape, dtype=outputs.dtype, device=outputs.device)
    if not outputs.requires_grad:
        return pushed
    w = torch.zeros_like(outputs, requires_grad=True)
    tensors = [tensor for tensor, _ in pairs]
    pulled = torch.autograd.grad(outputs, tensors, w, create_graph=True, allow_unused=True)
    reached = [(g, u) for g, (_, u) in zip(pulled, pairs, strict=True) if g is not None and g.requires_grad]
    for k in range(count if reached else 0):
        (derivative,) = torch.autograd.grad(
            [g for g, _ in reached], w, [u[k].to(g) for g, u in reached], retain_graph=True, allow_unused=True
        )
        if derivative is not None:
            pushed[k] = derivative
    return pushed


def _per_sample(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """Return (m, n, C) J u from per-sample gradients, by one backward pass for each output: always exact."""
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
