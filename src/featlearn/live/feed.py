"""Messages from the runs to all open pages; nothing is read while no page is open."""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import Any

from featlearn.live.board import Board

PERIOD = 0.2
"""Seconds between two looks at the runs."""
LOOK = 4.0
"""Seconds between two verdicts, or two drawings; if one takes long, three times its duration. Finished runs do not
wait."""
BEAT = 10.0
"""Seconds after which a silent page is sent a sign of life, for a connection that is gone to be noticed."""
KEPT = 32
"""Messages that are kept for slow pages; a page that is further behind gets everything anew."""
PAGES = 24
"""Pages that may be open at once."""


class Feed:
    """Reads the runs in one thread, judges and draws them in two others, and keeps the latest messages."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._messages: deque[str] = deque(maxlen=KEPT)
        self._count = 0  # of all messages so far
        self.pages = 0
        """Open pages."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the runs inside."""
        pools = [ThreadPoolExecutor(1, f"live-{name}") for name in ("reader", "verdict", "pictures")]
        self._reader, judge, drawer = pools
        looks = [
            self._looking(judge, self._board.judge, "verdict"),
            self._looking(drawer, self._board.draw, "pictures"),
        ]
        tasks = [asyncio.create_task(one) for one in (self._follow(), *looks)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events for one page: everything there is, then what arrives."""
        self.pages += 1
        try:
            yield "retry: 1000\n\n"
            seen = -1
            spoken = time.monotonic()
            while True:
                if seen < self._count - len(self._messages) or seen < 0:
                    seen = self._count  # what is read meanwhile is sent again, which changes nothing
                    yield await asyncio.get_running_loop().run_in_executor(self._reader, self._whole)
                    spoken = time.monotonic()
                elif seen < self._count:
                    message = self._messages[seen - self._count]
                    seen += 1
                    yield message
                    spoken = time.monotonic()
                elif time.monotonic() - spoken > BEAT:
                    yield ": still here\n\n"
                    spoken = time.monotonic()
                else:
                    await asyncio.sleep(PERIOD / 2)
        finally:
            self.pages -= 1

    async def _follow(self) -> None:
        while True:
            if self.pages:
                await self._tell(self._reader, self._board.news)
            await asyncio.sleep(0.0 if self.pages and self._board.more else PERIOD)

    async def _looking(self, pool: ThreadPoolExecutor, look: Callable[[], dict[str, Any] | None], what: str) -> None:
        while not self._count:
            await asyncio.sleep(PERIOD)
        # loads torch, whose time is not that of a look
        await asyncio.get_running_loop().run_in_executor(pool, import_module, "featlearn.reporting.groups")
        while True:
            begun = time.monotonic()
            if self.pages:
                await self._tell(pool, look)
            due = time.monotonic() + max(LOOK, 3 * (time.monotonic() - begun))
            while time.monotonic() < due and not (self.pages and self._board.waits(what)):
                await asyncio.sleep(PERIOD)

    async def _tell(self, pool: ThreadPoolExecutor, act: Any) -> None:
        message = await asyncio.get_running_loop().run_in_executor(pool, lambda: _event(act()))
        if message:
            self._messages.append(message)
            self._count += 1

    def _whole(self) -> str:
        return _event(self._board.whole())


def _event(content: dict[str, Any] | None) -> str:
    """JSON has no line break, so that it is one field of an event."""
    return "" if content is None else f"data: {json.dumps(content, allow_nan=False, separators=(',', ':'))}\n\n"
