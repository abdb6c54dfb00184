"""Prove that a forward pass treats its samples one by one, from the ops that it runs on this batch.

Every op is recorded below autograd, where values without gradients (masks, indices, constants) are seen as well. The
flow rules of `featlearn.ops` are then followed from the outputs down: row p of the outputs is made from sample p of
every value that samples have touched, and so from row p of the inputs. Values that no sample has touched must be the
same for all samples.

Nothing is proved where an op without a rule meets samples, where a number leaves a tensor for Python (`item`, `tolist`,
`numpy`), where an op fails, or where a tensor is of unknown origin. So the code of a proved pass cannot depend on the
samples, only on their number.

Recording every op takes longer than the pass itself. So a few samples are recorded, and every batch is compared with
them call by call. The same functions of torch in the same order, of the same values, with the same arguments, run the
same ops, sample by sample. Only the size of the sample axis may differ, so an influence of the number of samples shows,
too.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from featlearn.graph.graph import Layout
from featlearn.ops.registry import Flow, forward_flow, operand_layout, sample_axis
from featlearn.torch_internals import SCRIPTED_CALLS, DispatchMode, FunctionOfFunctions, dispatching

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
        elif isinstance(thing, _COMPARABLE) or (type(thing) is slice and _has_plain_bounds(thing)):
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


def _has_plain_bounds(thing: slice) -> bool:
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
    axes: Mapping[int, tuple[int, int]]
    """Number of a value -> its axis that holds the samples, and the entries of each. Others act on no output."""


_SEVERAL = (tuple, list)
_WITHOUT_TENSORS = (
    *(int, float, complex, str, numpy.generic, numpy.ndarray),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
)


class _Operand(NamedTuple):
    number: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Op(NamedTuple):
    """An op that met samples."""

    schema: "_Schema"
    flow: Flow
    arguments: Sequence[Any]
    """What it was called with by position, None in the place of tensors."""
    keywords: Mapping[str, Any]
    operands: Sequence[_Operand]
    outputs: Sequence[tuple[int, torch.Size]]


class SeparationProof(TrackedPass):
    """Record the ops of one forward pass, and prove from them that its samples stay apart.

    `held`: tensors that the model held before the pass. `samples`: rows of every input that has samples.
    """

    def __init__(self, held: Sequence[Tensor], samples: int) -> None:
        super().__init__(held, samples)
        self.calls: list[RecordedCall] = []
        self.reads = 0
        """How many numbers were read from tensors."""
        self.calls_higher_order = False
        """Whether functions of functions ran, like `torch.cond`."""
        self._ops: list[_Op] = []
        self._inputs: list[tuple[int, torch.Size]] = []
        self._described_inputs: list[Description] = []
        self._layouts: dict[int, Layout] = {}
        self._last_number = UNTOUCHED
        self._gave_up = False

    @contextmanager
    def noting(self, inputs: Sequence[Tensor] = ()) -> Iterator[None]:
        """Record all ops inside; `inputs` are what the model is given, as copies that nobody else holds."""
        for tensor in inputs:
            number = UNTOUCHED
            if tensor.dim() and tensor.shape[0] == self.samples:
                number = self._next_number()
                self._inputs.append((number, tensor.shape))
            self.mark(tensor, number, [1])
            self._described_inputs.append(self.describe(tensor))
        with _OpRecorder(self), _ReadingRecorder(self), scripted_code_noted(self.give_up):
            yield

    def give_up(self) -> None:
        """Prove nothing of this pass."""
        self._gave_up = True
        self._ops.clear()

    def holds(self, outputs: Tensor) -> bool:
        """Return whether row p of the outputs is made from row p of the inputs alone, in the same way for every p."""
        value = self.value(outputs)
        if self._gave_up or value is None or value.number == UNTOUCHED:
            return False
        layouts = self._layouts = {value.number: self._rows(outputs.shape)}
        followed = all(_follow(op, layouts) for op in reversed(self._ops))
        rows = [(number, self._rows(shape)) for number, shape in self._inputs]
        return followed and all(layouts.get(number, layout) == layout for number, layout in rows)

    def proved(self, outputs: Tensor) -> ProvedPass | None:
        """Return the calls of this pass, to be compared with other passes; None if nothing is proved."""
        if not self.holds(outputs):
            return None
        described = self.describe(outputs)
        if not self.is_comparable:
            return None
        shapes = {**dict(self._inputs), **dict(output for op in self._ops for output in op.outputs)}
        axes = {}
        for number, layout in self._layouts.items():
            if place := sample_axis(shapes[number], layout):
                axes[number] = place.axis, shapes[number][place.axis] // self.samples
        return ProvedPass(self.samples, self._described_inputs, self.calls, described, axes)

    def record(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record an op that has run."""
        if self._gave_up:
            return
        tensors: list[Tensor] = []
        arguments = [_without_tensors(argument, tensors) for argument in args]
        keywords = {name: _without_tensors(argument, tensors) for name, argument in kwargs.items()}
        values = [value for tensor in tensors if (value := self.value(tensor)) is not None]
        schema = _schema(function)
        if len(values) < len(tensors) and not schema.is_fresh:
            return self.give_up()
        outputs = [result] if isinstance(result, Tensor) else result
        self.reads += not isinstance(outputs, _SEVERAL)
        if all(value.number == UNTOUCHED for value in values):
            for tensor in outputs if isinstance(outputs, _SEVERAL) else ():
                if isinstance(tensor, Tensor):
                    self.mark(tensor, UNTOUCHED, _aliases(schema, values))
        elif schema.flow is not None and _is_ordinary(schema, arguments, tensors, values, outputs):
            operands = [_Operand(v.number, t.shape, t.stride()) for v, t in zip(values, tensors, strict=True)]
            numbers = [(self._next_number(), tensor.shape) for tensor in outputs]
            for tensor, (number, _) in zip(outputs, numbers, strict=True):
                self.mark(tensor, number, _aliases(schema, values))
            self._ops.append(_Op(schema, schema.flow, arguments, keywords, operands, numbers))
        else:
            self.give_up()
        return None

    def explains(self, result: Any) -> bool:
        """Return whether a function gave nothing but tensors that samples have touched, or that are not known."""
        if isinstance(result, Tensor):
            value = self.value(result)
            return value is None or value.number != UNTOUCHED
        return isinstance(result, _SEVERAL) and all(part is None or self.explains(part) for part in result)

    def is_untouched(self, argument: Any) -> bool:
        """Return whether no sample has touched an argument of a function."""
        if isinstance(argument, Tensor):
            value = self.value(argument)
            return value is not None and value.number == UNTOUCHED
        if isinstance(argument, _SEVERAL):
            return all(map(self.is_untouched, argument))
        if isinstance(argument, slice):
            return all(map(self.is_untouched, (argument.start, argument.stop, argument.step)))
        return argument is None or argument is ... or isinstance(argument, _WITHOUT_TENSORS)

    def count_alias(self, arguments: Sequence[Any]) -> None:
        """Count what was made of these, like an array, among what shares their memory."""
        for argument in arguments:
            if isinstance(argument, Tensor) and (value := self.value(argument)) is not None:
                value.aliases[0] += 1

    def _rows(self, shape: torch.Size) -> Layout:
        return Layout(1, self.samples, shape.numel() // self.samples)

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number


def _follow(op: _Op, layouts: dict[int, Layout]) -> bool:
    """Add where the samples lie in all operands of an op, from where they lie in its outputs; False if that fails."""
    used = [k for k, (number, _) in enumerate(op.outputs) if number in layouts]
    if used not in ([], [0]) and not op.flow.gives_pieces:
        return False
    if not used:
        return not op.schema.may_fail
    argument = {**op.schema.defaults, **dict(zip(op.schema.names, op.arguments, strict=False)), **op.keywords}.get
    placed = [(shape, layouts[number]) for number, shape in (op.outputs[k] for k in used)]
    for k, operand in enumerate(op.operands):
        layout = operand_layout(op.flow, argument, placed, k, operand.shape)
        if operand.number == UNTOUCHED:
            place = None if layout is None else sample_axis(operand.shape, layout)
            # One entry for all samples, expanded.
            is_uniform = place is not None and operand.stride[place.axis] == 0
            if not (op.flow.shares_operands if layout is None else is_uniform):
                return False
        elif layout is None or layouts.setdefault(operand.number, layout) != layout:
            return False
    return True


def _without_tensors(argument: Any, tensors: list[Tensor]) -> Any:
    """Return an argument without its tensors, which are added to `tensors`: to hold them would take memory.

    In lists an ellipsis stands for each.
    """
    if isinstance(argument, Tensor):
        tensors.append(argument)
        return None
    if isinstance(argument, _SEVERAL) and any(isinstance(part, Tensor) for part in argument):
        tensors += [part for part in argument if isinstance(part, Tensor)]
        return [... if isinstance(part, Tensor) else part for part in argument]
    return argument


def _is_ordinary(
    schema: "_Schema", arguments: Sequence[Any], tensors: list[Tensor], values: list[Value], outputs: Any
) -> bool:
    """Return whether the tensors of an op are plain, and whether what it writes to is seen by no other tensor."""
    if (
        (schema.writes_where is not None and arguments[schema.writes_where])
        or not isinstance(outputs, _SEVERAL)
        or not all(map(_is_plain, tensors))
        or not all(map(_is_plain, outputs))
    ):
        return False
    # Another tensor in the same memory would change without an op of its own.
    return not schema.writes or (schema.in_place and values[0].aliases == [1])


def _aliases(schema: "_Schema", values: list[Value]) -> list[int]:
    """Return what counts the tensors that share memory with the output of an op."""
    if not values or not (schema.is_view or schema.writes):
        return [1]
    for value in values:
        value.aliases[0] += schema.is_view
    return values[0].aliases


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested


class _Schema(NamedTuple):
    """What the name and the schema of an op say."""

    flow: Flow | None
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    writes: bool
    writes_where: int | None
    """The argument with which it writes to its operands, though its schema does not say so."""
    in_place: bool
    """Whether it changes the entries of its first operand one by one."""
    is_view: bool
    is_fresh: bool
    """Whether it makes a tensor of numbers in the code."""
    may_fail: bool
    """Whether it fails depends on values, and code may ask for nothing else of it."""


_INDEXING = frozenset(["Embedding", "Gather", "Index", "IndexAdd", "IndexSelect", "Scatter", "ScatterAdd"])
"""Ops that fail for an index out of range."""


@lru_cache(maxsize=1024)
def _schema(function: Any) -> _Schema:
    name, schema = function._schema.name.partition("::")[2], function._schema
    op_name = re.sub(r"(?:^|_|(?<=\d))([a-z])", lambda letter: letter[1].upper(), name.strip("_"))
    flow = forward_flow(op_name) if function.namespace == "aten" else None
    written = [k for k, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write]
    names = [argument.name for argument in schema.arguments]
    returns_alias = any(result.alias_info for result in schema.returns)
    return _Schema(
        flow=flow,
        names=tuple(argument.name for argument in schema.arguments if not argument.kwarg_only),
        defaults={each.name: each.default_value for each in schema.arguments if each.has_default_value()},
        writes=bool(schema.is_mutable),
        writes_where=names.index("training") if "training" in names and "BatchNorm" in op_name else None,
        in_place=written == [0] and name.endswith("_") and flow is not None and flow.writes_entries,
        is_view=op_name == "Set" or (not schema.is_mutable and (returns_alias or op_name == "UnsafeView")),
        is_fresh=op_name == "LiftFresh",
        may_fail=op_name in _INDEXING or "mode" in schema.overload_name,  # division of integers
    )


class _OpRecorder(DispatchMode):
    """Record every op below autograd."""

    def __init__(self, proof: SeparationProof) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._proof = proof


def _recorded(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    try:
        result = func(*args, **(kwargs or {}))
    except Exception:  # for which the code may have another way
        self._proof.give_up()
        raise
    self._proof.record(func, args, kwargs or {}, result)
    return result


dispatching(_OpRecorder, _recorded)


# They call code of others, and what that reads is not seen inside of them.
_CALLING_BACK = {functional.triplet_margin_with_distance_loss, torch.autograd.backward, torch.autograd.grad}
_CALLING_BACK |= {Tensor.apply_, Tensor.backward, Tensor.map_, Tensor.map2_}


class _ReadingRecorder(TorchFunctionMode):
    """Give a proof up where anything but recorded tensors is made of a tensor.

    No op shows `tolist`, `numpy`, and what `torch.tensor` makes of a list.
    """

    def __init__(self, proof: SeparationProof) -> None:
        super().__init__()
        self._proof = proof

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        proof, named = self._proof, kwargs or {}
        if func in DESCRIPTIONS:
            return func(*args, **named)
        proof.calls_higher_order |= isinstance(func, FunctionOfFunctions)
        described, reads = proof.describe((args, named)), proof.reads  # before the call, which may write to them
        try:
            result = func(*args, **named)
        except Exception:
            proof.give_up()
            raise
        if func in _CALLING_BACK or (type(func) is FunctionType and func.__module__.partition(".")[0] != "torch"):
            proof.give_up()
        elif not proof.explains(result) and func is not Tensor.__iter__:
            arguments = (*args, *named.values())
            if not all(map(proof.is_untouched, arguments)):
                proof.give_up()
            elif not isinstance(result, Tensor):
                proof.count_alias(arguments)
        if isinstance(result, Tensor | tuple | list):  # what it has done may follow from numbers that it has read
            proof.is_comparable &= proof.reads == reads
        proof.calls.append(RecordedCall(func, described, proof.describe_result(result)))
        return result


# Their arguments may be sizes, which all show in the shape of the result.
_SIZED = frozenset([Tensor.expand, Tensor.new_ones, Tensor.new_zeros, Tensor.reshape, Tensor.view, torch.reshape])
# They may take a constant that is expanded, so that every sample meets the same entries.
_ENTRY_BY_ENTRY = {torch.cat, torch.concat, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_ENTRY_BY_ENTRY |= {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
_ENTRY_BY_ENTRY |= {torch.gather, Tensor.gather, torch.scatter, Tensor.scatter, Tensor.scatter_}
_ENTRY_BY_ENTRY |= {torch.scatter_add, Tensor.scatter_add, Tensor.scatter_add_}


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
        resized = self._resized if sized or call.function in _ENTRY_BY_ENTRY else None
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
            if type(made) not in PLAIN or id(made) in self.held or not self._is_resized(expected, made):
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

    def _is_resized(self, expected: Sampled, tensor: Tensor) -> bool:
        """Return whether a tensor is the expected one but for the number of its samples."""
        if (place := self._proved.axes.get(expected.number)) is None:
            return True
        axis, each = place
        shape = (*expected.shape[:axis], each * self.samples, *expected.shape[axis + 1 :])
        return tensor.shape == shape and tensor.dtype is expected.dtype

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
