"""Weights as the linear maps of a forward pass, and pairs of consecutive weights."""
