"""Whether a forward pass treats its samples one by one, proved from the ops it runs on this very batch.

Every op is noted below autograd, where values without gradients (masks, indices, constants) are seen as well. The rules
of `featlearn.graph.sample_flow` are then followed from the outputs down: row p of the outputs is made from sample p of
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

from featlearn.graph import sample_flow
from featlearn.graph.layout import Layout, sample_dimension
from featlearn.graph.repeated_pass import (
    DESCRIPTIONS,
    PLAIN,
    UNTOUCHED,
    CallNotes,
    ProvedPass,
    Value,
    mark,
    scripted_code_noted,
    value_of,
)
from featlearn.graph.sample_flow import PIECES, RULES, Rule, SampleAxis, Step, broadcast, images, same_elements
from featlearn.torch_internals import DispatchMode, FunctionOfFunctions, dispatching, node_with

_SEVERAL = (tuple, list)
_SIMPLE = (
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    numpy.generic,
    numpy.ndarray,
)


class _Operand(NamedTuple):
    number: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Op(NamedTuple):
    """An op that met samples."""

    facts: "_Facts"
    arguments: Sequence[Any]
    """What it was called with by position, None in the place of tensors."""
    keywords: Mapping[str, Any]
    operands: Sequence[_Operand]
    outputs: Sequence[tuple[int, torch.Size]]


class SeparationProof:
    """Notes the ops of one forward pass, and says whether they keep its samples apart.

    `held`: tensors that the model held before the pass. `samples`: rows of every input that has samples.
    """

    def __init__(self, held: Sequence[Tensor], samples: int) -> None:
        self._held, self._samples = frozenset(map(id, held)), samples
        self.calls = CallNotes(self, self._held)
        self.reads = 0
        """How many numbers were read from tensors."""
        self.calls_higher_order = False
        """Whether functions of functions ran, like `torch.cond`."""
        self._ops: list[_Op] = []
        self._given: list[Any] = []
        self._layouts: dict[int, Layout] = {}
        self._inputs: list[tuple[int, Layout]] = []
        self._numbers = UNTOUCHED
        self._gave_up = False

    @contextmanager
    def noting(self, inputs: Sequence[Tensor] = ()) -> Iterator[None]:
        """Note all ops inside; `inputs` are what the model is given, as copies that nobody else holds."""
        for tensor in inputs:
            number = UNTOUCHED
            if tensor.dim() and tensor.shape[0] == self._samples:
                number = self._next_number()
                self._inputs.append((number, self._rows(tensor.shape)))
            self._mark(tensor, number, [1])
            self._given.append(self.calls.noted(tensor))
        with _OpNotes(self), _ReadingNotes(self), scripted_code_noted(self.give_up):
            yield

    def give_up(self) -> None:
        """Prove nothing of this pass."""
        self._gave_up = True
        self._ops.clear()

    def holds(self, outputs: Tensor) -> bool:
        """Whether row p of the outputs is made from row p of the inputs alone, and in the same way for every p."""
        value = self._value(outputs)
        if self._gave_up or value is None or value.number == UNTOUCHED:
            return False
        layouts = self._layouts = {value.number: self._rows(outputs.shape)}
        followed = all(_follow(op, layouts) for op in reversed(self._ops))
        return followed and all(layouts.get(number, layout) == layout for number, layout in self._inputs)

    def proved(self, outputs: Tensor) -> ProvedPass | None:
        """The pass, to be compared with others, if the proof holds."""
        return self.calls.proved(self._samples, self._given, outputs, self._layouts) if self.holds(outputs) else None

    def note(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note an op that has run."""
        if self._gave_up:
            return
        tensors: list[Tensor] = []
        arguments = [_put_aside(each, tensors) for each in args]
        keywords = {name: _put_aside(each, tensors) for name, each in kwargs.items()}
        values = [value for tensor in tensors if (value := self._value(tensor)) is not None]
        facts = _facts(function)
        if len(values) < len(tensors) and not facts.is_fresh:
            return self.give_up()
        made = [result] if isinstance(result, Tensor) else result
        self.reads += not isinstance(made, _SEVERAL)
        if all(value.number == UNTOUCHED for value in values):
            for tensor in made if isinstance(made, _SEVERAL) else ():
                if isinstance(tensor, Tensor):
                    self._mark(tensor, UNTOUCHED, _aliases(facts, values))
        elif _is_listed(facts, arguments, tensors, values, made):
            operands = [_Operand(v.number, t.shape, t.stride()) for v, t in zip(values, tensors, strict=True)]
            outputs = [(self._next_number(), tensor.shape) for tensor in made]
            for tensor, (number, _) in zip(made, outputs, strict=True):
                self._mark(tensor, number, _aliases(facts, values))
            self._ops.append(_Op(facts, arguments, keywords, operands, outputs))
        else:
            self.give_up()
        return None

    def explains(self, result: Any) -> bool:
        """Whether all that a function gave are tensors that samples have touched, or that are not known."""
        if isinstance(result, Tensor):
            value = self._value(result)
            return value is None or value.number != UNTOUCHED
        return isinstance(result, _SEVERAL) and all(one is None or self.explains(one) for one in result)

    def is_untouched(self, argument: Any) -> bool:
        """Whether no sample has touched what a function was given."""
        if isinstance(argument, Tensor):
            value = self._value(argument)
            return value is not None and value.number == UNTOUCHED
        if isinstance(argument, _SEVERAL):
            return all(map(self.is_untouched, argument))
        if isinstance(argument, slice):
            return all(map(self.is_untouched, (argument.start, argument.stop, argument.step)))
        return argument is None or argument is ... or isinstance(argument, _SIMPLE)

    def hand_out(self, arguments: Sequence[Any]) -> None:
        """Count what was made of these, like an array, among what shares their memory."""
        for argument in arguments:
            if isinstance(argument, Tensor) and (value := self._value(argument)) is not None:
                value.aliases[0] += 1

    def _mark(self, tensor: Tensor, number: int, aliases: list[int]) -> None:
        if id(tensor) not in self._held:
            mark(tensor, Value(self, number, aliases))

    def _value(self, tensor: Tensor) -> Value | None:
        """What is known of a tensor, None if that is nothing: another pass, or no op, has made it."""
        return Value(self, UNTOUCHED, [2]) if id(tensor) in self._held else value_of(tensor, self)

    def _rows(self, shape: torch.Size) -> Layout:
        return Layout(1, self._samples, shape.numel() // self._samples)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers


def _follow(op: _Op, layouts: dict[int, Layout]) -> bool:
    """Add where the samples lie in all that an op takes, from where they lie in what it gives; False if that fails."""
    used = [k for k, (number, _) in enumerate(op.outputs) if number in layouts]
    if used not in ([], [0]) and not op.facts.gives_pieces:
        return False
    if not used:
        return not op.facts.may_fail
    named = {**op.facts.defaults, **dict(zip(op.facts.names, op.arguments, strict=False)), **op.keywords}
    node = node_with(named)
    for number, shape in (op.outputs[k] for k in used):
        found = sample_dimension(shape, layouts[number])
        if found is None:
            return False
        for k, operand in enumerate(op.operands):
            assert op.facts.rule is not None
            step = Step(node, shape, SampleAxis(*found), layouts[number], k, operand.shape)
            layout = op.facts.rule(step)
            if operand.number == UNTOUCHED:
                if not (op.facts.has_shared_operands if layout is None else _is_uniform(operand, layout)):
                    return False
            elif layout is None or layouts.setdefault(operand.number, layout) != layout:
                return False
    return True


def _is_uniform(operand: _Operand, layout: Layout) -> bool:
    """Whether a value is one entry for all samples, expanded."""
    found = sample_dimension(operand.shape, layout)
    return found is not None and operand.stride[found[0]] == 0


def _put_aside(argument: Any, tensors: list[Tensor]) -> Any:
    """An argument without tensors, which are added to the others: to hold them would take memory."""
    if isinstance(argument, Tensor):
        tensors.append(argument)
        return None
    if isinstance(argument, _SEVERAL) and any(isinstance(one, Tensor) for one in argument):
        tensors += [one for one in argument if isinstance(one, Tensor)]
        return None
    return argument


def _is_listed(
    facts: "_Facts", arguments: Sequence[Any], tensors: list[Tensor], values: list[Value], made: Any
) -> bool:
    """Whether there is a rule for such an op, and nothing about its tensors is out of the ordinary."""
    if (
        facts.rule is None
        or (facts.writes_where is not None and arguments[facts.writes_where])
        or not isinstance(made, _SEVERAL)
        or not all(map(_is_plain, tensors))
        or not all(map(_is_plain, made))
    ):
        return False
    # Another tensor in the same memory would change without an op of its own.
    return not facts.writes or (facts.in_place and values[0].aliases == [1])


def _aliases(facts: "_Facts", values: list[Value]) -> list[int]:
    """What the output of an op shares memory with."""
    if not values or not (facts.is_view or facts.writes):
        return [1]
    for value in values:
        value.aliases[0] += facts.is_view
    return values[0].aliases


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested


class _Facts(NamedTuple):
    """What the name and the schema of an op say."""

    rule: Rule | None
    gives_pieces: bool
    has_shared_operands: bool
    """Whether operands without a sample axis are the same for all samples."""
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    writes: bool
    writes_where: int | None
    """The argument with which it writes to its operands, though its schema does not say so."""
    in_place: bool
    """It changes the entries of its first operand one by one."""
    is_view: bool
    is_fresh: bool
    """It makes a tensor of numbers in the code."""
    may_fail: bool
    """Whether it fails depends on values, and code may ask for nothing else of it."""


# They choose by value, draw random numbers, take strides, or an index: that is no operand to a backward pass.
_EXCLUDED = frozenset(["Index", "IndexSelect", "NativeDropout", "ReshapeAlias", "Sort", "Topk"])


def _rows_of_indices(step: Step) -> Layout | None:
    """Embedding: (indices..., width) from a table, operand 0, and indices."""
    return step.in_axis(step.at.axis) if step.operand == 1 else None


def _batch_of_attention(step: Step) -> Layout | None:
    """Keys of constants may have fewer heads than queries: nothing is known of samples that lie among the heads."""
    return sample_flow.attention(step) if step.at.axis == 0 else None


# Ops without a backward pass, with one of another name, or of which less is known than of the backward pass.
_FORWARD_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "BitwiseAnd",
            "BitwiseNot",
            "BitwiseOr",
            "Ceil",
            "Eq",
            "Floor",
            "Ge",
            "Gt",
            "Isfinite",
            "Isinf",
            "Isnan",
            "Le",
            "LogSigmoidForward",
            "LogicalAnd",
            "LogicalNot",
            "LogicalOr",
            "Lt",
            "Ne",
            "OnesLike",
            "Round",
            "Sign",
            "Trunc",
            "ZerosLike",
        ),
        broadcast,
    ),
    "Detach": same_elements,
    "Embedding": _rows_of_indices,
    "NativeBatchNormLegitNoTraining": images,
    **dict.fromkeys((kind for kind in RULES if kind.startswith("ScaledDotProduct")), _batch_of_attention),
}


