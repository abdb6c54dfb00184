"""Exact theories: pure functions of numbers and matrices, in float64; no network is needed."""

from featlearn.theory import deep_linear, early, infinite_width, latent, ofe, phases, relu, transfer

__all__ = ["deep_linear", "early", "infinite_width", "latent", "ofe", "phases", "relu", "transfer"]
