"""Whether a batch makes the same calls of torch as the few samples whose independence was proved.

`featlearn.graph.separation` notes every op of a pass over a few samples, which takes longer than the pass itself. The
same code on another batch makes the same calls of torch: the same functions in the same order, of the same values, with
the same arguments. Then the same ops run, sample by sample. That is much cheaper to see, so it is asked of every batch.
Nothing but the size of the sample axis may differ: also an influence of the number of samples would show.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from featlearn.graph.layout import Layout, sample_dimension
from featlearn.torch_internals import SCRIPTED_CALLS

UNTOUCHED = 0
"""The number of all values that no sample has touched."""
COUNTED = -1
"""The number of values that no sample has touched, but that may depend on how many there are."""
PLAIN = (Tensor, nn.Parameter)

# What a tensor says of itself without being read.
DESCRIPTIONS = frozenset(
    [
        getattr(Tensor, name).__get__
        for name in (
            "device",
            "dtype",
            "is_cpu",
            "is_cuda",
            "is_leaf",
            "is_meta",
            "is_nested",
            "is_quantized",
            "is_sparse",
            "itemsize",
            "layout",
            "ndim",
            "requires_grad",
            "shape",
        )
    ]
    + [
        getattr(Tensor, name)
        for name in (
            "__len__",
            "dim",
            "element_size",
            "get_device",
            "is_complex",
            "is_contiguous",
            "is_floating_point",
            "is_signed",
            "nelement",
            "numel",
            "size",
            "stride",
        )
    ]
    + [torch.is_complex, torch.is_floating_point, torch.numel, torch.result_type]
)
# Their arguments may be sizes, of which the shape of the result tells all.
_SIZED = frozenset([Tensor.expand, Tensor.reshape, Tensor.view, torch.reshape])
# They take a constant that is expanded for every sample entry by entry.
_ENTRYWISE = frozenset(
    [
        torch.cat,
        torch.concat,
        torch.add,
        Tensor.add,
        Tensor.__add__,
        Tensor.__radd__,
        torch.mul,
        Tensor.mul,
        Tensor.__mul__,
        Tensor.__rmul__,
    ]
)
_SIMPLE = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    type(Ellipsis),
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class Value(NamedTuple):
    """What is known of a tensor in a pass. It hangs on the tensor: C++ hands the same one from op to op."""

    source: object
    """The pass that has made it."""
    number: int
    aliases: list[int]
    """How many tensors were made that share its memory, in a list that they share."""


def value_of(tensor: Tensor, source: object) -> Value | None:
    """What this pass knows of a tensor, None if that is nothing."""
    value: Value | None = getattr(tensor, "_featlearn_value", None)
    return value if value is not None and value.source is source else None


def mark(tensor: Tensor, value: Value) -> None:
    """Hang what is known of a tensor on it."""
    tensor._featlearn_value = value  # type: ignore[attr-defined]


class Constant(NamedTuple):
    """A tensor that no sample has touched."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def is_like(self, tensor: Tensor, samples: tuple[int, int] | None) -> bool:
        """Whether a tensor is the same; `samples`: it may be expanded to another number of samples, (before, now)."""
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
    """The axis that holds the samples, -1 where the outputs do not depend on it."""
    each: int = 0
    """Entries of that axis for each sample."""

    def is_like(self, tensor: Tensor, samples: int) -> bool:
        """Whether a tensor is the same but for the number of its samples."""
        axis = self.axis
        if axis < 0:
            return True
        expected = (*self.shape[:axis], self.each * samples, *self.shape[axis + 1 :])
        return tensor.shape == expected and tensor.dtype is self.dtype

    def placed(self, layouts: Mapping[int, Layout]) -> "Sampled":
        """With the axis that holds the samples."""
        layout = layouts.get(self.number)
        found = None if layout is None else sample_dimension(torch.Size(self.shape), layout)
        if layout is None or found is None:
            return self
        return self._replace(axis=found[0], each=self.shape[found[0]] // layout.samples)


Noted = Any
"""An argument or a result: tensors as `Constant` or `Sampled`, containers of such, everything else as it is."""


class Call(NamedTuple):
    """One call of torch."""

    function: Any
    arguments: Noted
    keywords: Noted
    result: Noted
    sampled: bool = False
    """Whether it meets samples."""


class ProvedPass(NamedTuple):
    """The calls of a pass of which it is proved that samples stay apart."""

    samples: int
    inputs: Sequence[Constant | Sampled]
    calls: Sequence[Call]
    outputs: Sampled


class CallNotes:
    """Collects the calls of a pass whose tensors are marked by `source`."""

    def __init__(self, source: object, held: frozenset[int]) -> None:
        self._source, self._held = source, held
        self._calls: list[Call] = []
        self.comparable = True
        """Whether another pass can be compared with this one."""

    def given(self, function: Any, args: Any, kwargs: Any) -> Call:
        """A call before it is made: it may write to its arguments."""
        return Call(function, self.noted(args), self.noted(kwargs), None)

    def add(self, call: Call, result: Any) -> None:
        """Note a call that was made."""
        self._calls.append(call._replace(result=self._noted_result(result)))

    def noted(self, thing: Any) -> Noted:
        """An argument in a form that can be compared."""
        if isinstance(thing, Tensor):
            value = value_of(thing, self._source)
            if id(thing) in self._held or (value is not None and value.number == UNTOUCHED):
                return Constant(tuple(thing.shape), thing.stride(), thing.dtype)
            if value is not None:
                return Sampled(value.number, thing.dtype, tuple(thing.shape))
        elif type(thing) is dict:
            return {key: self.noted(each) for key, each in thing.items()}
        elif isinstance(thing, tuple | list) and type(thing) is not torch.Size:
            return [self.noted(each) for each in thing]
        elif isinstance(thing, _SIMPLE) or (type(thing) is slice and _is_plain_slice(thing)):
            return thing
        self.comparable = False
        return None

    def _noted_result(self, result: Any) -> Noted:
        if isinstance(result, Tensor):
            return self.noted(result)
        if isinstance(result, tuple | list):
            return [self._noted_result(each) for each in result]
        return result if isinstance(result, _SIMPLE) else None

    def proved(self, samples: int, inputs: Noted, outputs: Tensor, layouts: Mapping[int, Layout]) -> ProvedPass | None:
        """The pass, given where its samples lie; None if none can be compared with it."""
        last = self.noted(outputs)
        if not self.comparable:
            return None
        calls = []
        for call in self._calls:
            arguments, keywords, result = (_placed(part, layouts) for part in call[1:4])
            calls.append(Call(call.function, arguments, keywords, result, _has_samples(call)))
        return ProvedPass(samples, _placed(inputs, layouts), calls, last.placed(layouts))


def _is_plain_slice(thing: slice) -> bool:
    return all(each is None or type(each) is int for each in (thing.start, thing.stop, thing.step))


def _has_samples(thing: Noted) -> bool:
    inside = thing.values() if type(thing) is dict else thing if type(thing) in (list, Call) else ()
    return type(thing) is Sampled or any(map(_has_samples, inside))


def _placed(thing: Noted, layouts: Mapping[int, Layout]) -> Noted:
    if type(thing) is Sampled:
        return thing.placed(layouts)
    if type(thing) is dict:
        return {key: _placed(each, layouts) for key, each in thing.items()}
    return [_placed(each, layouts) for each in thing] if type(thing) is list else thing


class RepeatedPass:
    """Follows a pass call by call: is it one that was proved, but for the number of samples?"""

    def __init__(self, proved: ProvedPass, held: Sequence[Tensor], samples: int) -> None:
        self._proved, self._held, self._samples = proved, frozenset(map(id, held)), samples
        self._resized = (proved.samples, samples)
        self._made = 0
        self._same = True

    @contextmanager
    def noting(self, inputs: Sequence[Tensor] = ()) -> Iterator[None]:
        """Follow all calls inside; `inputs` are what the model is given, as copies that nobody else holds."""
        if inputs:
            self._same = self._take(self._proved.inputs, inputs, None)
        with _Calls(self), scripted_code_noted(self.give_up):
            yield

    def give_up(self) -> None:
        """Take this pass for another one."""
        self._same = False

    def holds(self, outputs: Tensor) -> bool:
        """Whether all calls were those of the pass that was proved."""
        complete = self._same and self._made == len(self._proved.calls)
        return complete and self._fits([self._proved.outputs], [outputs], False, None)

    def follow(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compare a call that was made with the next one that is expected."""
        if not self._same or function in DESCRIPTIONS:
            return
        number, calls = self._made, self._proved.calls
        self._made += 1
        if number == len(calls):
            self._same = False
            return
        call = calls[number]
        self._same = call.function == function and (
            self._is_same(call, args, kwargs, result)
            or (not call.sampled and self._is_counted(call, args, kwargs, result))
        )

    def _is_same(self, call: Call, args: Any, kwargs: Any, result: Any) -> bool:
        sized = call.function in _SIZED
        resized = self._resized if sized or call.function in _ENTRYWISE else None
        return (
            len(call.arguments) == len(args)
            and self._all_fit(call.arguments, args, sized, resized)
            and (not (call.keywords or kwargs) or self._fits(call.keywords, kwargs, sized, resized))
            and self._take(call.result, result, self._resized if sized else None)
        )

    def _is_counted(self, call: Call, args: Any, kwargs: Any, result: Any) -> bool:
        """Whether a call on constants, which may depend on the number of samples, has no effect but its result.

        What it gives must not meet samples, and what is read from it must be what was read before.
        """
        given, made = list(_leaves((args, kwargs))), list(_leaves(result))
        if not all(self._is_constant(one) for one in given if isinstance(one, Tensor)):
            return False
        if len(given) != len(list(_leaves((call.arguments, call.keywords)))):
            return False
        tensors = [one for one in made if isinstance(one, Tensor)]
        if not tensors:
            return result is not None and made == list(_leaves(call.result))
        for tensor in tensors:
            if type(tensor) not in PLAIN or id(tensor) in self._held or any(tensor is one for one in given):
                return False  # written to: others may share its memory
            mark(tensor, Value(self, COUNTED, []))
        return len(tensors) == len(made)

    def _fits(self, expected: Noted, found: Any, sized: bool, resized: tuple[int, int] | None) -> bool:
        """Whether a container of arguments is the expected one."""
        if type(expected) is list:
            return _is_alike(expected, found) and self._all_fit(expected, found, sized, resized)
        same = type(found) is dict and found.keys() == expected.keys()
        return same and self._all_fit(expected.values(), [found[key] for key in expected], sized, resized)

    def _all_fit(
        self, expected: Iterable[Noted], found: Iterable[Any], sized: bool, resized: tuple[int, int] | None
    ) -> bool:
        """Whether arguments are the expected ones. `sized`: numbers may differ; `resized`: see `Constant.is_like`."""
        for each, one in zip(expected, found):  # noqa: B905 (equally many)
            kind = type(each)
            if kind is Sampled:
                value = getattr(one, "_featlearn_value", None)
                if value is None or value.source is not self or value.number != each.number or type(one) not in PLAIN:
                    return False
            elif kind is Constant:
                if type(one) not in PLAIN or not self._is_untouched(one) or not each.is_like(one, resized):
                    return False
            elif kind is list or kind is dict:
                if not self._fits(each, one, sized, resized):
                    return False
            elif type(one) is not kind or (one != each and not (sized and kind in (int, torch.Size))):
                return False
        return True

    def _take(self, expected: Noted, made: Any, resized: tuple[int, int] | None) -> bool:
        """Whether a result is the expected one but for the number of samples; its tensors are known from here on."""
        kind = type(expected)
        if kind is Sampled:
            if type(made) not in PLAIN or id(made) in self._held or not expected.is_like(made, self._samples):
                return False
            mark(made, Value(self, expected.number, []))
            return True
        if kind is Constant:
            if type(made) not in PLAIN or not expected.is_like(made, resized):
                return False
            if id(made) not in self._held:
                mark(made, Value(self, UNTOUCHED, []))
            return True
        if kind is list:
            return _is_alike(expected, made) and all(
                self._take(each, one, resized) for each, one in zip(expected, made, strict=True)
            )
        return not isinstance(made, Tensor | tuple | list)

    def _is_constant(self, tensor: Tensor) -> bool:
        value = value_of(tensor, self)
        return id(tensor) in self._held or (value is not None and value.number in (UNTOUCHED, COUNTED))

    def _is_untouched(self, tensor: Tensor) -> bool:
        if id(tensor) in self._held:
            return True
        value = value_of(tensor, self)
        return value is not None and value.number == UNTOUCHED


def _leaves(thing: Any) -> Iterator[Any]:
    """What containers hold."""
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, tuple | list) and type(thing) not in (Constant, torch.Size):
        for each in thing:
            yield from _leaves(each)
    else:
        yield thing


def _is_alike(expected: Sequence[Noted], found: Any) -> bool:
    return isinstance(found, tuple | list) and len(found) == len(expected)


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
