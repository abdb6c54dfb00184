"""TorchJD's Gram engine (`torchjd.autogram`), one output at a time unless the full kernel is asked for."""

import torch
from torch import Tensor, nn

PACKAGES = ("torchjd", "torch")


def kernel(network: nn.Module, x: Tensor, mode: str) -> Tensor:
    """`Engine.compute_gramian`."""
    from torchjd.autogram import Engine

    engine = Engine(network, batch_dim=0)
    if mode == "full":
        outputs = network(x)
        count = outputs.shape[1]
        return engine.compute_gramian(outputs).reshape(len(x), count, len(x), count).transpose(1, 2)
    with torch.no_grad():
        count = network(x[:2]).shape[1]
    # The engine forgets the graph after each Gram matrix: a forward pass for every output.
    each = [engine.compute_gramian(network(x)[:, c]) for c in range(count)]
    return torch.stack(each) if mode == "each" else torch.stack(each).mean(0)
