"""The live page of a training run: a process of its own, for which the training never waits."""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from featlearn.errors import FeatlearnError
from featlearn.live.server import address, installed, listening, new_token

_SOURCE = Path(__file__).parents[2]


def check_installed() -> None:
    """Raise where the page cannot be served."""
    for name in ("starlette.applications", "uvicorn"):
        installed(name)
    if os.name != "posix":
        raise FeatlearnError(f"live=True is not available on {os.name}; featlearn live RUN in another window is")


class LivePage:
    """Serves a run until it is closed or this process ends, however it ends; a sink of `fl.watch`."""

    def __init__(self, path: Path) -> None:
        token = new_token()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_SOURCE), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with listening() as opened:  # requests wait in its queue until the process listens to them
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "featlearn.live", str(opened.fileno()), str(path.resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[opened.fileno()],
                env=environment,
                start_new_session=True,
            )
            self.address = address(opened, token)
            """What to open in a browser."""
        # Not an argument: other users can read those. The pipe stays open: its end is the end of the training.
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(f"{token}\n".encode())
            self._process.stdin.flush()
        threading.Thread(target=self._process.wait, name="live-page", daemon=True).start()
        print(f"featlearn: live at {self.address}", file=sys.stderr, flush=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Nothing: the page reads the run."""

    def close(self) -> None:
        """Tell the process to send what is left, and to end; does not wait for it."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
