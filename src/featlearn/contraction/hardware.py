"""Relative cost of matrix and elementwise products, and cache sizes."""

import re
from functools import lru_cache
from pathlib import Path

import torch

LITTLE = 2**27
"""Bytes of memory assumed to be available without a query, which would be slow for small kernels."""
ELEMENTWISE_COST = {"cpu": 8.0, "cuda": 64.0}
"""Cost of an element of an elementwise product, in multiply-adds of a matrix product.

Constant, within a factor of two or so of what CPUs and an H200 need: a measured value changes with the load of the
machine, and with it the route of a contraction and the last digits of a kernel.
"""


def elementwise_cost(device: torch.device) -> float:
    """Return the cost of an element of an elementwise product, in multiply-adds of a matrix product."""
    return ELEMENTWISE_COST.get(device.type, ELEMENTWISE_COST["cpu"])


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
