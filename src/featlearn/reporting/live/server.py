"""The server of the live page: on this machine only, for holders of the token, and read-only."""

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
from featlearn.reporting.document import html_page, static
from featlearn.reporting.live.feed import MOST_PAGES, Feed
from featlearn.reporting.live.live_runs import LiveRuns
from featlearn.reporting.markup import Html, tag
from featlearn.reporting.step_slider import drawing_scripts, step_slider


def live_page(title: str) -> Html:
    """Return the page without any run."""
    return html_page(
        "live",
        title,
        Html(step_slider("Follow") + tag("main", id="report")),
        skip=("Skip to the report", "report"),
        header=[
            tag("p", "Connecting ...", id="state", role="status", class_="note"),
            tag("table", tag("tbody", id="runs")),
            tag("ul", id="errors", class_="missing", hidden=True),
        ],
        styles=[static("uPlot.min.css"), static("report.css")],
        scripts=[*drawing_scripts(), static("report.js"), static("live.js", "featlearn.reporting.live")],
        body_class="live single",
        footer="Served by featlearn from this machine. Charts are drawn with uPlot (MIT).",
        noscript="JavaScript draws this page; please allow it.",
        extra_policy="connect-src 'self'; ",
    )


HEADER_PERIOD = 5.0
"""Seconds after which a connection that has sent no whole request is closed: it counts against all others."""
_LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?")
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def open_socket(port: int = 0) -> socket.socket:
    """Return a listening socket on the loopback interface. Port 0 takes a free one."""
    if not 0 <= port <= 65535:
        raise InputValueError(f"port={port}, expected 0 (any free one) to 65535")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        reason = f"port {port} cannot be used: {error.strerror or error}"
        raise FeatlearnError(f"{reason}; --port 0 takes a free one") from error
    return listener


def new_token() -> str:
    """Return a token of 256 random bits."""
    return secrets.token_urlsafe(32)


def page_address(listener: socket.socket, token: str) -> str:
    """Return the address to open in a browser."""
    return f"http://127.0.0.1:{listener.getsockname()[1]}/?token={token}"


def make_server(path: Path, token: str) -> Any:
    """Return a uvicorn server of the page with its `feed`, to be run with a listening socket. It writes no log."""
    feed = Feed(LiveRuns(path))
    uvicorn = _import("uvicorn")
    config = uvicorn.Config(
        _application(feed, path.resolve().name, token),
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http=_timed_protocol(),
        ws="none",
        loop="asyncio",
        lifespan="on",
        limit_concurrency=2 * MOST_PAGES,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=2**14,
    )
    server = uvicorn.Server(config)
    server.feed = feed
    return server


def _timed_protocol() -> Any:
    """Return uvicorn's protocol, closing connections that send no whole request within HEADER_PERIOD."""
    h11_protocol = _import("uvicorn.protocols.http.h11_impl").H11Protocol

    class TimedProtocol(h11_protocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(HEADER_PERIOD, self._close_without_request)

        def _close_without_request(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.abort()

    return TimedProtocol


def _import(name: str) -> Any:
    """Import a module of the extra `live`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FeatlearnError(f"{name} cannot be imported ({error}); pip install 'featlearn[live]'") from error


def _application(feed: Feed, title: str, token: str) -> Any:
    """Return the application: the page at /, its events at /events, and nothing else."""
    applications, responses = _import("starlette.applications"), _import("starlette.responses")
    routing = _import("starlette.routing")

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        async with feed.running():
            yield

    async def show(request: Any) -> Any:
        return responses.HTMLResponse(live_page(title), headers=_HEADERS)

    async def events(request: Any) -> Any:
        if feed.pages >= MOST_PAGES:
            message = f"{MOST_PAGES} pages are open already; close one"
            return responses.PlainTextResponse(message, 503, headers=_HEADERS)
        return responses.StreamingResponse(feed.events(), media_type="text/event-stream", headers=_HEADERS)

    routes = [routing.Route("/", show, methods=["GET"]), routing.Route("/events", events, methods=["GET"])]
    return _Guard(applications.Starlette(routes=routes, lifespan=lifespan), token, responses.PlainTextResponse)


class _Guard:
    """Reject requests for foreign host names, from other pages, or without the token."""

    def __init__(self, app: Any, token: str, response: Any) -> None:
        self._app, self._token, self._response = app, token.encode(), response

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        rejection = self._rejection(scope)
        if rejection:
            await self._response(rejection, 403, headers=_HEADERS)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _rejection(self, scope: Any) -> str:
        """Return why a request is rejected; empty if it is not."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not _LOCAL.fullmatch(hosts[0]):  # a foreign name that resolves to this machine
            return "this server answers to 127.0.0.1 and localhost only\n"
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return "this server answers to its own page only\n"
        try:
            tokens = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=8).get("token", [""])
        except ValueError:  # too many fields
            tokens = [""]
        if not hmac.compare_digest(tokens[0].encode(), self._token):
            return "the token is missing or wrong: open the address that was printed, with all that follows ?token=\n"
        return ""
