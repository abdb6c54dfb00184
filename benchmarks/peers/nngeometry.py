"""nngeometry: Gram matrices through module hooks, one output at a time unless the full kernel is asked for."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = ("nngeometry", "torch")
STEP = 500
"""Samples in a batch: the fastest of 100, 250, 500 and 1000 on the MLPs."""


def kernel(network: nn.Module, x: Tensor, mode: str) -> Tensor:
    """`GramMatrix`."""
    from nngeometry import GramMatrix

    loader = DataLoader(TensorDataset(x), batch_size=min(len(x), STEP))

    def gram(function: object) -> Tensor:
        found: Tensor = GramMatrix(network, loader, function=function).data
        return found

    if mode == "full":
        return gram(lambda batch: network(batch)).permute(1, 3, 0, 2)
    with torch.no_grad():
        outputs = network(x[:2]).shape[1]
    each = [gram(lambda batch, c=c: network(batch)[:, c : c + 1])[0, :, 0] for c in range(outputs)]
    return torch.stack(each) if mode == "each" else torch.stack(each).mean(0)
