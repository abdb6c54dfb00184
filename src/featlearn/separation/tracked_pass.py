"""The tensors of a forward pass, each marked with the value that it holds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from featlearn.graph.layout import Layout, sample_dimension
from featlearn.torch_internals import SCRIPTED_CALLS

UNTOUCHED = 0
"""The number of all values that no sample has touched."""
COUNTED = -1
"""The number of values that no sample has touched, but that may depend on how many samples there are."""
PLAIN = (Tensor, nn.Parameter)
"""Types of tensors whose ops are known."""

_PROPERTIES = "device dtype is_cpu is_cuda is_leaf is_meta is_nested is_quantized is_sparse itemsize layout ndim"
_METHODS = "__len__ dim element_size get_device is_complex is_contiguous is_floating_point is_signed nelement numel"
DESCRIPTIONS = frozenset(
    [getattr(Tensor, name).__get__ for name in (*_PROPERTIES.split(), "requires_grad", "shape")]
    + [getattr(Tensor, name) for name in (*_METHODS.split(), "size", "stride")]
    + [torch.is_complex, torch.is_floating_point, torch.numel, torch.result_type]
)
"""Functions that describe a tensor without reading its entries."""

_COMPARABLE = (
    *(bool, int, float, complex, str, type(None), type(Ellipsis)),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Value(NamedTuple):
    """What is known of a tensor. It is an attribute of the tensor: C++ hands the same object from op to op."""

    source: object
    """What stands for the pass that made the tensor."""
    number: int
    aliases: list[int]
    """How many tensors share its memory, in a list that they share."""


class Constant(NamedTuple):
    """A tensor that no sample has touched."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def is_like(self, tensor: Tensor, samples: tuple[int, int] | None) -> bool:
        """Return whether a tensor is the same. With `samples` it may be expanded to (before, now) samples."""
        if tensor.dtype is not self.dtype or tensor.stride() != self.stride:
            return False
        return tensor.shape == self.shape or (
            samples is not None
            and len(tensor.shape) == len(self.shape)
            and all(
                now == before or (step == 0 and (before, now) == samples)
                for before, now, step in zip(self.shape, tensor.shape, self.stride, strict=True)
            )
        )


class Sampled(NamedTuple):
    """A tensor that samples have touched."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    axis: int = -1
    """The axis that holds the samples, -1 where the outputs do not depend on the tensor."""
    each: int = 0
    """Entries of that axis for each sample."""

    def is_like(self, tensor: Tensor, samples: int) -> bool:
        """Return whether a tensor is the same but for the number of its samples."""
        axis = self.axis
        if axis < 0:
            return True
        expected = (*self.shape[:axis], self.each * samples, *self.shape[axis + 1 :])
        return tensor.shape == expected and tensor.dtype is self.dtype

    def placed(self, layouts: Mapping[int, Layout]) -> "Sampled":
        """Add the axis that holds the samples."""
        layout = layouts.get(self.number)
        place = None if layout is None else sample_dimension(torch.Size(self.shape), layout)
        if layout is None or place is None:
            return self
        return self._replace(axis=place[0], each=self.shape[place[0]] // layout.samples)


Description = Any
"""An argument or a result: tensors as `Constant` or `Sampled`, containers of such, everything else as it is."""


class TrackedPass:
    """One forward pass whose tensors are marked. `held`: tensors that the model held before the pass."""

    def __init__(self, held: Sequence[Tensor], samples: int) -> None:
        self.held, self.samples = frozenset(map(id, held)), samples
        self._source = object()  # not the pass itself, which would then be freed by the garbage collector alone
        self._held_value = Value(self._source, UNTOUCHED, [2])
        self.is_comparable = True
        """Whether everything that was described can be compared with another pass."""

    def value(self, tensor: Tensor) -> Value | None:
        """Return what is known of a tensor, None if it was made by another pass or by no op."""
        if id(tensor) in self.held:
            return self._held_value
        value: Value | None = getattr(tensor, "_featlearn_value", None)
        return value if value is not None and value.source is self._source else None

    def mark(self, tensor: Tensor, number: int, aliases: list[int]) -> None:
        """Mark a tensor with the value that it holds."""
        if id(tensor) not in self.held:
            tensor._featlearn_value = Value(self._source, number, aliases)  # type: ignore[attr-defined]

    def describe(self, thing: Any) -> Description:
        """Return arguments in a form that can be compared."""
        if isinstance(thing, Tensor):
            value = self.value(thing) if type(thing) in PLAIN else None
            if value is not None and value.number == UNTOUCHED:
                return Constant(tuple(thing.shape), thing.stride(), thing.dtype)
            if value is not None:
                return Sampled(value.number, thing.dtype, tuple(thing.shape))
        elif isinstance(thing, _COMPARABLE) or (type(thing) is slice and _is_plain(thing)):
            return thing
        elif isinstance(thing, tuple | list):
            return [self.describe(part) for part in thing]
        elif type(thing) is dict:
            return {key: self.describe(part) for key, part in thing.items()}
        self.is_comparable = False
        return None

    def describe_result(self, result: Any) -> Description:
        """Return a result in a form that can be compared. What is neither a tensor nor a number is left out."""
        if isinstance(result, tuple | list) and type(result) is not torch.Size:
            return [self.describe_result(part) for part in result]
        return self.describe(result) if isinstance(result, (Tensor, *_COMPARABLE)) else None


def _is_plain(thing: slice) -> bool:
    return all(bound is None or type(bound) is int for bound in (thing.start, thing.stop, thing.step))


@contextmanager
def scripted_code_noted(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` where scripted code runs: it may read numbers in a way that no op shows."""
    before = [kind.__call__ for kind in SCRIPTED_CALLS]

    def noted(call: Any) -> Any:
        def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
            note()
            return call(self, *args, **kwargs)

        return calling

    try:
        for kind, call in zip(SCRIPTED_CALLS, before, strict=True):
            kind.__call__ = noted(call)
        yield
    finally:
        for kind, call in zip(SCRIPTED_CALLS, before, strict=True):
            kind.__call__ = call
