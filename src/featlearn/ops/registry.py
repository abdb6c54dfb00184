"""The table of rules: autograd node name -> how a use by that node is read."""

from collections.abc import Callable

from featlearn.errors import InputTypeError, InputValueError
from featlearn.graph.uses import Use
from featlearn.ops.form import Form

Rule = Callable[[Use], Form | None]

_RULES: dict[str, Rule] = {}


def register_rule(*node_names: str, replace: bool = False) -> Callable[[Rule], Rule]:
    """Teach featlearn to read uses of a parameter by an op of your own.

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
        for name in node_names:
            _RULES[name] = rule
        return rule

    return add


_BUILT_IN: dict[str, Rule] = {}


def close_built_in() -> None:
    """From here on, rules are the user's."""
    _BUILT_IN.update(_RULES)


def is_built_in(node_name: str) -> bool:
    """Whether nodes of this name are read by the library's own rule."""
    return _RULES.get(node_name) is _BUILT_IN.get(node_name)


def rule_for(node_name: str) -> Rule | None:
    """The rule for nodes of this name, None if there is none."""
    return _RULES.get(node_name)
