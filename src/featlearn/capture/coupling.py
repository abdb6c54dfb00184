"""Samples must not influence each other: the kernel of a batch would otherwise not be a kernel of pairs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture.probe import Probe, tensors_in
from featlearn.capture.snapshot import Snapshot
from featlearn.errors import CoupledSamplesError


def refuse_coupled(snapshot: Snapshot, generator: torch.Generator, *, thorough: bool) -> None:
    """Compare f(x[i]) with f(x)[i] in batches of another size.

    `thorough`: in two batches, each without half of the samples, so that every sample is once absent; otherwise in one
    small batch of samples drawn with replacement.
    """
    size = snapshot.count
    order = torch.randperm(size, generator=generator, device="cpu")
    halves = (order[: (size + 1) // 2], order[(size + 1) // 2 :]) if thorough else (order[:2],)
    for half in halves:
        # At least two, and never as many as the chunk has: what depends on the number of samples must show as well.
        while len(half) > 0 and (len(half) < 2 or len(half) == len(snapshot.indices)):
            half = torch.cat([half, half[:1]])
        if len(half):
            _refuse_difference(snapshot, half)


def _refuse_difference(snapshot: Snapshot, drawn: Tensor) -> None:
    probe, indices = snapshot.probe, snapshot.indices[: snapshot.count]
    again = probe.outputs(indices[drawn]).detach()
    together = snapshot.outputs.detach()[drawn.to(again.device)]
    if again.shape == together.shape and _agree(again, together, snapshot):
        return
    if again.shape == together.shape:
        largest = snapshot.outputs.detach().abs().max().clamp_min(1e-300)
        difference = f"by {float((again - together).abs().max() / largest):.1e} of the largest output"
    else:
        difference = f"{again.shape[1]} outputs in one batch, {together.shape[1]} in another"
    raise CoupledSamplesError(
        f"the outputs of a sample depend on the other samples of its batch ({difference})"
        f"{_first_difference(probe, indices, drawn)}, or the model draws random numbers in eval mode; expected "
        "f(x)[i] = f(x[i]); use running statistics, or freeze what the samples share, before measuring"
    )


def _agree(again: Tensor, together: Tensor, snapshot: Snapshot) -> bool:
    # Half of the digits: batches of another size take other code paths, which round differently.
    slack = snapshot.precision**0.5
    return bool((again - together).abs().max() <= slack * snapshot.outputs.detach().abs().max())


def _first_difference(probe: Probe, indices: Tensor, drawn: Tensor) -> str:
    """Where it happens: the first module to finish whose output for a sample changes with the batch."""
    with _recorded(probe.model) as whole:
        probe.outputs(indices)
    with _recorded(probe.model) as part:
        probe.outputs(indices[drawn])
    for (name, kind, a), (_, _, b) in zip(whole, part, strict=False):
        if len(a) == len(b) and not all(_same(s, t, len(indices), drawn) for s, t in zip(a, b, strict=True)):
            return f", first seen in {name or 'the model itself'} ({kind})"
    return ""


def _same(whole: Tensor, part: Tensor, samples: int, drawn: Tensor) -> bool:
    """Whether `part` holds the drawn samples of `whole` along one of the axes where they can lie."""
    axes = [i for i, size in enumerate(whole.shape) if size == samples and part.shape[i : i + 1] == (len(drawn),)]
    if not axes or not whole.is_floating_point():
        return True  # no sample axis to compare along: says nothing
    slack = torch.finfo(whole.dtype).eps ** 0.5 * whole.abs().max()
    return any(
        bool((whole.index_select(i, drawn.to(whole.device)) - part).abs().max() <= slack)
        for i in axes
        if whole.index_select(i, drawn.to(whole.device)).shape == part.shape
    )


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[tuple[str, str, list[Tensor]]]]:
    """The output tensors of every module, in the order in which the modules finish."""
    calls: list[tuple[str, str, list[Tensor]]] = []
    handles = []
    for name, part in model.named_modules():

        def keep(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            found = [tensor.detach().clone() for tensor in tensors_in(output)]
            calls.append((name, type(module).__name__, found))

        handles.append(part.register_forward_hook(keep))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
