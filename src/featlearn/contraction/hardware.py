"""How fast this machine multiplies matrices and moves numbers, measured once per process and device; its caches."""

import math
import re
import time
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

LITTLE = 2**27
"""Bytes of memory that are taken to be there: to ask takes longer than small kernels should."""


def elementwise_cost(device: torch.device) -> float:
    """How many multiply-adds of a matrix product one element of an elementwise product costs.

    Rounded to a power of two, so that what is chosen by it seldom changes from run to run.
    """
    return _measured(device.type, device.index)


@lru_cache
def cache_bytes(level: int) -> int:
    """The size of a core's cache of this level, 2 or 3; what is usual where the system does not say."""
    usual = {2: 2**20, 3: 2**25}
    for place in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if int((place / "level").read_text()) == level:
                found = re.fullmatch(r"(\d+)([KM]?)", (place / "size").read_text().strip())
                return int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]] if found else usual[level]
        except (OSError, ValueError):
            break
    return usual[level]


@lru_cache
def _measured(kind: str, index: int | None) -> float:
    if kind not in ("cpu", "cuda"):
        return 8.0  # nothing is known of other devices; right within a factor of two on the CPUs that were tried
    device = torch.device(kind, index) if index is not None else torch.device(kind)
    size = 384 if kind == "cpu" else 4096
    with torch.no_grad():
        a, b = (torch.full((size, size), 0.5, dtype=torch.float32, device=device) for _ in range(2))
        product = min(_seconds(a, b, multiply=True) for _ in range(3)) / size**3
        element = min(_seconds(a, b, multiply=False) for _ in range(3)) / size**2
    ratio = min(max(element / max(product, 1e-15), 2.0), 256.0)  # also where the clock did not advance
    return 2.0 ** round(math.log2(ratio))


def _seconds(a: Tensor, b: Tensor, *, multiply: bool) -> float:
    """One matrix product, or one elementwise product added to a third matrix."""
    out = torch.empty_like(a)
    if a.is_cuda:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(a.device)
        begin.record()
        _ = torch.mm(a, b, out=out) if multiply else out.addcmul_(a, b)
        end.record()
        torch.cuda.synchronize(a.device)
        return float(begin.elapsed_time(end)) / 1e3
    start = time.perf_counter()
    _ = torch.mm(a, b, out=out) if multiply else out.addcmul_(a, b)
    return time.perf_counter() - start
