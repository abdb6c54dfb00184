"""Tensors with what is needed to put them back bit for bit: a copy, or a guard that makes one in time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from featlearn.network.fingerprint import INTEGERS, fingerprint
from featlearn.network.write_guard import WriteGuard


class KeptTensors:
    """Tensors with a copy of what they hold: small ones of one type and device together, another one alone."""

    lost = False
    """Whether they cannot be put back."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.versions = [version_of(tensor) for tensor in tensors]
        self._trainable = [tensor.requires_grad for tensor in tensors]
        self._kinds = [_kind(tensor) for tensor in tensors] if len(tensors) > 1 or tensors[0].is_cuda else []
        self._copy = _side_by_side(tensors)
        self._places = [_place(tensor) for tensor in tensors]

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copy."""
        return self._copy.numel() * self._copy.element_size()

    def put_in_place(self) -> list[Tensor]:
        """Give tensors the memory that they had; those that held something else in another one are returned."""
        found: list[Tensor] = []
        for i, (tensor, place) in enumerate(zip(self.tensors, self._places, strict=True)):
            if place is None or _lies_at(tensor, place):
                continue
            if not bool(_is_same(tensor, self.copies()[i], self.versions[i])):
                found.append(tensor)
            tensor.data = place
        return found

    def copies(self) -> list[Tensor]:
        """What each of them held."""
        if len(self.tensors) == 1:
            return [self._copy]
        pieces = self._copy.split([shape.numel() for shape, *_ in self._kinds])
        return [piece.view(shape) for piece, (shape, *_) in zip(pieces, self._kinds, strict=True)]

    def is_alike(self) -> bool:
        """Whether they still have the shapes, types and devices that they had."""
        return [_kind(tensor) for tensor in self.tensors] == self._kinds

    def same(self) -> bool | Tensor:
        """Whether all hold what they held; on a GPU an answer that is not waited for."""
        if len(self.tensors) > 1:
            return self.is_alike() and _same_bits(_side_by_side(self.tensors), self._copy)
        return _is_same(self.tensors[0], self._copy, self.versions[0])

    def changed(self) -> list[bool]:
        """Which of them hold something else."""
        found = _answers([_is_same(*each) for each in zip(self.tensors, self.copies(), self.versions, strict=True)])
        return [not same for same in found]

    def restore(self, changed: Sequence[bool]) -> None:
        """Write only where something changed: versions count."""
        for tensor, copy, written in zip(self.tensors, self.copies() if any(changed) else (), changed, strict=False):
            # Through .data, so that graphs which have saved the tensor do not see a new version of it.
            alike = tensor.layout == torch.strided and (tensor.shape, tensor.dtype, tensor.device) == (
                copy.shape,
                copy.dtype,
                copy.device,
            )
            if written and alike:
                _each_once(tensor.data, tensor).copy_(_each_once(copy, tensor))
            elif written:
                tensor.data = copy.clone()
        for tensor, trainable in zip(self.tensors, self._trainable, strict=True):
            _set_trainable(tensor, trainable)


class GuardedWeight:
    """A weight that is copied when an op is about to write to it; a fingerprint tells whether anything else did."""

    copied_bytes = 0

    def __init__(self, weight: Tensor, memory: Tensor) -> None:
        self.tensors, self.versions = [weight], [version_of(weight)]
        self.lost = False
        """Whether it was written to before it was copied, so that it cannot be put back."""
        self._memory, self._trainable = memory, weight.requires_grad
        self._fingerprint = fingerprint(memory)
        self._copy: Tensor | None = None

    def copy(self) -> None:
        """Copy it, if that was not done."""
        if self._copy is None:
            self._copy = self._memory.clone()

    def put_in_place(self) -> list[Tensor]:
        """Give the weight the memory that it had; it is returned if it held something else in another one."""
        (weight,) = self.tensors
        if _lies_at(weight, self._memory):
            return []
        same = bool(_is_same(weight, self._memory if self._copy is None else self._copy, self.versions[0]))
        weight.data = self._memory
        return [] if same else [weight]

    def same(self) -> Tensor:
        """Whether it holds what it held; on a GPU an answer that is not waited for."""
        return fingerprint(self._memory) == self._fingerprint

    def changed(self) -> list[bool]:
        """Whether it holds something else."""
        return [not bool(self.same())]

    def restore(self, changed: Sequence[bool]) -> None:
        """Put it back from a copy that was made in time."""
        if changed[0]:
            self.lost = self._copy is None or not bool(fingerprint(self._copy) == self._fingerprint)
        if changed[0] and not self.lost and self._copy is not None:
            self._memory.copy_(self._copy)
        _set_trainable(self.tensors[0], self._trainable)


Kept = KeptTensors | GuardedWeight


def _set_trainable(tensor: Tensor, trainable: bool) -> None:
    if tensor.requires_grad != trainable and tensor.is_leaf:
        tensor.requires_grad_(trainable)


def _each_once(tensor: Tensor, like: Tensor) -> Tensor:
    """Every number once that another tensor of the same shape has once: an expanded one repeats them."""
    return tensor[tuple([slice(None) if step else slice(0, 1) for step in like.stride()])]


def _is_same(tensor: Tensor, copy: Tensor, version: int) -> bool | Tensor:
    a = tensor.detach()
    if a.layout != torch.strided or a.is_quantized or a.is_nested or a.is_mkldnn:
        return version_of(tensor) == version  # their bits cannot be compared
    return a.shape == copy.shape and a.dtype == copy.dtype and a.device == copy.device and _same_bits(a, copy)


# Bytes of tensors that are looked at together, and the kinds that are.
_TOGETHER = 2**26
_COMMON = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)


def kept(tensors: Sequence[Tensor]) -> list[KeptTensors]:
    """All with copies of what they hold: each by itself takes longer than a small copy."""
    groups: dict[object, list[Tensor]] = {}
    sizes: dict[object, int] = {}
    alone: list[list[Tensor]] = []
    for t in tensors:
        plain = type(t) in (Tensor, nn.Parameter) and t.dtype in _COMMON and t.layout == torch.strided
        if not (
            plain and 0 < t.nbytes < _TOGETHER // 4 and t.is_contiguous() and not t.is_neg() and not t.is_inference()
        ):
            alone.append([t])
            continue
        alike = (t.dtype, t.device)
        if sizes.get(alike, 0) > _TOGETHER:
            alone.append(groups.pop(alike))
            sizes[alike] = 0
        groups.setdefault(alike, []).append(t)
        sizes[alike] = sizes.get(alike, 0) + t.nbytes
    return [KeptTensors(some) for some in (*groups.values(), *alone)]


LARGE, GUARDED = 2**24, 2**28
"""Bytes of a large weight, and of all large ones together above which they are not copied at once."""


def kept_weights(weights: Sequence[Tensor], *, guarded: bool) -> tuple[WriteGuard | None, list[Kept]]:
    """All weights, and a guard of large ones; without it, or where they are few, all of them are copied at once.

    A fingerprint takes longer than a copy of a small weight.
    """
    large = {id(weight): place for weight in weights if (place := _guarded_place(weight)) is not None}
    if not guarded or sum(place.nbytes for place in large.values()) <= GUARDED:
        return None, [*kept(weights)]
    later = [GuardedWeight(weight, large[id(weight)]) for weight in weights if id(weight) in large]
    copies: dict[int, list[Callable[[], None]]] = {}
    for one in later:
        copies.setdefault(one.tensors[0].untyped_storage().data_ptr(), []).append(one.copy)
    return WriteGuard(copies), [*later, *kept([weight for weight in weights if id(weight) not in large])]


def _guarded_place(weight: Tensor) -> Tensor | None:
    """A large weight in its memory, None for others and for kinds that cannot be guarded."""
    place = _place(weight)
    plain = place is not None and weight.is_contiguous() and not weight.is_neg()
    return place if plain and weight.nbytes >= LARGE else None


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of one tensor, or of all entries of several."""
    if len(tensors) == 1:
        return tensors[0].detach().clone()
    with torch.no_grad():
        flat: Tensor = torch._C._nn.flatten_dense_tensors(list(tensors))
        return flat


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()


