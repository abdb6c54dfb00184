"""The server of the live page: on this machine only, for those who have the token, and for reading only."""

import hmac
import importlib
import re
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from featlearn.errors import FeatlearnError, InputValueError
from featlearn.live.board import Board
from featlearn.live.feed import PAGES, Feed
from featlearn.live.page import page

_LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?")
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def listening(port: int = 0) -> socket.socket:
    """A socket on the loopback interface; port 0 takes a free one."""
    if not 0 <= port <= 65535:
        raise InputValueError(f"port={port}, expected 0 (any free one) to 65535")
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(("127.0.0.1", port))
        opened.listen(64)
    except OSError as error:
        opened.close()
        reason = f"port {port} cannot be used: {error.strerror or error}"
        raise FeatlearnError(f"{reason}; --port 0 takes a free one") from error
    return opened


def new_token() -> str:
    """A token that cannot be guessed."""
    return secrets.token_urlsafe(32)


def address(opened: socket.socket, token: str) -> str:
    """What to open in a browser."""
    return f"http://127.0.0.1:{opened.getsockname()[1]}/?token={token}"


def server(path: Path, token: str) -> Any:
    """A uvicorn server of the page, to be run with a listening socket; it writes no log."""
    board = Board(path)
    uvicorn = installed("uvicorn")
    config = uvicorn.Config(
        application(Feed(board), path.resolve().name, token),
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        limit_concurrency=2 * PAGES,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=2**14,
    )
    return uvicorn.Server(config)


def installed(name: str) -> Any:
    """A module of the extra `live`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FeatlearnError(f"{name} cannot be imported ({error}); pip install 'featlearn[live]'") from error


def application(feed: Feed, title: str, token: str) -> Any:
    """The page at /, and what feeds it at /events; everything else is not there."""
    applications, responses = installed("starlette.applications"), installed("starlette.responses")
    routing = installed("starlette.routing")

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        async with feed.running():
            yield

    async def show(request: Any) -> Any:
        return responses.HTMLResponse(page(title), headers=_HEADERS)

    async def events(request: Any) -> Any:
        if feed.pages >= PAGES:
            return responses.PlainTextResponse(f"{PAGES} pages are open already; close one", 503, headers=_HEADERS)
        return responses.StreamingResponse(feed.events(), media_type="text/event-stream", headers=_HEADERS)

    routes = [routing.Route("/", show, methods=["GET"]), routing.Route("/events", events, methods=["GET"])]
    return _Guard(applications.Starlette(routes=routes, lifespan=lifespan), token, responses.PlainTextResponse)


class _Guard:
    """Lets through only requests from this machine's names, from our own page, and with the token."""

    def __init__(self, app: Any, token: str, response: Any) -> None:
        self._app, self._token, self._response = app, token.encode(), response

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal:
            await self._response(refusal, 403, headers=_HEADERS)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Any) -> str:
        """Why a request is refused; empty if it is not."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not _LOCAL.fullmatch(hosts[0]):  # a foreign name that leads to this machine
            return "this server answers to 127.0.0.1 and localhost only\n"
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return "this server answers to its own page only\n"
        try:
            given = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=8).get("token", [""])
        except ValueError:  # too many fields
            given = [""]
        if not hmac.compare_digest(given[0].encode(), self._token):
            return "the token is missing or wrong: open the address that was printed, with all that follows ?token=\n"
        return ""
