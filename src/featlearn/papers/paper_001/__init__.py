"""Figures of 001, A Theory of Neural Tangent Kernel Alignment and Its Influence on Training."""
