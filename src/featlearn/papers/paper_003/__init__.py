"""Figures of 003, Feature Learning as Alignment."""
