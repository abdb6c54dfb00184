"""Products with a network's Jacobian: J^T v by a backward pass, J u by forward mode or by differentiating twice.

J u is the derivative of w^T J u by w, and J^T w is linear in w: a second backward pass through the first gives it. No
method of these works on every network: forward mode lacks fused attention and sees nothing of parameters that a model
reaches past its modules; fused ops have second derivatives that are missing, or wrong without a sign. So each method is
tried on a few samples, and taken where <w, J u> = <J^T w, u>. What is left is read from per-sample gradients.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from featlearn.contraction.factors import as_dense
from featlearn.graph.graph import backward
from featlearn.measurement import Measurement
from featlearn.network.elementary_ops import ElementaryOps
from featlearn.network.inputs import ModelWithInputs

Tangents = Mapping[str, Tensor]
"""Parameter name -> (m, *its shape): m vectors in parameter space."""
JvpMethod = Callable[[Measurement, ModelWithInputs, Tangents], Tensor]


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
    methods: list[JvpMethod] = [_forward_mode]
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


class _Reparametrized(nn.Module):
    """A network called with other tensors in the places of its parameters."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        self._tensors = tensors

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network gives with them."""
        return torch.func.functional_call(self.model, self._tensors, args, kwargs)


def outputs_and_product(
    method: JvpMethod, measurement: Measurement, batch: ModelWithInputs, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    """(n, C) outputs and J u for one u; forward mode has both from one pass."""
    if method is _forward_mode:
        return _dual_outputs(measurement, batch, tangents, 0)
    return batch.outputs(_all(batch)).detach(), method(measurement, batch, tangents)[0].detach()


def _forward_mode(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """(m, n, C) J u, one forward pass for each u; nothing of the graph is kept."""
    return torch.stack([_dual_outputs(measurement, batch, tangents, k)[1] for k in range(_count(tangents))])


def _dual_outputs(
    measurement: Measurement, batch: ModelWithInputs, tangents: Tangents, k: int
) -> tuple[Tensor, Tensor]:
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(parameter.detach(), tangents[name][k].to(parameter))
            for name, parameter in measurement.parameters.items()
        }
        outputs = replace(batch, model=_Reparametrized(batch.model, duals)).outputs(_all(batch))
        primal, tangent = forward_ad.unpack_dual(outputs)
        primal = primal.detach().clone()
        return primal, torch.zeros_like(primal) if tangent is None else tangent.detach().clone()


def _twice_backward(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """(m, n, C) J u: one graph of J^T w for all, and a backward pass through it for each u."""
    with sdpa_kernel(SDPBackend.MATH):  # the only attention with a second derivative
        outputs = batch.paired_outputs(_all(batch))
        return _derivatives_by_cotangent(measurement, outputs, tangents)


def _twice_backward_elementary(measurement: Measurement, batch: ModelWithInputs, tangents: Tangents) -> Tensor:
    """The same with fused ops taken apart."""
    with ElementaryOps():
        outputs = batch.paired_outputs(_all(batch))
    return _derivatives_by_cotangent(measurement, outputs, tangents)


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
