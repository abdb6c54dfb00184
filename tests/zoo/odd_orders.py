"""Models whose samples meet the weights in odd orders, and those among them that couple the samples."""

from . import odd_layouts, odd_permutations, odd_pooling
from .case import Case
from .coupled_orders import COUPLED_ORDERS, DRAWN

__all__ = ["COUPLED_ORDERS", "DRAWN", "ODD_ORDERS"]

ODD_ORDERS: list[Case] = [*odd_pooling.CASES, *odd_permutations.CASES, *odd_layouts.CASES]
