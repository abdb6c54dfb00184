"""BackPACK: per-sample gradients (`BatchGrad`) of one output at a time, then their products."""

import torch
from torch import Tensor, nn

PACKAGES = ("backpack-for-pytorch", "torch")


def kernel(network: nn.Module, x: Tensor, mode: str) -> Tensor:
    """Per-sample gradients are needed of all samples at once: they are not kept in blocks."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    if mode == "full":
        raise NotImplementedError("per-sample gradients of one output at a time only")
    for module in network.modules():
        if not list(module.children()):
            extend(module)
    each = []
    outputs = network(x)
    for c in range(outputs.shape[1]):
        with backpack(BatchGrad(), retain_graph=True):
            network.zero_grad()
            outputs[:, c].sum().backward(retain_graph=True)
        total = torch.zeros(len(x), len(x), dtype=outputs.dtype)
        for parameter in network.parameters():
            flat = parameter.grad_batch.flatten(1)
            total += flat @ flat.T
            del parameter.grad_batch
        each.append(total)
    return torch.stack(each) if mode == "each" else torch.stack(each).mean(0)
