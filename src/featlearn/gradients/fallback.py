"""The exact fallback: one backward pass per sample and output direction.

A sample alone costs least, so the network is run on one sample at a time where that gives the same output; otherwise
(a `squeeze()` that misfires, say) the graph of the whole chunk is used.
"""

import torch
from torch import Tensor

from featlearn.contraction.factors import Dense
from featlearn.errors import FeatlearnError
from featlearn.gradients.captured import Chunk
from featlearn.graph.graph import backward


def sample_gradients(chunk: Chunk, names: list[str], directions: Tensor) -> dict[str, Dense]:
    """Per-sample gradients of the named parameters, each (samples, directions, size)."""
    parameters = [chunk.parameters[name] for name in names]
    lines: list[Tensor] = []
    for sample in range(chunk.count):
        outputs = _alone(chunk, sample)
        rows = []
        for direction in directions:
            scalar = outputs @ direction.to(outputs)
            found = backward([scalar], parameters, [torch.ones_like(scalar)])
            rows.append(
                torch.cat([real_entries(g, p).to(chunk.accumulate) for g, p in zip(found, parameters, strict=True)])
            )
        lines.append(torch.stack(rows))
    whole = torch.stack(lines)
    sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
    return {name: Dense(part) for name, part in zip(names, whole.split(sizes, 2), strict=True)}


def real_entries(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """(size,) a gradient, zeros for None; a complex entry counts as two."""
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    gradient = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return gradient.detach().flatten()


def _alone(chunk: Chunk, sample: int) -> Tensor:
    """The outputs of one sample, with the smallest graph that gives them."""
    together = chunk.outputs[sample]
    try:
        indices = chunk.indices[sample : sample + 1]
        outputs = (chunk.batch.paired_outputs if _has_batch_norm(chunk) else chunk.batch.outputs)(indices)[0]
    except FeatlearnError:
        return together
    if not outputs.requires_grad or outputs.shape != together.shape:
        return together
    slack = 1e3 * chunk.precision
    close = (outputs - together).abs().max() <= slack * chunk.outputs.abs().max()
    return outputs if bool(close) else together


def _has_batch_norm(chunk: Chunk) -> bool:
    """Whether a batch of one would have wrong gradients: see `ModelWithInputs.paired_outputs`."""
    return chunk.graph is not None and any("BatchNorm" in name for name in chunk.graph.structure.names)
