"""Samples must not influence each other: the kernel of a batch would otherwise not be a kernel of pairs.

Every sample of a batch is run again among other samples, in another order, and must have the same outputs.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.gradients.captured import Chunk
from featlearn.network.inputs import ModelWithInputs, tensors_in

SMALL = 4
"""Samples in a small part: a decision taken for a whole batch shows there."""
MANY = 96
"""Batches of so many samples have small parts beside the others."""


class Part(NamedTuple):
    """Some samples of a batch, run without the others."""

    places: Tensor
    """Where they stand in the batch."""
    outputs: Tensor


PIECES = 8
PIECE_BYTES = 2**31
"""Bytes of activations that make a piece worth its launches on a GPU."""


def piece_count(samples: int, launch_bytes: int) -> int:
    """In how many pieces a batch is run again. More show more.

    `launch_bytes`: bytes of one sample's activations on a GPU, which runs small batches in fewer pieces because each
    has its price in launches; 0 on a CPU.
    """
    return max(2, min(PIECES, samples * launch_bytes // PIECE_BYTES)) if launch_bytes else PIECES


def part_sizes(samples: int, pieces: int) -> list[int]:
    """Number of samples in each part: single samples, small parts of a large batch, and about equal pieces."""
    places = torch.arange(samples, device="cpu")
    return [len(part) for part in _divided(places, places, pieces)]


def _distinct(size: int, samples: int) -> int:
    """At least two, and never as many as the batch: what depends on the number of samples must show as well."""
    while size in (1, max(2, samples)):
        size += 1
    return size


def run_parts(batch: ModelWithInputs, begin: int, end: int, pieces: int, generator: torch.Generator) -> list[Part]:
    """Outputs of samples [begin, end), each in a smaller batch.

    Gradients are on: without them some layers take another path.
    """
    order = torch.randperm(end - begin, generator=generator, device="cpu")
    parts = _divided(order, _projections(batch, begin, end, generator), pieces)
    return [Part(places, batch.outputs(places + begin).detach()) for places in parts]


def _divided(order: Tensor, projected: Tensor, pieces: int) -> list[Tensor]:
    """Divide samples: unlike samples alone, small random parts, the others by similarity, reversed.

    `order`: a random order. `projected`: a random projection of each sample's inputs. Neighbors in it go to different
    halves, so that no two equal samples stay together. Each half is cut along the projection, so that the parts differ
    from the batch in their statistics. In a part the order is that of the batch reversed, so that precedence shows.
    """
    samples = len(order)
    small = SMALL * (min(SMALL, pieces // 2) if samples >= MANY else 0)
    rest = order[small:].to(projected.device, non_blocking=True)
    similar = rest[projected[rest].argsort()]
    # A rule that stops once every sample has converged shows in samples that are run alone.
    parts = [similar[:1], similar[-1:]][: min(2, pieces // 2) if samples > 2 else 0]
    parts += order[:small].split(SMALL) if small else ()
    cuts = max(1, min(pieces, (samples - small) // 3) // 2)
    for half in (similar[::2], similar[1::2]):
        parts += [part.sort(descending=True).values for part in half.tensor_split(cuts) if len(part)]
    return [torch.cat([part, part[:1].expand(_distinct(len(part), samples) - len(part))]) for part in parts]


def _projections(batch: ModelWithInputs, begin: int, end: int, generator: torch.Generator) -> Tensor:
    """(samples,) a random projection of each sample's inputs, where the inputs are: nothing is waited for."""
    total: Tensor | None = None
    for tensor in tensors_in(batch.x):
        if tensor.dim() and tensor.shape[0] == batch.samples and tensor.numel() and not tensor.is_complex():
            # Equal samples have equal beginnings.
            rows = tensor.detach()[begin:end].reshape(end - begin, -1)[:, :4096].float()
            weights = torch.randn(rows.shape[1], generator=generator, dtype=torch.float32, device="cpu")
            term = (rows @ weights.to(rows.device, non_blocking=True)).nan_to_num()
            total = term if total is None else total + term.to(total.device)
    return torch.zeros(end - begin, device="cpu") if total is None else total


def expect_independent(deferred: DeferredChecks, chunk: Chunk, parts: list[Part]) -> None:
    """Require that outputs are finite, and those of every part what they are in the batch, to half of the digits."""
    whole = chunk.outputs.detach()
    if not parts:
        deferred.expect_sizes(math.isfinite, [whole])
        return
    slack, count = chunk.precision**0.5, whole.shape[1]

    def test(*sizes: float) -> bool:
        differences, largest = sizes[:count], sizes[count:]
        return all(map(math.isfinite, largest)) and all(
            difference <= slack * size for difference, size in zip(differences, largest, strict=True)
        )

    for part in parts:
        if part.outputs.shape[1] != count:
            deferred.fail()
            return
    gaps = torch.stack([_largest(_gap(whole, part)) for part in parts])
    deferred.expect(test, gaps.amax(0), _largest(whole))


def refuse_coupled(chunk: Chunk, parts: list[Part]) -> None:
    """Raise if the outputs of a sample depend on the other samples of its batch."""
    deferred = DeferredChecks()
    expect_independent(deferred, chunk, parts)
    if deferred.hold():
        return
    from featlearn.audit.refusals import refusal  # loaded where something is refused

    whole = chunk.outputs.detach()
    largest, precision = _largest(whole), chunk.precision
    rounding: Tensor | None = None
    for part in parts:
        if part.outputs.shape[1] != whole.shape[1]:
            raise refusal(
                chunk, part.places, f"{part.outputs.shape[1]} outputs in one batch, {whole.shape[1]} in another"
            )
        gap = _largest(_gap(whole, part))
        if bool((gap <= precision**0.5 * largest).all()):
            continue
        # Outputs whose terms cancel have fewer digits: how many, a change of the weights in their last digit tells.
        rounding = _rounding(chunk) if rounding is None else rounding
        excess = gap - torch.maximum(precision**0.5 * largest, 30 * rounding)
        if not bool((excess <= 0).all()):
            worst = int(excess.argmax())
            change = float(gap[worst] / largest[worst].clamp_min(1e-300))
            raise refusal(chunk, part.places, f"output {worst} by {change:.1e} of its largest value", change)


def _gap(whole: Tensor, part: Part) -> Tensor:
    return part.outputs - whole[part.places.to(whole.device) % len(whole)]


def _largest(outputs: Tensor) -> Tensor:
    return outputs.abs().amax(0)


def _rounding(chunk: Chunk) -> Tensor:
    """(C,) by how much outputs change when every weight moves by its last digit."""
    with last_digit_changed(chunk.batch.model):
        moved = chunk.batch.outputs(chunk.indices).detach()
    change = (moved - chunk.outputs.detach()) if moved.shape == chunk.outputs.shape else torch.zeros_like(moved)
    return _largest(change)


@contextmanager
def last_digit_changed(model: nn.Module, units: int = 1, seed: int = 3) -> Iterator[None]:
    """Every weight, measured or not, moved up or down by one unit of its last digit, or several, and put back."""
    generator = torch.Generator("cpu").manual_seed(seed)
    parameters = list(model.parameters())
    kept = [p.detach().clone() for p in parameters]
    try:
        for parameter in parameters:
            real = torch.view_as_real(parameter.data) if parameter.is_complex() else parameter.data
            if real.is_floating_point():
                signs = 2 * torch.randint(2, real.shape, generator=generator, device="cpu").to(real) - 1
                real.mul_(1 + units * torch.finfo(real.dtype).eps * signs)
        yield
    finally:
        for parameter, before in zip(parameters, kept, strict=True):
            parameter.data.copy_(before)
