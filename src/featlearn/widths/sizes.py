"""Sizes: root mean squares, spectral norms, and how far a kernel moved."""

import torch
from torch import Tensor, nn

from featlearn.network.inputs import Inputs, batch_size, map_tensors
from featlearn.widths.passes import called, evaluating

KERNEL_SAMPLES = 6


def rms(values: Tensor | None) -> float:
    """Root mean square."""
    return 0.0 if values is None or not values.numel() else float(values.double().square().mean().sqrt())


def spectral_norm(weight: Tensor) -> float:
    """Largest singular value, of a convolution as a matrix (outputs, all it sees), of a vector its length."""
    if not bool(torch.isfinite(weight).all()):
        return float("nan")
    matrix = weight.double().flatten(1) if weight.dim() > 1 else weight.double().reshape(1, -1)
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    return float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt())


def gram_motion(before: Tensor, after: Tensor) -> float:
    """|K' - K| / |K|; nan where the first is zero."""
    size = float(before.norm())
    return float((after - before).norm()) / size if size else float("nan")


def _few(x: Inputs) -> Inputs:
    samples = batch_size(x)
    return map_tensors(x, lambda tensor: tensor[:KERNEL_SAMPLES] if tensor.dim() and len(tensor) == samples else tensor)


def tangent_kernel(model: nn.Module, x: Inputs, rates: dict[str, float]) -> Tensor:
    """The tangent kernel of one random direction of the outputs on a few samples, parameters weighted by `rates`."""
    unique = {id(p): (p, rates[name]) for name, p in model.named_parameters() if p.requires_grad}
    parameters = [p for p, _ in unique.values()]
    roots = [rate**0.5 for _, rate in unique.values()]
    with evaluating(model), torch.enable_grad():
        output = called(model, _few(x))
        direction = torch.randn(output.shape[1:], generator=torch.Generator().manual_seed(0)).to(output)
        rows = []
        for one in output:
            gradients = torch.autograd.grad((one * direction).sum(), parameters, retain_graph=True, allow_unused=True)
            rows.append(
                torch.cat(
                    [root * g.flatten().double() for root, g in zip(roots, gradients, strict=True) if g is not None]
                )
            )
    stacked = torch.stack(rows)
    return stacked @ stacked.T
