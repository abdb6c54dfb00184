"""How one use of a parameter is read, by the autograd op that consumes it.

Importing this package loads every built-in rule.
"""

from featlearn.graph.layout import Layout
from featlearn.graph.uses import Use
from featlearn.ops import bilinear, convolution, distance, elementwise, embedding, matmul, normalization
from featlearn.ops.form import Direct, LinearMap, Outer
from featlearn.ops.registry import close_built_in, is_built_in, register_rule, rule_for

close_built_in()

__all__ = [
    "Direct",
    "Layout",
    "LinearMap",
    "Outer",
    "Use",
    "bilinear",
    "convolution",
    "distance",
    "elementwise",
    "embedding",
    "is_built_in",
    "matmul",
    "normalization",
    "register_rule",
    "rule_for",
]
