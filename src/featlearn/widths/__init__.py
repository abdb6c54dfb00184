"""What `fl.width_check` does: networks of several widths, and the powers of the width by which they scale.

A `WidthCheck` is what comes back; `TABLES` are the powers of the known parametrizations.
"""

from featlearn.widths.scaling import LayerScaling, Problem, WidthCheck
from featlearn.widths.schemes import TABLES

__all__ = ["TABLES", "LayerScaling", "Problem", "WidthCheck"]
