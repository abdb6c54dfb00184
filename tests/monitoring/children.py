"""Processes that a test starts, none of which outlives it or is waited for without end."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


class Child:
    """A Python process. What it says goes to a file: a pipe that nobody reads fills up, and the process then waits."""

    def __init__(self, program: str, *arguments: object, log: Path) -> None:
        self._log = log
        command = [sys.executable, str(PROGRAMS / program), *map(str, arguments)]
        with log.open("wb") as said:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environment()
            )

    @property
    def said(self) -> str:
        """Everything that it has said."""
        return self._log.read_text(errors="replace")


def environment() -> dict[str, str]:
    """Ours, less what says that it is one of several ranks; one thread, and no network but this machine's own."""
    strange = ("MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "TORCHELASTIC_", "NCCL_", "GLOO_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(strange)}
    return kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@contextmanager
def children(*started: Child) -> Iterator[None]:
    """Processes that are killed when this block is left, if they have not ended by then."""
    try:
        yield
    finally:
        for child in started:
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait(10)


def wait_for(condition: Callable[[], bool], started: Sequence[Child], seconds: float) -> None:
    """Until something is so, which must not take longer than this."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            pytest.fail(f"nothing after {seconds} s\n{words(started)}")
        time.sleep(0.02)


def wait_for_end(started: Sequence[Child], seconds: float) -> None:
    """Until all have ended well; one that fails is not waited for by the others."""

    def over() -> bool:
        codes = [child.process.poll() for child in started]
        if any(codes):
            pytest.fail(f"ended with {codes}\n{words(started)}")
        return all(code == 0 for code in codes)

    wait_for(over, started, seconds)


def words(started: Sequence[Child]) -> str:
    """What all of them have said."""
    return "\n".join(f"--- {child.process.args}\n{child.said}" for child in started)
