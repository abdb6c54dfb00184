"""The memory a process takes above what it holds."""

import resource
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """From now on.

    The peak is set back first: what was read or loaded before, and is gone, would hide as much of what comes.
    """

    def __init__(self) -> None:
        try:
            CLEAR.write_text("5")
            self._base = _status("VmRSS")
        except OSError:  # not Linux, or not allowed: growth of the peak of the whole process
            self._base = -1
            self._before = _largest()

    def bytes(self) -> int:
        """How much there was at most since then, above what there was then."""
        return _largest() - self._before if self._base < 0 else _status("VmHWM") - self._base


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _largest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
