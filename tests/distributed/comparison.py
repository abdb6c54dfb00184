"""What ranks have against what it should be."""

import torch
import torch.distributed as dist
from torch import Tensor


def assert_same_everywhere(tensor: Tensor) -> None:
    """The same bits on every rank."""
    bits = tensor.detach().contiguous().cpu()
    found = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(found, bits)
    assert all(torch.equal(one, found[0]) for one in found)


def assert_close(found: Tensor, expected: Tensor, relative: float = 1e-14) -> None:
    """Equal to this share of the largest entry."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= relative * float(expected.abs().max())
