"""Table 1 of Xu & Ziyin 2024: common scalings, in which phase they are and how to move them to another."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from featlearn.theory.phases.classification import Phase, classify
from featlearn.theory.phases.exponents import Exponents
from featlearn.theory.phases.scalings import kernel_scaling, learning_scaling, stable_rate


class Cell(NamedTuple):
    """A limit and its phase."""

    exponents: Exponents
    phase: Phase


class Column(NamedTuple):
    """One scaling, from top to bottom of the table."""

    plain: Cell
    """learning rates that do not scale"""
    stable: Cell
    """the rates of Cor. 1"""
    learning: Cell
    """rate and gamma of Cor. 2, superscript + in the print"""
    kernel: Cell
    """rate and gamma of Cor. 3, superscript - in the print"""


def column(exponents: Exponents, *, balanced_start: bool = True, kernel_rate: float | None = None) -> Column:
    """Return the column of any scaling (Xu & Ziyin 2024, Table 1); its rates enter by their difference alone.

    `kernel_rate` is the free choice that Cor. 3 leaves, as in `kernel_scaling`.
    """
    plain = exponents.at_rate(0.0)
    limits = (plain, plain.at_rate(stable_rate(plain)), learning_scaling(plain), kernel_scaling(plain, kernel_rate))
    return Column(*(Cell(limit, classify(limit, balanced_start)) for limit in limits))


TABLE_1: Mapping[str, Column] = MappingProxyType(
    {
        "ntk": column(Exponents(d=1, gamma=-1 / 2, u=0, w=0), kernel_rate=0),
        "mean_field": column(Exponents(d=1, gamma=-1, u=0, w=0), kernel_rate=0),
        "xavier": column(Exponents(d=1, gamma=0, u=-1, w=-1), kernel_rate=-2),
        "kaiming": column(Exponents(d=1, gamma=0, u=-1, w=0), kernel_rate=-1),
        "lazy": column(Exponents(d=0, gamma=1, u=0, w=0), kernel_rate=-2),
    }
)
"""Scaling -> its column, computed from Theorem 2 and Corollaries 1 to 3, with the kernel rates that the paper chose.

Erratum: the print has u and w of Kaiming exchanged. For f = u . W x with a constant number of inputs, fan-in scaling is
w = 0 and u = -1. At equal rates only max(u, w) enters and no phase changes; at unequal rates it does. `lazy`, at a
fixed width, is a kernel phase for starts with P / Q -> 1 only, as with an output of zero."""
