"""Linearize a network between two of its states: through its output function, and in effective weights."""
