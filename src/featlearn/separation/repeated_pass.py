"""Compare a pass over a batch, call by call, with a pass over a few samples whose separation was proved.

Recording every op takes longer than the pass itself. The same code on another batch makes the same calls of torch: the
same functions in the same order, of the same values, with the same arguments. Then the same ops run, sample by sample.
Calls are much cheaper to compare than ops, so every batch is compared. Only the size of the sample axis may differ, so
an influence of the number of samples shows, too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from featlearn.graph.graph import Layout
from featlearn.ops.registry import sample_axis
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
        place = None if layout is None else sample_axis(torch.Size(self.shape), layout)
        if layout is None or place is None:
            return self
        return self._replace(axis=place.axis, each=self.shape[place.axis] // layout.samples)


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


# Their arguments may be sizes, which all show in the shape of the result.
_SIZED = frozenset([Tensor.expand, Tensor.reshape, Tensor.view, torch.reshape])
# They take a constant that is expanded for every sample entry by entry.
_ELEMENTWISE = {torch.cat, torch.concat, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_ELEMENTWISE |= {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}


class RecordedCall(NamedTuple):
    """One call of torch."""

    function: Any
    arguments: Description
    """By position and by name."""
    result: Description


class ProvedPass(NamedTuple):
    """The calls of a pass of which it is proved that samples stay apart."""

    samples: int
    inputs: Sequence[Constant | Sampled]
    calls: Sequence[RecordedCall]
    outputs: Sampled


class RepeatedPass(TrackedPass):
    """Follow a pass call by call: does it repeat a proved one, but for the number of samples?"""

    def __init__(self, proved: ProvedPass, held: Sequence[Tensor], samples: int) -> None:
        super().__init__(held, samples)
        self._proved = proved
        self._resized = (proved.samples, samples)
        self._made = 0
        self._is_same = True

    @contextmanager
    def noting(self, inputs: Sequence[Tensor] = ()) -> Iterator[None]:
        """Follow all calls inside; `inputs` are what the model is given, as copies that nobody else holds."""
        if inputs:
            self._is_same = self._accept(self._proved.inputs, inputs, None)
        with _Calls(self), scripted_code_noted(self.give_up):
            yield

    def give_up(self) -> None:
        """Count this pass as another one."""
        self._is_same = False

    def holds(self, outputs: Tensor) -> bool:
        """Return whether all calls were those of the proved pass."""
        is_complete = self._is_same and self._made == len(self._proved.calls)
        return is_complete and self._fits(self._proved.outputs, outputs)

    def follow(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compare a call that was made with the next one that is expected."""
        if not self._is_same or function in DESCRIPTIONS:
            return
        number, calls = self._made, self._proved.calls
        self._made += 1
        self._is_same = (
            number < len(calls)
            and calls[number].function == function
            and (
                self._repeats(calls[number], args, kwargs, result)
                or self._is_counted(calls[number], args, kwargs, result)
            )
        )

    def _repeats(self, call: RecordedCall, args: Any, kwargs: Any, result: Any) -> bool:
        sized = call.function in _SIZED
        resized = self._resized if sized or call.function in _ELEMENTWISE else None
        return self._fits(call.arguments, (args, kwargs), sized, resized) and self._accept(
            call.result, result, self._resized if sized else None
        )

    def _fits(
        self, expected: Description, actual: Any, sized: bool = False, resized: tuple[int, int] | None = None
    ) -> bool:
        """Return whether arguments are the expected ones. `sized`: numbers may differ. `resized`: see `Constant`."""
        kind = type(expected)
        if kind is Sampled or kind is Constant:
            value = self.value(actual) if type(actual) in PLAIN else None
            if value is None or value.number != (expected.number if kind is Sampled else UNTOUCHED):
                return False
            return kind is Sampled or bool(expected.is_like(actual, resized))
        if kind is dict:
            if type(actual) is not dict or expected.keys() != actual.keys():
                return False
            expected, actual = [*expected.values()], [actual[key] for key in expected]
        elif kind is not list:
            return type(actual) is kind and bool(expected == actual or (sized and kind in (int, torch.Size)))
        if not isinstance(actual, tuple | list) or len(expected) != len(actual):
            return False
        pairs = zip(expected, actual, strict=True)
        return all(self._fits(part, one, sized, resized) for part, one in pairs)

    def _accept(self, expected: Description, made: Any, resized: tuple[int, int] | None) -> bool:
        """Return whether a result is the expected one but for the number of samples, and mark its tensors."""
        kind = type(expected)
        if kind is Sampled:
            if type(made) not in PLAIN or id(made) in self.held or not expected.is_like(made, self.samples):
                return False
            self.mark(made, expected.number, [])
            return True
        if kind is Constant:
            if type(made) not in PLAIN or not expected.is_like(made, resized):
                return False
            self.mark(made, UNTOUCHED, [])
            return True
        if kind is list:
            return (
                isinstance(made, tuple | list)
                and len(made) == len(expected)
                and all(self._accept(part, one, resized) for part, one in zip(expected, made, strict=True))
            )
        return not isinstance(made, Tensor | tuple | list)

    def _is_counted(self, call: RecordedCall, args: Any, kwargs: Any, result: Any) -> bool:
        """Return whether a call on constants, which may depend on the number of samples, has no effect but its result.

        The result must not meet samples, and what is read from it must be what was read before.
        """
        arguments, made = list(_leaves((args, kwargs))), list(_leaves(result))
        if any(type(leaf) is Sampled for leaf in _leaves((call.arguments, call.result))):
            return False
        if not all(self._is_constant(leaf) for leaf in arguments if isinstance(leaf, Tensor)):
            return False
        if len(arguments) != len(list(_leaves(call.arguments))):
            return False
        tensors = [leaf for leaf in made if isinstance(leaf, Tensor)]
        if not tensors:
            return result is not None and made == list(_leaves(call.result))
        for tensor in tensors:
            if type(tensor) not in PLAIN or id(tensor) in self.held or any(tensor is leaf for leaf in arguments):
                return False  # written to: others may share its memory
            self.mark(tensor, COUNTED, [])
        return len(tensors) == len(made)

    def _is_constant(self, tensor: Tensor) -> bool:
        value = self.value(tensor)
        return value is not None and value.number in (UNTOUCHED, COUNTED)


def _leaves(thing: Any) -> Iterator[Any]:
    """Yield what containers hold."""
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, tuple | list) and type(thing) not in (Constant, Sampled, torch.Size):
        for part in thing:
            yield from _leaves(part)
    else:
        yield thing


class _Calls(TorchFunctionMode):
    def __init__(self, followed: RepeatedPass) -> None:
        super().__init__()
        self._followed = followed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except Exception:  # for which the code may have another way
            self._followed.give_up()
            raise
        self._followed.follow(func, args, kwargs or {}, result)
        return result
