"""Exact theories: pure functions of numbers and matrices, in float64; no network is needed."""

from featlearn.theory import infinite_width

__all__ = ["infinite_width"]
