"""What is known of each autograd op: how a use of a parameter is read, and how samples flow through the op.

Each op has a module of this package. Importing the package loads all of them.
"""

from importlib import import_module
from pkgutil import iter_modules

from featlearn.graph.graph import Layout, Use
from featlearn.ops.registry import Direct, LinearMap, Outer, close_built_in, is_built_in, register_rule, rule_for

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
close_built_in()

__all__ = ["Direct", "Layout", "LinearMap", "Outer", "Use", "is_built_in", "register_rule", "rule_for"]
