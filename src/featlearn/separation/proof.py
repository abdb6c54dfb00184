"""Prove that a forward pass treats its samples one by one, from the ops that it runs on this batch.

Every op is recorded below autograd, where values without gradients (masks, indices, constants) are seen as well. The
flow rules of `featlearn.ops` are then followed from the outputs down: row p of the outputs is made from sample p of
every value that samples have touched, and so from row p of the inputs. Values that no sample has touched must be the
same for all samples.

Nothing is proved where an op without a rule meets samples, where a number leaves a tensor for Python (`item`, `tolist`,
`numpy`), where an op fails, or where a tensor is of unknown origin. So the code of a proved pass cannot depend on the
samples, only on their number.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from featlearn.graph.graph import Layout
from featlearn.ops.registry import Flow, forward_flow, operand_layout, sample_axis
from featlearn.separation.repeated_pass import (
    DESCRIPTIONS,
    PLAIN,
    UNTOUCHED,
    Description,
    ProvedPass,
    RecordedCall,
    Sampled,
    TrackedPass,
    Value,
    scripted_code_noted,
)
from featlearn.torch_internals import DispatchMode, FunctionOfFunctions, dispatching

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
        self._inputs: list[tuple[int, Layout]] = []
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
                self._inputs.append((number, self._rows(tensor.shape)))
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
        return followed and all(layouts.get(number, layout) == layout for number, layout in self._inputs)

    def proved(self, outputs: Tensor) -> ProvedPass | None:
        """Return the calls of this pass, to be compared with other passes; None if nothing is proved."""
        if not self.holds(outputs):
            return None
        described = self.describe(outputs)
        if not self.is_comparable:
            return None
        layouts = self._layouts
        calls = [call._replace(result=_placed(call.result, layouts)) for call in self.calls]
        return ProvedPass(self.samples, _placed(self._described_inputs, layouts), calls, _placed(described, layouts))

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


def _placed(described: Description, layouts: Mapping[int, Layout]) -> Description:
    """Add the axis that holds the samples to every tensor of a description."""
    if type(described) is Sampled:
        return described.placed(layouts)
    return [_placed(part, layouts) for part in described] if type(described) is list else described


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
            if not (op.flow.shares_operands if layout is None else _is_uniform(operand, layout)):
                return False
        elif layout is None or layouts.setdefault(operand.number, layout) != layout:
            return False
    return True


def _is_uniform(operand: _Operand, layout: Layout) -> bool:
    """Return whether a value is one entry for all samples, expanded."""
    place = sample_axis(operand.shape, layout)
    return place is not None and operand.stride[place.axis] == 0


def _without_tensors(argument: Any, tensors: list[Tensor]) -> Any:
    """Return an argument without its tensors, which are added to `tensors`: to hold them would take memory."""
    if isinstance(argument, Tensor):
        tensors.append(argument)
        return None
    if isinstance(argument, _SEVERAL) and any(isinstance(part, Tensor) for part in argument):
        tensors += [part for part in argument if isinstance(part, Tensor)]
        return None
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
        in_place=written == [0] and name.endswith("_") and flow is not None and flow.is_elementwise,
        is_view=op_name == "Set" or (not schema.is_mutable and (returns_alias or op_name == "UnsafeView")),
        is_fresh=op_name == "LiftFresh",
        may_fail=op_name in ("Embedding", "Gather") or "mode" in schema.overload_name,  # division of integers
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
