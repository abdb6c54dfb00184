"""Samples as they come: one batch, or a loader that gives the same batches at every sweep."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from featlearn.errors import InputTypeError, InputValueError
from featlearn.network.fingerprint import fingerprint
from featlearn.network.inputs import Inputs, batch_size, cast_inputs, map_tensors, tensors_in
from featlearn.shapes import describe

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class SampleStream:
    """Inputs of P samples in a fixed order, given out in chunks; of a loader only what passes is in memory."""

    def __init__(self, data: Any, device: torch.device | None, dtype: torch.dtype | None) -> None:
        self._loader = data if isinstance(data, DataLoader) else None
        self._device, self._dtype = device, dtype
        self._seen: Tensor | None = None
        self.targets: Tensor | None = None
        """What the loader gives beside the inputs, (P, ...); None where it gives inputs alone."""
        if self._loader is None:
            self.samples = batch_size(data, "data")
            self._whole = data
            self.first = data
            return
        _refuse_shuffling(self._loader)
        self.samples = 0
        self._survey()

    @property
    def sample_bytes(self) -> float:
        """The inputs of one sample, in bytes."""
        whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(self.first))
        return max(1.0, whole / batch_size(self.first, "data"))

    @property
    def fingerprints(self) -> dict[str, Tensor]:
        """Tensors that tell these samples from others: the samples, or what was noted of a loader's batches."""
        if self._loader is not None:
            assert self._seen is not None
            return {"the batches of the loader": self._seen}
        return {f"tensor {place}": tensor for place, tensor in enumerate(tensors_in(self._whole))}

    def chunks(
        self, size: int, wanted: Tensor | None = None, share: Callable[[int], slice] = slice
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs of up to `size` samples and their places, (n,) integers on the CPU.

        `wanted`: places, ascending, of the samples that are needed, instead of all. `share`: which of the samples of a
        chunk are, by their number. The samples of small batches are gathered; a batch whose samples have another shape
        (text padded batch by batch) begins a new chunk.
        """
        if self._loader is None:
            every = torch.arange(self.samples, device="cpu") if wanted is None else wanted
            for part in every.split(size):
                own = part[share(len(part))]
                if len(own):
                    yield cast_inputs(taken(self._whole, self.samples, own), self._dtype), own
            return
        for x, places in self._read(size, wanted):
            own = torch.arange(len(places), device="cpu")[share(len(places))]
            if len(own):
                yield x if len(own) == len(places) else taken(x, len(places), own), places[own]

    def _read(self, size: int, wanted: Tensor | None) -> Iterator[tuple[Inputs, Tensor]]:
        """The same of a loader, before they are shared."""
        held: list[tuple[Inputs, int]] = []
        held_places: list[Tensor] = []
        for x, samples, begin in self._batches():
            places = torch.arange(begin, begin + samples, device="cpu")
            if wanted is not None:
                places = wanted[(wanted >= begin) & (wanted < begin + samples)]
            for part in places.split(size):
                if not len(part):
                    continue
                piece = x if len(part) == samples else taken(x, samples, part - begin)
                together = sum(map(len, held_places)) + len(part)
                if held and (together > size or not _alike(held[0], (piece, len(part)))):
                    yield _joined(held), torch.cat(held_places)
                    held, held_places = [], []
                held.append((piece, len(part)))
                held_places.append(part)
        if held:
            yield _joined(held), torch.cat(held_places)

    def _survey(self) -> None:
        """Count the samples, look at the first batch, keep the targets."""
        targets: list[Any] = []
        for x, samples, begin in self._batches(targets):
            if begin == 0:
                self.first = x
            self.samples = begin + samples
        if self.samples == 0:
            raise InputValueError("the loader gives no batches, expected at least one sample")
        if targets and all(isinstance(part, Tensor) and part.dim() > 0 for part in targets):
            self.targets = torch.cat(targets)

    def _batches(self, targets: list[Any] | None = None) -> Iterator[tuple[Inputs, int, int]]:
        """Inputs of every batch of the loader on the device, their number, and how many came before."""
        assert self._loader is not None
        prints: list[Tensor] = []
        begin = 0
        with _generator_kept(self._loader):
            for batch in self._loader:
                x, target = _separated(batch)
                samples = batch_size(x, "a batch of the loader")
                prints.append(_fingerprint(x, samples))
                if targets is not None and target is not None:
                    targets.append(target)
                if self._device is not None:
                    x = map_tensors(x, lambda tensor: tensor.to(self._device, non_blocking=True))
                yield cast_inputs(x, self._dtype), samples, begin
                begin += samples
        seen = torch.stack(prints) if prints else torch.zeros(0, dtype=torch.int64, device="cpu")
        if self._seen is None:
            self._seen = seen
        elif not torch.equal(seen, self._seen):
            raise InputValueError(
                "the loader gave other samples than in the first sweep, expected the same ones in the same order every "
                "time; take random augmentation and shuffling out of it"
            )


def taken(x: Inputs, samples: int, places: Tensor) -> Inputs:
    """Some of the samples of a batch; what all samples share is passed on."""

    def rows(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != samples:
            return tensor
        chosen = tensor.detach().index_select(0, places.to(tensor.device))
        return chosen.requires_grad_(tensor.requires_grad)  # a model may differentiate by its inputs

    return map_tensors(x, rows)


def _separated(batch: Any) -> tuple[Inputs, Any]:
    """Inputs and targets of what a loader gives."""
    if isinstance(batch, Tensor | Mapping):
        return batch, None
    if isinstance(batch, list | tuple) and len(batch) in (1, 2):
        inputs = batch[0]
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs
        return inputs, batch[1] if len(batch) == 2 else None
    raise InputTypeError(
        f"the loader gives {describe(tuple(batch) if isinstance(batch, list) else batch)}, expected inputs or "
        "(inputs, targets); give the loader a collate_fn that returns that, several inputs as a tuple or a mapping"
    )


def _refuse_shuffling(loader: "DataLoader[Any]") -> None:
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, _SHUFFLING) for sampler in samplers):
        raise InputValueError(
            "the loader shuffles, expected the same order at every sweep: entry i of a vector belongs to sample i; "
            "build it with shuffle=False"
        )


@contextmanager
def _generator_kept(loader: "DataLoader[Any]") -> Iterator[None]:
    """A loader draws from its own generator at every sweep, also when it does not shuffle."""
    generator = loader.generator
    state = None if generator is None else generator.get_state()
    try:
        yield
    finally:
        if generator is not None and state is not None:
            generator.set_state(state)


def _fingerprint(x: Inputs, samples: int) -> Tensor:
    """A number that changes with any bit of the inputs and their order; compared once a sweep: no batch waits."""
    total = torch.full((), samples, dtype=torch.int64, device="cpu")
    for tensor in tensors_in(x):
        found = fingerprint(tensor)
        total = 31 * total.to(found.device) + found  # modulo 2^64
    return total


def _alike(a: tuple[Inputs, int], b: tuple[Inputs, int]) -> bool:
    left, right = tensors_in(a[0]), tensors_in(b[0])
    return len(left) == len(right) and all(s.shape[1:] == t.shape[1:] for s, t in zip(left, right, strict=True))


def _joined(pieces: list[tuple[Inputs, int]]) -> Inputs:
    """Batches one after the other; what the samples of a batch share is taken from the first."""
    if len(pieces) == 1:
        return pieces[0][0]
    columns = [list(column) for column in zip(*(tensors_in(x) for x, _ in pieces), strict=True)]
    counts = [count for _, count in pieces]
    whole = iter(
        torch.cat(column)
        if all(t.dim() and t.shape[0] == count for t, count in zip(column, counts, strict=True))
        else column[0]
        for column in columns
    )
    return map_tensors(pieces[0][0], lambda _: next(whole))
