"""Copies of the tensors that a model holds, and fingerprints of weights that are too large to copy."""

from collections.abc import Iterable, Sequence

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
        self._bits = [_bits(place) for place in self._places]
        self._copy = self._flattened().clone() if len(tensors) == 1 else self._flattened()
        pieces = self._copy.split([bits.numel() for bits in self._bits])
        self._copies = [piece.view(bits.shape) for piece, bits in zip(pieces, self._bits, strict=True)]
        self.copied_bytes = self._copy.nbytes

    def _flattened(self) -> Tensor:
        return self._bits[0].reshape(-1) if len(self._bits) == 1 else flattened(self._bits)

    def put_in_place(self) -> list[Tensor]:
        """Give tensors the memory they had. Return those that held something else in another one."""
        moved = self._moved()
        for tensor, place in zip(self.tensors, self._places, strict=True):
            if not _lies_at(tensor, place):
                tensor.data = place
        return moved

    def _moved(self) -> list[Tensor]:
        moved = []
        for tensor, place, copy in zip(self.tensors, self._places, self._copies, strict=True):
            if not _lies_at(tensor, place):
                alike = (tensor.shape, tensor.dtype, tensor.device) == (place.shape, place.dtype, place.device)
                if not alike or not torch.equal(_bits(tensor.data), copy):
                    moved.append(tensor)
        return moved

    def changed(self) -> list[Tensor]:
        """Return the tensors that hold something else than they did, or whose memory does."""
        return [*(self.tensors[k] for k in self._changed()), *self._moved()]

    def _changed(self) -> list[int]:
        if torch.equal(self._flattened(), self._copy):
            return []
        pairs = zip(self._bits, self._copies, strict=True)
        return [k for k, (bits, copy) in enumerate(pairs) if not torch.equal(bits, copy)]

    def restore(self) -> list[Tensor]:
        """Write what has changed, through memory whose writes no version counts. Return the tensors written to."""
        changed = self._changed()
        for k in changed:
            self._bits[k].copy_(self._copies[k])
        return [self.tensors[k] for k in changed]

    def rewind(self) -> None:
        """Put everything back. On a GPU all is written: a comparison would have to be waited for."""
        self.put_in_place()
        if self._copy.device.type == "cpu":
            self.restore()
        else:
            copy_each(self._bits, self._copies)


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
            if not _lies_at(tensor, place):
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
        kind = (tensor.element_size(), tensor.is_complex(), tensor.device)
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


def _bits(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's bits as integers, those that an expanded one repeats once."""
    once = tensor[tuple([slice(None) if step else slice(0, 1) for step in tensor.stride()])]
    numbers = torch.view_as_real(once) if once.is_complex() else once
    return numbers.view(INTEGERS[numbers.element_size()])


def _lies_at(tensor: Tensor, place: Tensor) -> bool:
    return (
        tensor.data_ptr() == place.data_ptr()
        and tensor.shape == place.shape
        and tensor.stride() == place.stride()
        and tensor.dtype == place.dtype
    )
