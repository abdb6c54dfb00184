"""The process of `fl.watch(live=True)`: python -m featlearn.live SOCKET RUN, token on stdin, until that is closed."""

import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from featlearn.live.server import server

LAST = 3.0
"""Seconds after the end of the training for the page to get the last lines."""


def main() -> None:
    """Serve until stdin ends."""
    os.nice(10)
    token = sys.stdin.readline().strip()
    if not token:  # the training has ended already
        return
    served = server(Path(sys.argv[2]), token)
    threading.Thread(target=_end, args=(served,), daemon=True).start()
    served.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])


def _end(served: Any) -> None:
    sys.stdin.read()
    time.sleep(LAST)
    served.should_exit = True


if __name__ == "__main__":
    main()
