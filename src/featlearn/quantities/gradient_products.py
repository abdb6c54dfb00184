"""Outer products of gradients that need no network: of a known target, and of a layer whose eigenvectors are mixed."""

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError, NotFiniteError
from featlearn.linalg.estimate import Estimate
from featlearn.quantities.layer_features import LayerFeatures
from featlearn.signatures import name_keywords

Target = Callable[[Tensor], Tensor]
Sampler = Callable[[int, torch.Generator], Tensor]


@overload
def egop(
    target: Target, sampler_or_x: Tensor, *, samples: int = 10_000, generator: torch.Generator | None = None
) -> Tensor: ...
@overload
def egop(
    target: Target, sampler_or_x: Sampler, *, samples: int = 10_000, generator: torch.Generator | None = None
) -> Estimate: ...
@name_keywords()
def egop(
    target: Target, sampler_or_x: Tensor | Sampler, *, samples: int = 10_000, generator: torch.Generator | None = None
) -> Tensor | Estimate:
    """The expected gradient outer product E[grad f grad f^T] of a known target, (d, d), float64.

    See Beaglehole et al. 2024, Sec. 2.

    Args:
        target: a differentiable function of inputs (n, d), sample by sample, giving (n,) or (n, C); outputs are summed.
        sampler_or_x: inputs (n, d), over which the average is exact; or a function `sampler(samples, generator)` that
            draws them, which gives an `fl.Estimate` with a standard error for every entry.
        samples, generator: for a sampler; without a generator the draw is the same at every call.
    """
    if isinstance(sampler_or_x, Tensor):
        return _sums(target, sampler_or_x, squares=False)[0] / len(sampler_or_x)
    if not callable(sampler_or_x):
        raise InputTypeError(f"got {type(sampler_or_x).__name__}, expected inputs (n, d) or a function that draws them")
    if samples < 2:
        raise InputValueError(f"samples={samples}, expected at least 2, for an error to be estimated")
    source = torch.Generator("cpu").manual_seed(0) if generator is None else generator
    first, second = 0.0 * torch.eye(1), 0.0 * torch.eye(1)
    for begin in range(0, samples, 1024):
        wanted = min(1024, samples - begin)
        drawn = sampler_or_x(wanted, source)
        if not isinstance(drawn, Tensor) or len(drawn) != wanted:
            raise InputValueError(f"the sampler gave {_described(drawn)}, expected the {wanted} rows it was asked for")
        added, added_squares = _sums(target, drawn, squares=True)
        first, second = first.to(added) + added, second.to(added) + added_squares
    mean, squares = first / samples, second / samples
    variance = (squares - mean.square()).clamp(min=0.0) * samples / (samples - 1)
    return Estimate(mean, (variance / samples).sqrt(), samples)


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _sums(target: Target, x: Tensor, *, squares: bool) -> tuple[Tensor, Tensor]:
    """Sums over samples of P = sum over outputs of grad f grad f^T, and of the squares of its entries; (d, d) each."""
    if x.dim() != 2 or not x.is_floating_point() or len(x) == 0:
        raise InputValueError(f"inputs have shape {tuple(x.shape)} and dtype {x.dtype}, expected floating point (n, d)")
    total = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
    square = torch.zeros_like(total)
    for part in x.detach().split(max(1, min(1024, 2**22 // x.shape[1] ** 2 if squares else 1024))):
        gradients = _gradients(target, part)
        flat = gradients.flatten(0, 1)
        total += flat.mT @ flat
        if squares and len(gradients) == 1:
            square += flat.square().mT @ flat.square()
        elif squares:
            square += torch.einsum("cni,cnj->nij", gradients, gradients).square().sum(0)
    return total, square


def _gradients(target: Target, x: Tensor) -> Tensor:
    """(C, n, d): the gradient of every output, in double."""
    with torch.inference_mode(False), torch.enable_grad():
        inputs = x.clone().double().requires_grad_()
        try:
            outputs = target(inputs)
        except Exception as error:
            raise InputValueError(
                f"the target fails on float64 inputs of shape {tuple(x.shape)}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(outputs, Tensor) or outputs.shape[:1] != x.shape[:1] or outputs.dim() > 2:
            raise InputValueError(
                f"the target gives {_described(outputs)} for {len(x)} inputs, expected a tensor (n,) or (n, C)"
            )
        if not outputs.requires_grad:
            raise InputValueError("the target has no gradient: it is constant, detached or not written in torch")
        columns = outputs.reshape(len(x), -1).unbind(1)
        found = [torch.autograd.grad(c.sum(), inputs, retain_graph=True, allow_unused=True)[0] for c in columns]
        return torch.stack([torch.zeros_like(inputs) if g is None else g for g in found]).detach()


def corrupted_agop(features: LayerFeatures, generator: torch.Generator | None = None) -> Tensor:
    """W^T Q W, (n, n): the AGOP of a layer whose PTK covariance has kept its spectrum and lost its eigenvectors.

    Q = O diag(eig K) O^T with O uniform among rotations (Haar; Beaglehole et al. 2024,
    Fig. 1). If the neural feature ansatz came from the
    spectrum alone, `fl.metrics.correlation(features.nfm, fl.quantities.corrupted_agop(features))` would stay as high as
    `features.uncentered`; its annealed mean is `fl.theory.early.annealed_corruption`.
    """
    if not isinstance(features, LayerFeatures):
        raise InputTypeError(
            f"features is {type(features).__name__}, expected the features of one layer: fl.neural_features(...)[name]"
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputTypeError(f"generator is {generator!r}, expected a torch.Generator")
    if not bool(torch.isfinite(features.ptk_covariance).all()):
        raise NotFiniteError(
            "the PTK covariance is not finite, expected the features of a network that has not diverged"
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
