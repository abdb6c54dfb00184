"""The server on a real socket in a thread, and plain HTTP requests to it."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from featlearn.reporting.live.server import make_server, open_socket

TOKEN = "t" * 43


@contextlib.contextmanager
def served(path: Path) -> Iterator[int]:
    """The port of a server of the page for `path`."""
    made = make_server(path, TOKEN)
    with open_socket() as opened:
        thread = threading.Thread(target=made.run, kwargs={"sockets": [opened]})
        thread.start()
        try:
            while not made.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield opened.getsockname()[1]
        finally:
            made.should_exit = True
            thread.join(20)
    assert not thread.is_alive()


def answer(port: int, path: str = f"/?token={TOKEN}", method: str = "GET", **headers: str) -> tuple[int, str, Any]:
    """Status, body and headers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        found = connection.getresponse()
        return found.status, found.read().decode(), found.headers
    finally:
        connection.close()


def raw(port: int, request: bytes) -> bytes:
    """The first bytes of the answer to any bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        line.sendall(request)
        return line.recv(65536)


class Page:
    """An open page: reads the events one by one."""

    def __init__(self, port: int) -> None:
        self._line = socket.create_connection(("127.0.0.1", port), timeout=20)
        request = f"GET /events?token={TOKEN} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
        self._line.sendall(request.encode())
        self._file = self._line.makefile("rb")
        self.head = b"".join(iter(self._file.readline, b"\r\n"))

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._line.close()

    def message(self, seconds: float = 20.0) -> tuple[str, dict[str, Any]]:
        """The next message and its kind; a chunk of the answer is an event here."""
        end = time.monotonic() + seconds
        while True:
            assert time.monotonic() < end, "no message came"
            size = int(self._file.readline(), 16)
            content = self._file.read(size)
            self._file.readline()
            if content.startswith(b"event: "):
                kind, data = content.decode().split("\n", 1)
                message: dict[str, Any] = json.loads(data.removeprefix("data: "))
                return kind.removeprefix("event: "), message

    def until(self, wanted: Any, seconds: float = 20.0) -> dict[str, Any]:
        """The latest progress and report when `wanted` holds for them."""
        latest: dict[str, Any] = {"runs": [], "errors": [], "html": "", "blocks": []}
        end = time.monotonic() + seconds
        while not wanted(latest):
            assert time.monotonic() < end, latest
            latest |= self.message(end - time.monotonic())[1]
        return latest