@lru_cache(maxsize=1024)
def _facts(function: Any) -> _Facts:
    name, schema = function._schema.name.partition("::")[2], function._schema
    kind = re.sub(r"(?:^|_|(?<=\d))([a-z])", lambda found: found[1].upper(), name.strip("_"))
    rule = None if kind in _EXCLUDED else _FORWARD_RULES.get(kind) or RULES.get(kind)
    if function.namespace != "aten":
        rule = None
    written = [k for k, each in enumerate(schema.arguments) if each.alias_info and each.alias_info.is_write]
    names = [each.name for each in schema.arguments]
    returned = any(each.alias_info for each in schema.returns)
    return _Facts(
        rule,
        kind in PIECES,
        rule is not sample_flow.along_another_axis,
        tuple(each.name for each in schema.arguments if not each.kwarg_only),
        {each.name: each.default_value for each in schema.arguments if each.has_default_value()},
        bool(schema.is_mutable),
        names.index("training") if "training" in names and "BatchNorm" in kind else None,  # running statistics
        written == [0] and name.endswith("_") and rule is broadcast,
        kind == "Set" or (not schema.is_mutable and (returned or kind == "UnsafeView")),
        kind == "LiftFresh",
        kind in ("Embedding", "Gather") or "mode" in schema.overload_name,  # division of integers
    )


