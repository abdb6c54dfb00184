"""Samples must not influence each other: the kernel of a batch would otherwise not be a kernel of pairs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture.probe import Probe, tensors_in
from featlearn.capture.snapshot import Snapshot
from featlearn.errors import CoupledSamplesError
from featlearn.linalg.later import Later


def draws(samples: int, generator: torch.Generator, *, thorough: bool) -> list[Tensor]:
    """Other batches of the samples of a chunk, as places in it.

    `thorough`: two batches, each without half of the samples, so that every sample is absent once. Otherwise one, with
    a sixteenth of the samples.
    """
    order = torch.randperm(samples, generator=generator, device="cpu")
    half = (samples + 1) // 2
    batches = [order[:half], order[half:]] if thorough else [order[: max(4, samples // 16)]]
    for i, batch in enumerate(batches):
        # At least two, and never as many as the chunk has: what depends on the number of samples must show as well.
        while len(batch) > 0 and len(batch) in (1, max(2, samples)):
            batch = torch.cat([batch, batch[:1]])
        batches[i] = batch
    return [batch for batch in batches if len(batch)]


def refuse_difference(snapshot: Snapshot, again: Tensor, drawn: Tensor, rounding: float) -> None:
    """Raise if the outputs of the drawn samples are not those they had in the chunk."""
    whole = snapshot.outputs.detach()
    together = whole[drawn.to(again.device)]
    if again.shape != together.shape:
        difference = f"{again.shape[1]} outputs in one batch, {together.shape[1]} in another"
    else:
        # Half of the digits, output by output: batches of another size take other code paths, which round differently.
        largest = _largest(whole)
        excess = _largest(again - together) - snapshot.precision**0.5 * largest
        if bool((excess <= 64 * snapshot.precision * rounding).all()):
            return
        worst = int(excess.argmax())
        change = float((again - together)[:, worst].abs().max() / largest[worst].clamp_min(1e-300))
        difference = f"output {worst} by {change:.1e} of its largest value"
    indices = snapshot.indices[: snapshot.count]
    raise CoupledSamplesError(
        f"the outputs of a sample depend on the other samples of its batch ({difference})"
        f"{_first_difference(snapshot.probe, indices, drawn)}, or the model draws random numbers in eval mode; "
        "expected f(x)[i] = f(x[i]). Use running statistics, check batch_first, and let a readout take what belongs to "
        "samples from x rather than from outside"
    )


def expect_same_outputs(later: Later, snapshot: Snapshot, again: Tensor, places: slice) -> None:
    """Ask whether outputs are finite, and those at some places what they are in a smaller batch, to half of the digits.

    Outputs whose terms cancel have fewer; an audit tells.
    """
    whole = snapshot.outputs.detach()
    if again.shape != whole[places].shape:
        later.doubt()
        return

    outputs, precision = again.shape[1], snapshot.precision

    def test(*numbers: float) -> bool:
        differences, largest = numbers[:outputs], numbers[outputs:]
        return all(map(math.isfinite, largest)) and all(
            difference <= precision**0.5 * size for difference, size in zip(differences, largest, strict=True)
        )

    later.expect(test, _largest(again - whole[places]), _largest(whole))


def expect_finite(later: Later, snapshot: Snapshot) -> None:
    """Ask whether outputs are finite."""
    later.expect_sizes(math.isfinite, [snapshot.outputs.detach()])


def _largest(outputs: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(outputs, math.inf, 0)
    return largest


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
