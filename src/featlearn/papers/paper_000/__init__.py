"""Figures of 000, Rapid Feature Evolution Accelerates Learning in Neural Networks."""
