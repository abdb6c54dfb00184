"""A model as a function of its inputs, called without side effects."""
