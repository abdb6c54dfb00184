"""`torch.func`: per-sample Jacobians by vmap over some samples, contracted parameter by parameter in blocks.

A block is the largest whose Jacobian stays under a byte limit; without blocks most workloads would not fit at all.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

PACKAGES = ("torch",)
LIMIT = 2**31
"""Bytes of one block's Jacobian; a tenth of the memory of an accelerator."""
TOGETHER = 32
"""Samples in one pass on a CPU: the best of 4, 10, 30 and all on the CNN; a block consists of several passes."""


def kernel(network: nn.Module, x: Tensor, mode: str) -> Tensor:
    """Jacobian contraction in blocks of samples; one triangle of blocks.

    Attention runs by its formula: `vmap` takes ten times as long with the fused op.
    """
    with sdpa_kernel(SDPBackend.MATH):
        return _kernel(network, x, mode)


def _kernel(network: nn.Module, x: Tensor, mode: str) -> Tensor:
    parameters = {name: p.detach() for name, p in network.named_parameters()}

    def one(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(network, weights, (sample[None],))[0]

    jacobian = vmap(jacrev(one), (None, 0), chunk_size=None if x.is_cuda else TOGETHER)
    with torch.no_grad():
        outputs = network(x[:2]).shape[1]
    numbers = outputs * sum(p.numel() for p in parameters.values())
    limit = torch.cuda.get_device_properties(x.device).total_memory // 10 if x.is_cuda else LIMIT
    step = max(1, min(len(x), limit // (numbers * x.new_empty(0).to(next(network.parameters())).element_size())))
    shape = {"traced": (), "each": (outputs,), "full": (outputs, outputs)}[mode]
    found = next(network.parameters()).new_zeros(len(x), len(x), *shape)
    subscripts = {"traced": "pcn,qcn->pq", "each": "pcn,qcn->pqc", "full": "pcn,qdn->pqcd"}[mode]
    for i in range(0, len(x), step):
        left = jacobian(parameters, x[i : i + step])
        for j in range(0, i + 1, step):
            right = left if i == j else jacobian(parameters, x[j : j + step])
            block = sum(torch.einsum(subscripts, a.flatten(2), right[name].flatten(2)) for name, a in left.items())
            found[i : i + step, j : j + step] = block
            found[j : j + step, i : i + step] = (
                block.transpose(0, 1).transpose(-1, -2) if mode == "full" else (block.transpose(0, 1))
            )
    if mode == "traced":
        return found / outputs
    return found if mode == "full" else found.permute(2, 0, 1)
