"""Run a module without network: python .ci/offline.py MODULE ARGUMENTS... fails where it opens a connection."""

import runpy
import socket
import sys


def refuse(self: socket.socket, address: object) -> None:
    """In place of `socket.connect`: sockets of this machine alone are let through."""
    if self.family != socket.AF_UNIX:
        raise ConnectionRefusedError(f"a connection to {address} was asked for, where there must be none")


socket.socket.connect = socket.socket.connect_ex = refuse  # type: ignore[method-assign, assignment]
socket.getaddrinfo = lambda host, *rest, **options: refuse(socket.socket(), host)  # type: ignore[assignment]
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
