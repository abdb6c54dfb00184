"""Copies of the tensors that a model holds, and fingerprints of weights that are too large to copy."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from featlearn.network.fingerprint import INTEGERS, fingerprint
from featlearn.torch_internals import copy_each, flattened, version

LARGE, LARGE_TOGETHER = 2**24, 2**28
"""Bytes of a large weight, and of all large ones together above which they are not copied."""
_GROUP_BYTES = 2**26


class TensorCopies:
    """Tensors in memory of one type and device, with one copy of their bits."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._places = [tensor.data for tensor in tensors]
        self._addresses = [_address(place) for place in self._places]
        self._entries = [place if place.is_contiguous() else _unrepeated(place) for place in self._places]
        self._copy = self._flattened().clone() if len(tensors) == 1 else self._flattened()
        self.copied_bytes = self._copy.nbytes

    def _flattened(self) -> Tensor:
        return _bits(self._entries[0].reshape(-1) if len(self._entries) == 1 else flattened(self._entries))

    @cached_property
    def _bits_and_copies(self) -> list[tuple[Tensor, Tensor]]:
        """The memory of every tensor, and its copy."""
        bits = [_bits(entries) for entries in self._entries]
        pieces = self._copy.reshape(-1).split([part.numel() for part in bits])
        return [(part, piece.view(part.shape)) for part, piece in zip(bits, pieces, strict=True)]

    def put_in_place(self) -> list[Tensor]:
        """Give tensors the memory they had. Return those that held something else in another one."""
        strays = self._strays()
        moved = self._moved(strays)
        for k in strays:
            self.tensors[k].data = self._places[k]
        return moved

    def _strays(self) -> list[int]:
        """Numbers of the tensors that lie in other memory than they did."""
        pairs = enumerate(zip(self.tensors, self._addresses, strict=True))
        return [k for k, (tensor, address) in pairs if _address(tensor) != address]

    def _moved(self, strays: Sequence[int]) -> list[Tensor]:
        """Those of some tensors that hold something else than they did."""
        moved = []
        for k in strays:
            tensor, place = self.tensors[k], self._places[k]
            alike = (tensor.shape, tensor.dtype, tensor.device) == (place.shape, place.dtype, place.device)
            if not alike or not torch.equal(_bits(_unrepeated(tensor.data)), self._bits_and_copies[k][1]):
                moved.append(tensor)
        return moved

    def changed(self) -> list[Tensor]:
        """Return the tensors that hold something else than they did, or whose memory does."""
        return [*(self.tensors[k] for k in self._changed()), *self._moved(self._strays())]

    def _changed(self) -> list[int]:
        if torch.equal(self._flattened(), self._copy):
            return []
        return [k for k, (bits, copy) in enumerate(self._bits_and_copies) if not torch.equal(bits, copy)]

    def restore(self) -> list[Tensor]:
        """Write what has changed, through memory whose writes no version counts. Return the tensors written to."""
        changed = self._changed()
        for k in changed:
            bits, copy = self._bits_and_copies[k]
            bits.copy_(copy)
        return [self.tensors[k] for k in changed]

    def rewind(self) -> None:
        """Put everything back. On a GPU all is written: a comparison would have to be waited for."""
        self.put_in_place()
        if self._copy.device.type == "cpu":
            self.restore()
        else:
            copy_each(*zip(*self._bits_and_copies, strict=True))


class LargeWeights:
    """Weights without a copy. They are compared by fingerprints, and cannot be put back."""

    copied_bytes = 0

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._places = [tensor.data for tensor in tensors]
        self._fingerprints = [fingerprint(place) for place in self._places]

    def put_in_place(self) -> list[Tensor]:
        """Give weights the memory they had. Return those that held something else in another one."""
        moved = []
        for tensor, place, number in zip(self.tensors, self._places, self._fingerprints, strict=True):
            if _address(tensor) != _address(place):
                if tensor.numel() != place.numel() or int(fingerprint(tensor)) != int(number):
                    moved.append(tensor)
                tensor.data = place
        return moved

    def changed(self) -> list[Tensor]:
        """Return the weights whose memory holds something else than it did."""
        if not self.tensors:
            return []
        equal = torch.stack(
            [(fingerprint(p) == n).cpu() for p, n in zip(self._places, self._fingerprints, strict=True)]
        )
        return [tensor for tensor, same in zip(self.tensors, equal.tolist(), strict=True) if not same]


class UnusualTensors:
    """Tensors whose memory cannot be named: sparse or quantized ones, and classes of others. Their versions count."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [tensor for tensor in tensors if not tensor.is_inference()]  # nothing writes to these
        self._versions = [version(tensor) for tensor in self.tensors]
        with torch.no_grad():
            self._copies = [tensor.detach().clone() for tensor in self.tensors]
        self.copied_bytes = sum(copy.nbytes for copy in self._copies if copy.layout == torch.strided)

    def put_in_place(self) -> list[Tensor]:
        """Do nothing: `changed` sees what takes the place of their content."""
        return []

    def changed(self) -> list[Tensor]:
        """Return the tensors that were written to."""
        return [
            tensor for tensor, number in zip(self.tensors, self._versions, strict=True) if version(tensor) != number
        ]

    def restore(self) -> list[Tensor]:
        """Replace the content of what was written to."""
        changed = self.changed()
        for tensor, copy in zip(self.tensors, self._copies, strict=True):
            if any(tensor is other for other in changed):
                tensor.data = copy.clone()
        return changed

    def rewind(self) -> None:
        """Put everything back."""
        self.restore()


Copies = TensorCopies | UnusualTensors


def copies_of(tensors: Iterable[Tensor]) -> list[Copies]:
    """Copy all tensors, as few at a time as fits the cost of a call and of a comparison."""
    groups: dict[object, list[Tensor]] = {}
    sizes: dict[object, int] = {}
    unusual = []
    for tensor in tensors:
        if not _is_plain(tensor):
            unusual.append(tensor)
            continue
        kind = (tensor.dtype, tensor.device)
        groups.setdefault((kind, sizes.get(kind, 0) // _GROUP_BYTES), []).append(tensor)
        sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
    return [*map(TensorCopies, groups.values()), *([UnusualTensors(unusual)] if unusual else [])]


def large_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights that are too large to copy, none where they fit together."""
    large = [weight for weight in weights if weight.nbytes >= LARGE and _is_plain(weight) and weight.is_contiguous()]
    return large if sum(weight.nbytes for weight in large) > LARGE_TOGETHER else []


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory of its own that `.data` names."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
    return plain and not (tensor.is_inference() or tensor.is_nested or tensor.is_neg() or tensor.is_conj())


def _unrepeated(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's entries, those that an expanded one repeats once."""
    return tensor[tuple([slice(None) if step else slice(0, 1) for step in tensor.stride()])]


def _bits(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's bits as integers."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return numbers.view(INTEGERS[numbers.element_size()])


def _address(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
