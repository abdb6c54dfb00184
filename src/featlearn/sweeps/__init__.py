"""Sweeps: call a function at every point of a grid, in parallel, and resume after interruptions.

`ProcessPool` and `Serial` are executors. A `Sweep` holds the results.
"""

from featlearn.sweeps.process_pool import ProcessPool, Serial
from featlearn.sweeps.results import Sweep

__all__ = ["ProcessPool", "Serial", "Sweep"]
