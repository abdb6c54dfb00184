"""Figures of Shan & Bordelon 2021b, A Theory of Neural Tangent Kernel Alignment and Its Influence on Training."""
