"""Check that a second backward pass gives the derivative of the first, as it does not behind `detach`.

Outputs of `detach` and of straight-through estimators change with the weights, and autograd takes them for constant.
Gradients of such a model are what training uses; second derivatives by autograd miss part of how they change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from featlearn.audited_model import AuditedModel
from featlearn.errors import FeatlearnError, UnsupportedModelError
from featlearn.kernel.stream import taken
from featlearn.measurement import Measurement, spread
from featlearn.network.elementary_ops import ElementaryOps
from featlearn.network.inputs import Inputs, batch_size

Vectors = dict[str, Tensor]
"""Parameter name -> a tensor of its shape."""


def refuse_hidden_changes(audited: AuditedModel, x: Inputs) -> None:
    """Raise if differences of gradients are not what a second backward pass gives, on a few samples.

    Compared in double precision, at randomly moved weights: zero biases on black pixels stand exactly at a kink.
    """
    samples = batch_size(x)
    few = taken(x, samples, torch.arange(samples, device="cpu")[spread(samples)])
    for dtype in (torch.float64, None):  # some models cannot be copied to double precision
        anew = AuditedModel(audited.model, replace(audited.request, dtype=dtype))
        try:
            with anew.measuring([few]) as measurement:
                hidden = _hidden_changes(measurement)
            break
        except FeatlearnError:
            if dtype is None:
                raise
    if hidden:
        raise UnsupportedModelError(
            f"gradients of {hidden[0]} change with the weights in a way that autograd does not see, as behind detach, "
            "a straight-through estimator or a surrogate backward pass; expected second derivatives that are those of "
            "the gradients. Take the difference of fl.ntk before and after a small step of training instead"
        )


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """sum_j a_j b_j over real entries; a complex entry counts as two."""
    return (a.conj() * b).real.sum() if a.is_complex() else (a * b).sum()


def _hidden_changes(measurement: Measurement) -> list[str]:
    """Parameters whose gradients along a random line change by another amount than a second backward pass says."""
    generator = torch.Generator("cpu").manual_seed(4)
    parameters, example = measurement.parameters, measurement.example()
    cotangent = torch.randn(example.outputs[: example.count].shape, generator=generator, dtype=torch.float64)
    line, start = (_random_moves(parameters, generator) for _ in range(2))
    # Shares of the weights: so small a step seldom crosses a kink, and rounding of its difference is eps^(1/4).
    step, rounding = example.precision**0.75, example.precision**0.25
    before = {name: p.detach().clone() for name, p in parameters.items()}

    def gradients(distance: float) -> Vectors:
        for name, p in parameters.items():
            p.data.copy_(before[name] + 1e-2 * start[name] + distance * line[name])
        outputs = _outputs(measurement)
        found = torch.autograd.grad(outputs, [*parameters.values()], cotangent.to(outputs), allow_unused=True)
        return _named(parameters, found)

    try:
        ahead, behind, here = (gradients(distance) for distance in (step, -step, 0.0))
        expected = _second_derivative(measurement, cotangent, line)
    finally:
        for name, p in parameters.items():
            p.data.copy_(before[name])
    size = sum(float(g.norm()) ** 2 for g in here.values()) ** 0.5
    hidden = []
    for name, second in expected.items():
        difference = (ahead[name] - behind[name]) / (2 * step)
        allowed = rounding * (3 * float(second.norm() + difference.norm()) + size)
        if not float((second - difference).norm()) <= allowed:
            hidden.append(name)
    return hidden


def _second_derivative(measurement: Measurement, cotangent: Tensor, line: Vectors) -> Vectors:
    """The derivative of J^T v along a line in weight space, by a backward pass of a backward pass."""
    parameters = measurement.parameters
    with ElementaryOps():
        outputs = _outputs(measurement)
    first = torch.autograd.grad(
        outputs, [*parameters.values()], cotangent.to(outputs), create_graph=True, allow_unused=True
    )
    terms = [inner_product(g, line[name]) for name, g in zip(parameters, first, strict=True) if g is not None]
    slope = torch.stack(terms).sum() if terms else outputs.new_zeros(())
    if not slope.requires_grad:  # a linear model
        return _named(parameters, [None] * len(parameters))
    return _named(parameters, torch.autograd.grad(slope, [*parameters.values()], allow_unused=True))


def _outputs(measurement: Measurement) -> Tensor:
    (batch,) = measurement.batches
    return batch.paired_outputs(torch.arange(batch.samples, device="cpu"))


def _named(parameters: Mapping[str, Tensor], found: Sequence[Tensor | None]) -> Vectors:
    """Gradients by name, zeros where there are none."""
    pairs = zip(parameters.items(), found, strict=True)
    return {name: torch.zeros_like(p) if g is None else g.detach() for (name, p), g in pairs}


def _random_moves(parameters: Mapping[str, Tensor], generator: torch.Generator) -> Vectors:
    """Random vectors as large as the parameters; those of zeros get a hundredth of the usual size."""
    count = max(1, sum(p.numel() for p in parameters.values()))
    usual = (sum(float(p.detach().norm()) ** 2 for p in parameters.values()) / count) ** 0.5
    moves = {}
    for name, p in parameters.items():
        size = max(float(p.detach().norm()) / max(1, p.numel()) ** 0.5, 0.01 * usual)
        moves[name] = size * torch.randn(p.shape, generator=generator, dtype=p.dtype, device="cpu").to(p.device)
    return moves
