"""Send the progress of runs and their report to the pages that are open."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from featlearn.reporting.live.live_runs import LiveRuns

PROGRESS_PERIOD = 0.25
"""Seconds between two looks at the progress of the runs."""
REPORT_PERIOD = 4.0
"""Seconds between two reports. A report that takes long pauses for three times its duration."""
HEARTBEAT = 10.0
"""Seconds after which a page without news gets a comment, so that a lost connection is noticed."""
MOST_PAGES = 24
"""Pages that may be open at once."""


class Feed:
    """The latest message of each kind. Runs are read only while a page is open."""

    def __init__(self, runs: LiveRuns) -> None:
        self._runs = runs
        self._messages: dict[str, str] = {}
        self._sent: list[dict[str, str]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Update the messages inside the context, each kind in a thread of its own."""
        tasks = [
            asyncio.create_task(self._update("progress", self._runs.progress, PROGRESS_PERIOD)),
            asyncio.create_task(self._update("report", self._runs.report, REPORT_PERIOD)),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    @property
    def pages(self) -> int:
        """Number of open pages."""
        return len(self._sent)

    @property
    def end_unsent(self) -> bool:
        """True if all runs have finished, and an open page lacks the report on the end."""
        latest = self._messages.get("report")
        late = any(sent.get("report") is not latest for sent in self._sent)
        return self._runs.finished and bool(self._sent) and (late or self._runs.end_unreported)

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events for one page. A slow page skips messages that are out of date."""
        sent: dict[str, str] = {}
        self._sent.append(sent)
        last_time = time.monotonic()
        try:
            yield "retry: 1000\n\n"
            while True:
                for kind, message in list(self._messages.items()):
                    if sent.get(kind) is not message:
                        sent[kind] = message
                        yield f"event: {kind}\ndata: {message}\n\n"
                        last_time = time.monotonic()
                if time.monotonic() - last_time > HEARTBEAT:
                    yield ": connected\n\n"
                    last_time = time.monotonic()
                await asyncio.sleep(PROGRESS_PERIOD / 2)
        finally:
            self._sent = [other for other in self._sent if other is not sent]

    async def _update(self, kind: str, read: Callable[[], dict[str, Any] | None], period: float) -> None:
        def message() -> str:
            content = read()
            # JSON has no line break, so it is one field of an event
            return "" if content is None else json.dumps(content, allow_nan=False, separators=(",", ":"))

        pool = ThreadPoolExecutor(1, f"live-{kind}")
        try:
            while True:
                start = time.monotonic()
                if self.pages:
                    text = await asyncio.get_running_loop().run_in_executor(pool, message)
                    if text and text != self._messages.get(kind):
                        self._messages[kind] = text
                due = time.monotonic() + max(period, 3 * (time.monotonic() - start))
                while time.monotonic() < due and not (kind == "report" and self._report_early()):
                    await asyncio.sleep(PROGRESS_PERIOD)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _report_early(self) -> bool:
        """Return True for the first report, and where a run has finished."""
        return bool(self.pages) and ("report" not in self._messages or self._runs.end_unreported)
