"""Read the uses of parameters by the rules of their ops."""

from typing import NamedTuple

from featlearn.graph.graph import Edge, Graph, Value
from featlearn.graph.layout import Layout
from featlearn.graph.uses import Use
from featlearn.ops.form import Direct, Form, Outer
from featlearn.ops.registry import rule_for


class Reading(NamedTuple):
    """One use, as its rule reads it."""

    value: Value
    """The operand: an output of a node without samples, or the parameter's own leaf."""
    use: Use
    form: Form


def read_use(graph: Graph, edge: Edge, layout: Layout | None, several_outputs: bool) -> Reading | str:
    """Read one use, or return why it cannot be read."""
    node, name = edge.consumer, graph.names[edge.consumer]
    rule = rule_for(name)
    if rule is None:
        return f"no rule for {name}"
    if several_outputs or layout is None:
        return f"{name} has several outputs" if several_outputs else f"{name} has no sample axis"
    (output, dtype), (shape, operand_dtype) = graph.described[node][0], graph.described[edge.value[0]][edge.value[1]]
    if dtype.is_complex or operand_dtype.is_complex:
        return f"{name} is complex"
    use = Use(node, edge.operand, shape, output, layout)
    try:
        form: Form | None = rule(use)
    except Exception as error:  # a rule may be the user's
        return f"the rule for {name} fails: {type(error).__name__}: {error}"
    if form is None:
        return f"the rule for {name} does not cover this case"
    if isinstance(form, Outer | Direct):
        return Reading(edge.value, use, form)
    return f"the rule for {name} gives {type(form).__name__}, expected Outer, Direct or None"  # type: ignore[unreachable]
