"""Algebra that knows nothing of networks."""
