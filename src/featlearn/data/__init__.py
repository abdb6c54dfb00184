"""Data to measure on: real sets read from their files, and synthetic tasks."""

from featlearn.data.digits import digits
from featlearn.data.labelled import Labelled

__all__ = ["Labelled", "digits"]
