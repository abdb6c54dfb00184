"""The exact fallback: one backward pass per sample and output direction.

A sample alone costs least, so the network is run on one sample at a time where that gives the same output; otherwise
(a `squeeze()` that misfires, say) the graph of the whole chunk is used.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from featlearn.capture.graph import backward
from featlearn.errors import FeatlearnError
from featlearn.linalg.factors import Dense, Gradients

if TYPE_CHECKING:
    from featlearn.capture.snapshot import Snapshot


def sample_gradients(snapshot: "Snapshot", names: list[str], directions: Tensor) -> dict[str, Gradients]:
    """Per-sample gradients of the named parameters, each (samples, directions, size)."""
    parameters = [snapshot.parameters[name] for name in names]
    lines: list[list[Tensor]] = []
    for sample in range(len(snapshot.indices)):
        if sample > 0 and snapshot.count == 1:  # the copy of a single sample
            lines.append(lines[0])
            continue
        outputs = _alone(snapshot, sample)
        rows = []
        for direction in directions:
            scalar = outputs @ direction.to(outputs)
            found = backward([scalar], parameters, [torch.ones_like(scalar)])
            rows.append(torch.cat([_flat(g, p, snapshot.accumulate) for g, p in zip(found, parameters, strict=True)]))
        lines.append(rows)
    whole = torch.stack([torch.stack(rows) for rows in lines])
    sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
    return {name: Dense(part) for name, part in zip(names, whole.split(sizes, 2), strict=True)}


def _flat(gradient: Tensor | None, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    gradient = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return gradient.detach().flatten().to(dtype)


def _alone(snapshot: "Snapshot", sample: int) -> Tensor:
    """The outputs of one sample, with the smallest graph that gives them."""
    together = snapshot.outputs[sample]
    try:
        outputs = snapshot.probe.outputs(snapshot.indices[sample : sample + 1])[0]
    except FeatlearnError:
        return together
    if not outputs.requires_grad or outputs.shape != together.shape:
        return together
    slack = 1e3 * snapshot.precision
    close = (outputs - together).abs().max() <= slack * snapshot.outputs.abs().max()
    return outputs if bool(close) else together
