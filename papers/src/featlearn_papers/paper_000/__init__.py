"""Figures of Shan & Bordelon 2021a, Rapid Feature Evolution Accelerates Learning in Neural Networks."""
