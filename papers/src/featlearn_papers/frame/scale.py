"""How large an experiment is run."""

from enum import StrEnum


class Scale(StrEnum):
    """From seconds to days."""

    SMOKE = "smoke"
    """seconds on one core, without data files: does it run"""
    LAPTOP = "laptop"
    """minutes on two cores, real data"""
    PAPER = "paper"
    """the size of the paper, on a GPU where it needs one"""

    @property
    def rank(self) -> int:
        """0, 1, 2: larger scales are stronger evidence."""
        return list(Scale).index(self)
