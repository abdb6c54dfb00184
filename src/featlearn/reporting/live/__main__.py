"""The process behind `fl.watch(live=True)`: print the address of the page, and serve it until stdin closes."""

import os
import sys
import threading
import time
from pathlib import Path

from featlearn.reporting.live.server import make_server, new_token, open_socket, page_address

GRACE_PERIOD = 3.0
"""Seconds between the end of training and the end of the server."""
LONGEST_WAIT = 120.0
"""Longest time in seconds that the server then waits for the report on the end, if a page is open."""


def main() -> None:
    """Serve the run named on the command line."""
    if hasattr(os, "nice"):
        os.nice(10)
    token = new_token()
    server = make_server(Path(sys.argv[1]), token)
    with open_socket() as socket:
        print(page_address(socket, token), flush=True)

        def stop() -> None:
            sys.stdin.read()
            time.sleep(GRACE_PERIOD)
            end = time.monotonic() + LONGEST_WAIT
            while server.feed.end_unsent and time.monotonic() < end:
                time.sleep(0.2)
            time.sleep(0.5)
            server.should_exit = True

        threading.Thread(target=stop, daemon=True).start()
        server.run(sockets=[socket])


if __name__ == "__main__":
    main()
