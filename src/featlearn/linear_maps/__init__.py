"""Weights as the linear maps that a forward pass applied, and which follows which."""
