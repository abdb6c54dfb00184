"""Width checks: train networks of several widths, and fit how sizes scale with the width.

`WidthCheck` is the result of `fl.width_check`; `TABLES` has the powers of known parametrizations.
"""

from featlearn.widths.scaling import Problem, UseScaling, WidthCheck
from featlearn.widths.schemes import TABLES

__all__ = ["TABLES", "Problem", "UseScaling", "WidthCheck"]
