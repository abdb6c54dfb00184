"""What is known of each op: the rule that reads a use of a parameter, and the rule of how samples flow through it.

Rules of uses are registered by autograd node (`MulBackward0`), because users have nodes of their own. Flow rules are
registered by op (`Mul`), because they also hold for ops of a forward pass, which make no node.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from featlearn.errors import InputTypeError, InputValueError
from featlearn.graph.layout import Layout
from featlearn.graph.uses import Use
from featlearn.ops.form import Form

Rule = Callable[[Use], Form | None]
"""Return how the per-sample gradient of a use is made, None if the rule does not cover the case."""


class SampleAxis(NamedTuple):
    """The axis of a tensor that holds the samples: its entries are (outer, samples, inner)."""

    axis: int
    outer: int


class Step(NamedTuple):
    """One operand of one op, and where the samples lie in the op's output."""

    argument: Callable[[str], Any]
    """Return what the op was called with under this name, None if that is not known."""
    output: torch.Size
    """The shape of the output."""
    at: SampleAxis
    """The sample axis of the output."""
    layout: Layout
    """The layout of the output."""
    operand: int
    """The number of the operand among the op's tensors."""
    input: torch.Size
    """The shape of the operand."""

    def dims(self, name: str = "dim") -> list[int]:
        """Return the axes of the operand that an argument names, counted from the front."""
        argument = self.argument(name)
        dims = [] if argument is None else list(argument) if isinstance(argument, tuple | list) else [argument]
        return [signed(dim) % max(len(self.input), 1) for dim in dims]

    def in_axis(self, axis: int) -> Layout | None:
        """Return the operand's layout if its samples lie in this axis as they do in the output's."""
        if not 0 <= axis < len(self.input) or self.input[axis] != self.output[self.at.axis] or not self.input.numel():
            return None
        before = self.input[:axis].numel() * self.at.outer
        return Layout(before, self.layout.samples, self.input.numel() // (before * self.layout.samples))


def signed(dim: int) -> int:
    """Return an axis as it was passed: autograd nodes save negative ones as unsigned numbers."""
    return dim - 2**64 if dim >= 2**63 else dim


FlowRule = Callable[[Step], Layout | None]
"""Return the layout of an operand, None if it has no sample axis or if the op may mix samples."""


class Flow(NamedTuple):
    """A flow rule and what else a proof needs to know of the op."""

    rule: FlowRule
    is_elementwise: bool
    """Whether the in-place version of the op changes the entries of its first operand one by one."""
    gives_pieces: bool
    """Whether the outputs are pieces of the operand, each with the same sample axis."""
    shares_operands: bool
    """Whether an operand without a sample axis acts on all samples in the same way, as a weight does."""


def broadcast(step: Step) -> Layout | None:
    """Entries meet one by one, with axes aligned at the end."""
    return step.in_axis(step.at.axis - len(step.output) + len(step.input))


def first_axis(step: Step) -> Layout | None:
    """Operand 0 holds the samples in its first axis, as the output does. Other operands are weights."""
    return step.in_axis(0) if step.operand == 0 and step.at.axis == 0 else None


_RULES: dict[str, Rule] = {}
_BUILT_IN: dict[str, Rule] = {}
_FLOWS: dict[tuple[str, str], Flow] = {}


def register_rule(*node_names: str, replace: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule that reads uses of a parameter by an op of your own.

    `node_names` are names of autograd nodes as `output.grad_fn.name()` gives them: for a
    `torch.autograd.Function` called `Scale` that is `"ScaleBackward"`. The rule takes a `featlearn.ops.Use` and returns
    a `featlearn.ops.Direct` or `featlearn.ops.Outer`, or None when it does not apply (the use then goes to the exact
    fallback). Your rules are compared with autograd on every batch, and a rule that disagrees is not used. Fetch saved
    tensors when the rule runs, not inside the functions it returns.

    >>> @fl.ops.register_rule("ScaleBackward")
    ... def scale(use):
    ...     x, weight = use.node.saved_tensors  # x (P, T, F), weight (F,)
    ...     return fl.ops.Direct(lambda grad: use.layout.samples_first(grad * x, x.shape[-1]).sum(1))
    """
    if not node_names or not all(isinstance(name, str) and name for name in node_names):
        raise InputTypeError(
            f"register_rule got {node_names!r}, expected names of autograd nodes; "
            'write @register_rule("MyFunctionBackward")'
        )
    for name in node_names:
        if name in _RULES and not replace:
            raise InputValueError(f"a rule for {name!r} is registered already; pass replace=True to replace it")

    def add(rule: Rule) -> Rule:
        if not callable(rule):
            raise InputTypeError(f"register_rule got {rule!r}, expected a function of a featlearn.ops.Use")
        _RULES.update(dict.fromkeys(node_names, rule))
        return rule

    return add


def register_flow(
    *op_names: str,
    elementwise: bool = False,
    pieces: bool = False,
    shares_operands: bool = True,
    only: Literal["forward", "backward"] | None = None,
) -> Callable[[FlowRule], FlowRule]:
    """Register how samples flow through built-in ops. See `Flow` for the flags.

    `op_names` are names of autograd nodes without the ending `Backward0`. An op without a backward pass has the name
    that torch would give it: `logical_and` is `LogicalAnd`. `only`: the rule holds in one of the two passes.
    """

    def add(rule: FlowRule) -> FlowRule:
        flow = Flow(rule, is_elementwise=elementwise, gives_pieces=pieces, shares_operands=shares_operands)
        for kind in ("forward", "backward") if only is None else (only,):
            _FLOWS.update(dict.fromkeys([(kind, name) for name in op_names], flow))
        return rule

    return add


def close_built_in() -> None:
    """Count every rule that is registered from now on as the user's."""
    _BUILT_IN.update(_RULES)


def is_built_in(node_name: str) -> bool:
    """Return whether nodes of this name are read by the library's own rule."""
    return _RULES.get(node_name) is _BUILT_IN.get(node_name)


def rule_for(node_name: str) -> Rule | None:
    """Return the rule for nodes of this name, None if there is none."""
    return _RULES.get(node_name)


def forward_flow(op_name: str) -> Flow | None:
    """Return how samples flow through an op of a forward pass, None if that is not known."""
    return _FLOWS.get(("forward", op_name))


def backward_flow(node_name: str) -> Flow | None:
    """Return how samples flow through the op of an autograd node, None if that is not known."""
    op_name, _, number = node_name.partition("Backward")
    # The node of a user's function has a name without a number.
    return _FLOWS.get(("backward", op_name)) if number.isdigit() else None
