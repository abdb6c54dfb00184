"""Compute products with a network's Jacobian: J^T v by a backward pass, J u by forward mode or by two backward passes.

J u is the derivative of w^T J u by w, and J^T w is linear in w, so that a second backward pass through the first gives
it. No method works on every network. Fused attention has no forward derivative. Forward mode misses parameters that a
model reaches past its modules. Some fused ops have no second derivative, or a wrong one. So each method is tried on a
few samples, and used where <w, J u> = <J^T w, u>. The last resort are per-sample gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from featlearn.contraction.factors import as_dense
from featlearn.graph.graph import backward
from featlearn.measurement import Measurement
from featlearn.network.elementary_ops import ElementaryOps, NoFastPaths
from featlearn.network.inputs import ModelWithInputs

Tangents = Mapping[str, Tensor]
"""Parameter name -> (m, *its shape): m vectors in parameter space."""
JvpMethod = Callable[[Measurement, ModelWithInputs, Tangents], Tensor]


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
    methods: list[JvpMethod] = [forward_mode] if by_layer else [forward_mode, twice_backward]
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
    return per_sample


def divides(method: JvpMethod) -> bool:
    """Whether a network can be linearized in parts by this method."""
    return method is not per_sample


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


def forward_mode(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """Return (m, n, C) J u, by one forward pass for each u. No graph is held."""
    return torch.stack([dual_outputs(measurement, batch, tangents, k)[1] for k in range(_count(tangents))])


def dual_outputs(
    measurement: Measurement,
    batch: ModelWithInputs,
    tangents: Tangents,
    k: int,
    run: Callable[[dict[str, Tensor]], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (n, C) outputs, and the product with the k-th vector.

    `run`: gives outputs for dual parameters, by default those of the model.
    """
    with math_attention(), forward_ad.dual_level():
        plain = {name: parameter.detach() for name, parameter in measurement.parameters.items()}
        duals = plain | {name: forward_ad.make_dual(plain[name], u[k].to(plain[name])) for name, u in tangents.items()}
        if run is None:
            return parts_of_dual(replace(batch, model=Reparametrized(batch.model, duals)).outputs(_all(batch)))
        return parts_of_dual(run(duals))


def parts_of_dual(dual: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of a value and its tangent, zeros if it has none."""
    primal, tangent = forward_ad.unpack_dual(dual)
    primal = primal.detach().clone()
    return primal, torch.zeros_like(primal) if tangent is None else tangent.detach().clone()


class Reparametrized(nn.Module):
    """A network called with other tensors in place of its parameters."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        self._tensors = tensors

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs with these tensors."""
        return torch.func.functional_call(self.model, self._tensors, args, kwargs)


def twice_backward(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """Return (m, n, C) J u: one graph of J^T w for all, and a backward pass through it for each u."""
    with ElementaryOps():
        outputs = batch.paired_outputs(_all(batch))
    return derivatives_by_cotangent(outputs, parameter_pairs(measurement, tangents))


@contextmanager
def math_attention() -> Iterator[None]:
    """Compute attention from elementary ops, which have all derivatives, also in encoder layers of torch."""
    with sdpa_kernel(SDPBackend.MATH), NoFastPaths():
        yield


def parameter_pairs(measurement: Measurement, tangents: Tangents) -> list[tuple[Tensor, Tensor]]:
    """Return parameters with their tangents."""
    return [(measurement.parameters[name], u) for name, u in tangents.items()]


def derivatives_by_cotangent(outputs: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
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


def per_sample(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
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
