"""The live page of a training run: a process of its own, for which training never waits."""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from featlearn.errors import FeatlearnError

_SOURCE = Path(__file__).parents[2]


def require_live_extra() -> None:
    """Raise if the page cannot be served."""
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise FeatlearnError(f"{name} is not installed; pip install 'featlearn[live]'")


class LivePage:
    """Sink of `fl.watch` that serves a run until it is closed or this process ends.

    The page reads the run from disk. The process knows when training ends because its stdin closes.
    """

    def __init__(self, path: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_SOURCE), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._path = path
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "featlearn.reporting.live", str(path.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
        threading.Thread(target=self._announce, name="live-page", daemon=True).start()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Do nothing: the page reads the run."""

    def close(self) -> None:
        """Let the process send the last numbers and end, without waiting for it."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _announce(self) -> None:
        """Print the address once the process serves it, and wait for its end."""
        assert self._process.stdout is not None
        address = self._process.stdout.readline().strip()
        message = f"live at {address}" if address else f"no live page; featlearn live {self._path} says why"
        print(f"featlearn: {message}", file=sys.stderr, flush=True)
        self._process.wait()
