"""All awkward models in one list, and those that must be refused in another."""

from . import (
    awkward_contraction,
    awkward_convolution,
    awkward_exotic,
    awkward_feedforward,
    awkward_interface,
    awkward_parametrized,
    awkward_reuse,
    awkward_sequence,
)
from .case import Case
from .refused import REFUSED

__all__ = ["CASES", "REFUSED"]

CASES: list[Case] = [
    *awkward_feedforward.CASES,
    *awkward_convolution.CASES,
    *awkward_sequence.CASES,
    *awkward_reuse.CASES,
    *awkward_parametrized.CASES,
    *awkward_contraction.CASES,
    *awkward_exotic.CASES,
    *awkward_interface.CASES,
]
