"""Figures of five papers on feature learning: repeated, drawn, and their claims judged."""

__version__ = "0.1.0"
