"""Outer products of gradients that need no network: of a known target, and of a layer whose eigenvectors are mixed."""

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.linalg.estimate import Estimate
from featlearn.quantities.layer_features import LayerFeatures

Target = Callable[[Tensor], Tensor]
Sampler = Callable[[int, torch.Generator], Tensor]


@overload
def egop(target: Target, sampler_or_x: Tensor, *, samples: int = 10_000, generator: torch.Generator | None = None
         ) -> Tensor: ...  # fmt: skip
@overload
def egop(target: Target, sampler_or_x: Sampler, *, samples: int = 10_000, generator: torch.Generator | None = None
         ) -> Estimate: ...  # fmt: skip
def egop(
    target: Target, sampler_or_x: Tensor | Sampler, *, samples: int = 10_000, generator: torch.Generator | None = None
) -> Tensor | Estimate:
    """The expected gradient outer product E[grad f grad f^T] of a known target, (d, d), float64 (003 Sec. 2).

    Args:
        target: a differentiable function of inputs (n, d), sample by sample, giving (n,) or (n, C); outputs are summed.
        sampler_or_x: inputs (n, d), over which the average is exact; or a function `sampler(samples, generator)` that
            draws them, which gives an `fl.Estimate` with a standard error for every entry.
        samples, generator: for a sampler; without a generator the draw is the same at every call.
    """
    if isinstance(sampler_or_x, Tensor):
        return _products(target, sampler_or_x).mean(0)
    if not callable(sampler_or_x):
        raise InputTypeError(f"got {type(sampler_or_x).__name__}, expected inputs (n, d) or a function that draws them")
    if samples < 2:
        raise InputValueError(f"samples={samples}, expected at least 2, for an error to be estimated")
    source = torch.Generator("cpu").manual_seed(0) if generator is None else generator
    sums: list[Tensor] = []
    for begin in range(0, samples, 1024):  # the products of all samples are never held together
        products = _products(target, sampler_or_x(min(1024, samples - begin), source))
        sums.append(torch.stack([products.sum(0), products.square().sum(0)]))
        sums = [torch.stack(sums).sum(0)]
    mean, squares = sums[0] / samples
    variance = (squares - mean.square()).clamp(min=0.0) * samples / (samples - 1)
    return Estimate(mean, (variance / samples).sqrt(), samples)


def _products(target: Target, x: Tensor) -> Tensor:
    """(n, d, d): sum over outputs of grad f grad f^T."""
    if x.dim() != 2 or not x.is_floating_point() or len(x) == 0:
        raise InputValueError(f"inputs have shape {tuple(x.shape)} and dtype {x.dtype}, expected floating point (n, d)")
    inputs = x.detach().double().requires_grad_()
    with torch.enable_grad():
        outputs = target(inputs)
    if outputs.shape[:1] != x.shape[:1] or outputs.dim() > 2:
        raise InputValueError(
            f"the target gives shape {tuple(outputs.shape)} for {len(x)} inputs, expected (n,) or (n, C)"
        )
    columns = outputs.reshape(len(x), -1)
    total = x.new_zeros(len(x), x.shape[1], x.shape[1], dtype=torch.float64)
    for column in columns.unbind(1):
        (gradient,) = torch.autograd.grad(column.sum(), inputs, retain_graph=True)
        total += gradient[:, :, None] * gradient[:, None, :]
    return total


def corrupted_agop(features: LayerFeatures, generator: torch.Generator | None = None) -> Tensor:
    """W^T Q W, (n, n): the AGOP of a layer whose PTK covariance has kept its spectrum and lost its eigenvectors.

    Q = O diag(eig K) O^T with O uniform among rotations (Haar; 003 Fig. 1). If the neural feature ansatz came from the
    spectrum alone, `fl.metrics.correlation(features.nfm, fl.corrupted_agop(features))` would stay as high as
    `features.uncentered`; its annealed mean is `fl.theory.early.annealed_corruption`.
    """
    if not isinstance(features, LayerFeatures):
        raise InputTypeError(
            f"features is {type(features).__name__}, expected the features of one layer: fl.neural_features(...)[name]"
        )
    values = torch.linalg.eigvalsh(features.ptk_covariance)
    rotation = haar_rotation(len(values), generator).to(values.device)
    corrupted = (rotation * values) @ rotation.mT
    product: Tensor = features.weight.mT @ corrupted @ features.weight
    return product


def haar_rotation(size: int, generator: torch.Generator | None = None) -> Tensor:
    """A uniformly drawn orthogonal matrix, float64: QR of a Gaussian one, with the signs that make it uniform."""
    source = torch.Generator("cpu").manual_seed(0) if generator is None else generator
    gaussian = torch.randn(size, size, generator=source, dtype=torch.float64, device=source.device)
    orthogonal, triangular = torch.linalg.qr(gaussian)
    rotation: Tensor = orthogonal * triangular.diagonal().sign()
    return rotation
