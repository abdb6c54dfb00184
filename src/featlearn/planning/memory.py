"""Bytes: what is free, what was granted, and how they are written."""

import os
import re
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from featlearn.errors import InputTypeError, InputValueError, MemoryBudgetError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def byte_budget(memory: str | int | None, device: torch.device) -> int:
    """The `memory` argument in bytes; by default half of what is free on the device."""
    if memory is None:
        return free_bytes(device) // 2
    if isinstance(memory, bool) or not isinstance(memory, str | int):
        raise InputTypeError(f"memory is {memory!r}, expected a size such as '2GiB' or a number of bytes")
    if isinstance(memory, int):
        size = float(memory)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", memory.lower())
        if match is None or match[2] not in _UNITS:
            raise InputValueError(f"memory={memory!r}, expected a size such as '2GiB', '500MB' or a number of bytes")
        size = float(match[1]) * _UNITS[match[2]]
    if size < 1:
        raise InputValueError(f"memory={memory!r}, expected more than nothing")
    return int(size)


def refuse_over_budget(memory: str | int | None, needed: int, what: str) -> None:
    """Refuse a measurement that needs more bytes than the user's budget."""
    if memory is None:
        return
    budget = byte_budget(memory, torch.device("cpu"))
    if needed > budget:
        raise MemoryBudgetError(
            f"{what} takes {readable_bytes(needed)}, expected at most {readable_bytes(budget)}; raise memory="
        )


def weight_bytes(model: nn.Module) -> int:
    """Return the size of the model's parameters, in bytes."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_stats_as_nested_dict(device)  # the flat one takes a millisecond
        kept = [held.get(kind, {}).get("all", {}).get("current", 0) for kind in ("reserved_bytes", "allocated_bytes")]
        return int(free + kept[0] - kept[1])
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        machine = int(found[1]) * 1024 if found else 0
    except OSError:
        machine = 0
    if not machine:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if hasattr(os, "sysconf") else 2**32
    return min([machine, *_container_free()])


@lru_cache
def keep_released_memory() -> None:
    """Let what one pass releases serve the next, up to 62 MiB of it: pages from the system take 3 to 7 % of a kernel.

    The GNU C library keeps twice the largest block, of at most 32 MiB, that it has ever given back; so it is given one,
    which nobody touches. Once in a process; elsewhere nothing follows from it.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")


def _container_free() -> list[int]:
    """What a container may still take (cgroup v2), where there is a limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text().strip()
        return [max(int(limit) - int(used), 0)] if limit != "max" else []
    except (OSError, ValueError):
        return []


def readable_bytes(size: float) -> str:
    """A size as people write it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def readable_count(count: float) -> str:
    """A number of operations as people write it."""
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.0f}{unit}" if unit == "" or count >= 100 else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}P"


def readable_seconds(seconds: float) -> str:
    """A duration as people write it."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
