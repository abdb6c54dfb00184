"""Measurements by several processes, and models with weights sharded over them."""
