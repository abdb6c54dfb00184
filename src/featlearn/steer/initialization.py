"""Make training richer or lazier by the scale of the initial weights.

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
    """Multiply the weights of a network by sigma in place, or redraw them with this scale.

    Multiplication follows Beaglehole et al. 2024 and Xu & Ziyin 2024, redrawing Atanasov et al. 2022.

    Small sigma is rich: for a network that is homogeneous of degree p in its weights, f(sigma W) = sigma^p f(W), so
    smaller weights give a smaller output, which is equivalent to larger labels (Beaglehole et al. 2024, Sec. 5.1). The
    scale of a layer whose output is normalized has no effect.

    Args:
        model: Model whose weights are changed in place; also the return value.
        sigma: Factor > 0; with `redraw` the standard deviation times sqrt(fan_in).
        layers: Globs of layer names (``"0"``, ``"blocks.*"``) or parameter names; by default every layer. Weights are
            parameters of two axes or more. Biases and gains of norms are unchanged unless a glob matches the parameter
            name (``"*.bias"``).
        redraw: Draw N(0, sigma^2 / fan_in) for each entry, the convention of Atanasov et al. 2022, and discard the old
            weights. fan_in is the number of inputs per output: 1 for an embedding.
        generator: Source of random numbers for `redraw`.

    Frozen parameters are unchanged, and tied parameters are changed once. Weights computed from other parameters
    (weight norm) raise an error: scaling those parameters does not scale the weight.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    factor = checked_number(sigma, "sigma")
    if not factor > 0:
        raise InputValueError(f"sigma={sigma!r}, expected a number > 0")
    weights = _select_weights(model, [layers] if isinstance(layers, str) else layers)
    with torch.no_grad():
        for parameter, fan_in in weights:
            if redraw:
                parameter.normal_(0.0, factor / fan_in**0.5, generator=generator)
            else:
                parameter.mul_(factor)
    return model


def _select_weights(model: nn.Module, globs: Sequence[str] | None) -> list[tuple[nn.Parameter, int]]:
    """Return weights and their fan-in; raise if a glob matches none."""
    weights: list[tuple[nn.Parameter, int]] = []
    matched: set[str] = set()
    for layer, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            name = f"{layer}.{parameter_name}" if layer else parameter_name
            if not parameter.requires_grad:
                continue
            by_layer = [glob for glob in globs or () if fnmatch.fnmatchcase(layer, glob)]
            by_name = [glob for glob in globs or () if fnmatch.fnmatchcase(name, glob) and glob not in by_layer]
            is_weight = parameter.dim() > 1
            if not (is_weight if globs is None else by_name or (is_weight and by_layer)):
                continue
            if "parametrizations" in layer.split("."):
                raise InputValueError(
                    f"{name!r} is a parameter that a weight is computed from, expected plain weights: scaling it does "
                    "not scale the weight; name the layers to change, or remove the parametrization"
                )
            matched.update(by_layer, by_name)
            if all(parameter is not other for other, _ in weights):
                weights.append((parameter, fan_in(module, parameter)))
    unmatched = [glob for glob in globs or () if glob not in matched]
    if unmatched or not weights:
        layers = ", ".join(name for name, module in model.named_modules() if [*module.parameters(recurse=False)])
        raise InputValueError(
            f"{f'the glob {unmatched[0]!r} chooses' if unmatched else 'there is'} no trainable weight, expected some "
            f"of the layers {layers or '(none)'}"
        )
    return weights


def fan_in(module: nn.Module, weight: torch.Tensor) -> int:
    """Return the number of inputs per output of a layer."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 1
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return weight.shape[0] // module.groups * weight[0, 0].numel()
    return max(1, weight.numel() // weight.shape[0]) if weight.dim() > 1 else 1
