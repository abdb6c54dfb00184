"""What `fl.sweep` does: a function at every point of a grid, in parallel, resumed where it was killed.

`ProcessPool` and `Serial` are executors; a `Sweep` is what comes back.
"""

from featlearn.sweeps.process_pool import ProcessPool, Serial
from featlearn.sweeps.results import Sweep

__all__ = ["ProcessPool", "Serial", "Sweep"]
