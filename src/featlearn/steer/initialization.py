"""Richer or lazier by the scale of the first weights.

See Beaglehole et al. 2024, Sec. 5.1; Xu & Ziyin 2024, Sec. 3.3; Atanasov et al. 2022, Sec. 3.
"""

import fnmatch
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from featlearn.errors import InputTypeError, InputValueError
from featlearn.shapes import checked_number

__all__ = ["scale_init"]

Model = TypeVar("Model", bound=nn.Module)


def scale_init(
    model: Model,
    sigma: float,
    layers: str | Sequence[str] | None = None,
    redraw: bool = False,
    generator: torch.Generator | None = None,
) -> Model:
    """Multiply the weights of a network by sigma, in place; or draw them with this scale.

    The factor is that of Beaglehole et al. 2024 and Xu & Ziyin 2024, the draw that of Atanasov et al. 2022.

    Small sigma is rich: for a network that is homogeneous of degree p in its weights, f(sigma W) = sigma^p f(W), so
    smaller weights give a smaller output, which is equivalent to larger labels (Beaglehole et al. 2024, Sec. 5.1). The
    scale of a layer whose output is normalized has no effect.

    Args:
        model: its weights are changed; it is returned.
        sigma: the factor, > 0; with `redraw` the standard deviation times sqrt(fan_in).
        layers: globs of layer names (``"0"``, ``"blocks.*"``) or of parameter names; by default every layer. Weights
            are parameters of two axes or more. Biases and the gains of norms stay as they are, unless a glob names
            such a parameter itself (``"*.bias"``).
        redraw: draw N(0, sigma^2 / fan_in) for each entry, the convention of Atanasov et al. 2022, and discard the
            old weights. fan_in is the number of inputs that one output sees: 1 for an embedding.
        generator: randomness of `redraw`.

    Frozen parameters are left alone, a tied one is changed once. A weight that is computed from other parameters
    (weight norm) is refused: multiplying what it is computed from does not multiply it.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    factor = checked_number(sigma, "sigma")
    if not factor > 0:
        raise InputValueError(f"sigma={sigma!r}, expected a number > 0")
    chosen = _chosen(model, [layers] if isinstance(layers, str) else layers)
    with torch.no_grad():
        for parameter, fan_in in chosen:
            if redraw:
                parameter.normal_(0.0, factor / fan_in**0.5, generator=generator)
            else:
                parameter.mul_(factor)
    return model


def _chosen(model: nn.Module, globs: Sequence[str] | None) -> list[tuple[nn.Parameter, int]]:
    """Weights and their fan-in; every glob must choose one."""
    chosen: list[tuple[nn.Parameter, int]] = []
    hit: set[str] = set()
    for layer, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{layer}.{own}" if layer else own
            if not parameter.requires_grad:
                continue
            by_layer = [glob for glob in globs or () if fnmatch.fnmatchcase(layer, glob)]
            by_name = [glob for glob in globs or () if fnmatch.fnmatchcase(name, glob) and glob not in by_layer]
            weight = parameter.dim() > 1
            if not (weight if globs is None else by_name or (weight and by_layer)):
                continue
            if "parametrizations" in layer.split("."):
                raise InputValueError(
                    f"{name!r} is what a weight is computed from, expected plain weights: its scale is not that of the "
                    "weight; name the layers to change, or remove the parametrization"
                )
            hit.update(by_layer, by_name)
            if all(parameter is not other for other, _ in chosen):
                chosen.append((parameter, fan_in(module, parameter)))
    missed = [glob for glob in globs or () if glob not in hit]
    if missed or not chosen:
        layers = ", ".join(name for name, module in model.named_modules() if [*module.parameters(recurse=False)])
        raise InputValueError(
            f"{f'the glob {missed[0]!r} chooses' if missed else 'there is'} no trainable weight, expected some of the "
            f"layers {layers or '(none)'}"
        )
    return chosen


def fan_in(module: nn.Module, weight: torch.Tensor) -> int:
    """How many inputs one output of a layer sees."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 1
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return weight.shape[0] // module.groups * weight[0, 0].numel()
    return max(1, weight.numel() // weight.shape[0]) if weight.dim() > 1 else 1
