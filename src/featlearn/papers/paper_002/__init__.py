"""Figures of 002, Neural Networks as Kernel Learners: The Silent Alignment Effect."""
