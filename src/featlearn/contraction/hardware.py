"""Speed of matrix and elementwise products, measured once per process and device, and cache sizes."""

import math
import re
import time
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

LITTLE = 2**27
"""Bytes of memory assumed to be available without a query, which would be slow for small kernels."""


def elementwise_cost(device: torch.device) -> float:
    """Return the cost of an element of an elementwise product, in multiply-adds of a matrix product.

    It is rounded to a power of two, so that choices based on it rarely change between runs.
    """
    return _measured(device.type, device.index)


@lru_cache
def cache_bytes(level: int) -> int:
    """Return the cache size of a core at level 2 or 3 in bytes; a typical size if unknown."""
    defaults = {2: 2**20, 3: 2**25}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if int((folder / "level").read_text()) == level:
                match = re.fullmatch(r"(\d+)([KM]?)", (folder / "size").read_text().strip())
                return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2]] if match else defaults[level]
        except (OSError, ValueError):
            break
    return defaults[level]


@lru_cache
def _measured(kind: str, index: int | None) -> float:
    if kind not in ("cpu", "cuda"):
        return 8.0  # other devices are not measured; within a factor of two on tested CPUs
    device = torch.device(kind, index) if index is not None else torch.device(kind)
    size = 384 if kind == "cpu" else 4096
    with torch.no_grad():
        a, b = (torch.full((size, size), 0.5, dtype=torch.float32, device=device) for _ in range(2))
        product = min(_seconds(a, b, multiply=True) for _ in range(3)) / size**3
        element = min(_seconds(a, b, multiply=False) for _ in range(3)) / size**2
    ratio = min(max(element / max(product, 1e-15), 2.0), 256.0)  # product is 0 if the clock did not advance
    return 2.0 ** round(math.log2(ratio))


def _seconds(a: Tensor, b: Tensor, *, multiply: bool) -> float:
    """Time a matrix product, or an elementwise product added to a third matrix, in seconds."""
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
