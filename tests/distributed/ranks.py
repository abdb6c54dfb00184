"""Gloo ranks for tests: some processes run the checks of a module together, and leave what became of each."""

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TOP = Path(__file__).parents[2]
LIMIT = 20
"""Seconds that a rank waits for the others before it gives up."""

Check = Callable[[int, int], None]
_CHECKS: dict[str, tuple[Check, tuple[int, ...]]] = {}
MODULES = ("streamed", "kernels", "hazards", "sharded", "layered", "watching")
"""Where checks are, below `tests.distributed`."""


def on_ranks(*sizes: int) -> Callable[[Check], Check]:
    """Register a function of (rank, size) that every rank runs where there are so many; it asserts."""

    def register(check: Check) -> Check:
        assert check.__name__ not in _CHECKS
        _CHECKS[check.__name__] = (check, sizes)
        return check

    return register


def checks(size: int) -> dict[str, Check]:
    """All checks for so many ranks."""
    for module in MODULES:
        importlib.import_module(f"tests.distributed.{module}")
    return {name: check for name, (check, sizes) in _CHECKS.items() if size in sizes}


def outcomes(size: int, folder: Path, seconds: float, only: Sequence[str] = ()) -> dict[str, list[str]]:
    """Run all checks on so many ranks, in one start of processes: name -> what each rank says, "" if it is well.

    Ends when all ranks have ended or `seconds` have passed; none outlives it.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD", "MASTER_"))}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    logs = [folder / f"log {rank}" for rank in range(size)]
    started = []
    for rank in range(size):
        command = [sys.executable, "-m", "tests.distributed.ranks", str(rank), str(size), str(folder), *only]
        with logs[rank].open("wb") as log:
            started.append(subprocess.Popen(command, cwd=TOP, env=environment, stdout=log, stderr=log))
    end = time.monotonic() + seconds
    try:
        while any(one.poll() is None for one in started) and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        for one in started:
            if one.poll() is None:
                one.kill()
            one.wait(10)
    found: dict[str, list[str]] = {}
    for rank in range(size):
        path = folder / f"said {rank}.json"
        said = json.loads(path.read_text()) if path.exists() else {}
        for name in only or checks(size):
            found.setdefault(name, []).append(said.get(name, f"rank {rank} did not end:\n{logs[rank].read_text()}"))
    return found


def main(rank: int, size: int, folder: Path, *only: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT))
    said: dict[str, Any] = {}
    for name, check in checks(size).items():
        if only and name not in only:
            continue
        begun = time.monotonic()
        try:
            torch.manual_seed(0)
            check(rank, size)
            said[name] = ""
        except BaseException:  # told by the test
            said[name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - begun:.2f} s", flush=True)
        (folder / f"said {rank}.json").write_text(json.dumps(said))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.modules["tests.distributed.ranks"] = sys.modules["__main__"]
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