def _place(tensor: Tensor) -> Tensor | None:
    """Another tensor in the same memory, which stays there; None for kinds whose memory is not theirs alone to name."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
    return tensor.data if plain and not tensor.is_inference() else None


def _lies_at(tensor: Tensor, place: Tensor) -> bool:
    return (
        tensor.data_ptr() == place.data_ptr()
        and tensor.shape == place.shape
        and tensor.stride() == place.stride()
        and tensor.dtype == place.dtype
    )


def moved_back(kept: Sequence[Kept]) -> list[Tensor]:
    """Tensors that are back in their memory, and held something else meanwhile."""
    return [tensor for one in kept for tensor in one.put_in_place()]


def rewind_tensors(kept: Sequence[KeptTensors]) -> None:
    """Put back what was changed. On a GPU everything is copied: to compare would mean to wait."""
    distant = [one for one in kept if one.tensors[0].is_cuda and one.is_alike()]
    if distant:
        pairs = [pair for one in distant for pair in zip(one.tensors, one.copies(), strict=True)]
        before = [_each_once(copy, tensor) for tensor, copy in pairs]
        torch._foreach_copy_([_each_once(tensor.data, tensor) for tensor, _ in pairs], before)
    restore([one for one in kept if one not in distant])


def restore(kept: Sequence[Kept]) -> list[Tensor]:
    """Put back what was changed, which is returned."""
    found: list[Tensor] = []
    for one, same in zip(kept, _answers([one.same() for one in kept]), strict=True):
        changed = [False] * len(one.tensors) if same else one.changed()
        one.restore(changed)
        found += [tensor for tensor, written in zip(one.tensors, changed, strict=True) if written]
    return found


def _answers(given: Sequence[bool | Tensor]) -> list[bool]:
    """Answers that a device may still be computing, fetched together."""
    pending = [answer for answer in given if isinstance(answer, Tensor)]
    known = iter(torch.stack([answer.to(pending[0].device) for answer in pending]).tolist() if pending else ())
    return [bool(next(known)) if isinstance(answer, Tensor) else answer for answer in given]


def version_of(tensor: Tensor) -> int:
    """Counts what was written in place; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _same_bits(a: Tensor, b: Tensor) -> bool | Tensor:
    """Equal bit for bit: NaN equals itself, and -0.0 is not 0.0."""
    if a.is_complex() or a.is_neg() or b.is_neg():
        a, b = (t.resolve_conj().resolve_neg() for t in (a, b))
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
    bits = INTEGERS[a.element_size()]
    a, b = a.view(bits), b.view(bits)
    return torch.equal(a, b) if a.device.type == "cpu" else (a == b).all()