class _OpNotes(DispatchMode):
    """Notes every op below autograd."""

    def __init__(self, proof: SeparationProof) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._proof = proof


def _noted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    try:
        result = func(*args, **(kwargs or {}))
    except Exception:  # for which the code may have another way
        self._proof.give_up()
        raise
    self._proof.note(func, args, kwargs or {}, result)
    return result


dispatching(_OpNotes, _noted)


_UNSEEN = frozenset(
    [
        Tensor.apply_,
        Tensor.map_,
        Tensor.map2_,
        Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
        functional.triplet_margin_with_distance_loss,
    ]
)
"""They call code of others, and what that reads is not noted inside of them."""


class _ReadingNotes(TorchFunctionMode):
    """Gives a proof up where anything but noted tensors is made of a tensor: no op shows `tolist`, `numpy`, and what
    `torch.tensor` makes of a list."""

    def __init__(self, proof: SeparationProof) -> None:
        super().__init__()
        self._proof = proof

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        proof, named = self._proof, kwargs or {}
        if func in DESCRIPTIONS:
            return func(*args, **named)
        proof.calls_higher_order |= isinstance(func, FunctionOfFunctions)
        call, reads = proof.calls.given(func, args, named), proof.reads
        try:
            result = func(*args, **named)
        except Exception:
            proof.give_up()
            raise
        if func in _UNSEEN or (type(func) is FunctionType and func.__module__.partition(".")[0] != "torch"):
            proof.give_up()
        elif not proof.explains(result) and func is not Tensor.__iter__:
            given = (*args, *named.values())
            if not all(map(proof.is_untouched, given)):
                proof.give_up()
            elif not isinstance(result, Tensor):
                proof.hand_out(given)
        if isinstance(result, Tensor | tuple | list):  # what it has done may follow from numbers that it has read
            proof.calls.comparable &= proof.reads == reads
        proof.calls.add(call, result)
        return result
