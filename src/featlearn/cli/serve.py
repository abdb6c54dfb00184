"""`featlearn live`: follow runs in a browser while they are written."""

import sys
from contextlib import suppress
from pathlib import Path

from featlearn.cli.answer import Answer


def live(path: Path, /, *, port: int = 0, json: bool = False, debug: bool = False) -> Answer:
    """Serve a page that follows a run, or all runs of a folder, until Ctrl-C.

    The address is printed on stderr, with a token that the server requires. The server listens on this machine only;
    use an SSH tunnel from other machines. Runs are read only while a page is open. Needs the extra `live`.

    For example:

        featlearn live runs/a
        featlearn live runs --port 8300

    Args:
        path: Folder of a run, or folder of runs up to two levels deep. One that does not exist yet is waited for.
        port: Port of the server; 0 selects a free port.
        json: Print one JSON document at the end instead.
        debug: Show where an error comes from.
    """
    from featlearn.reporting.live.server import make_server, new_token, open_socket, page_address

    token = new_token()
    server = make_server(path, token)
    with open_socket(port) as socket:
        print(
            f"featlearn: {path} is live at {page_address(socket, token)} (Ctrl-C ends it)", file=sys.stderr, flush=True
        )
        with suppress(KeyboardInterrupt):  # the usual end
            server.run(sockets=[socket])
    return Answer(data={"path": path}, text=f"ended: {path}")
