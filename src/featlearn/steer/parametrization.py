"""Put networks into the kernel or learning phase by scaling weights, output, and learning rates.

See Xu & Ziyin 2024, Sec. 4.1.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from featlearn.errors import InputTypeError, InputValueError, did_you_mean
from featlearn.shapes import checked_number
from featlearn.signatures import name_keywords
from featlearn.steer.initialization import fan_in
from featlearn.steer.output_scale import ScaledOutput
from featlearn.theory.phases import TABLE_1, Exponents
from featlearn.torch_internals import AnyConvolution

__all__ = ["SCHEMES", "parametrize"]


class Scheme(NamedTuple):
    """A scaling scheme: exponents, and scales at the base width."""

    exponents: Exponents
    scale: Callable[[int], float]
    """base width -> multiplier of the output at that width"""
    variance_w: Callable[[int, int], float]
    """(fan_in, fan_out) -> variance of the first-layer weights"""
    variance_u: Callable[[int, int], float]
    """(fan_in, fan_out) -> variance of the readout weights"""
    center: bool = False


def _kaiming(inputs: int, outputs: int) -> float:
    return 2 / inputs


def _xavier(inputs: int, outputs: int) -> float:
    return 2 / (inputs + outputs)


def _unit_variance(inputs: int, outputs: int) -> float:
    return 1.0


SCHEMES: dict[str, Scheme] = {
    "ntk": Scheme(TABLE_1["ntk"].kernel.exponents, lambda base: base**-0.5, _kaiming, _unit_variance),
    "mean_field": Scheme(TABLE_1["mean_field"].learning.exponents, lambda base: base**-0.5, _kaiming, _unit_variance),
    "kaiming+": Scheme(TABLE_1["kaiming"].learning.exponents, lambda base: 1.0, _kaiming, _kaiming),
    "kaiming-": Scheme(TABLE_1["kaiming"].kernel.exponents, lambda base: 1.0, _kaiming, _kaiming),
    "xavier+": Scheme(TABLE_1["xavier"].learning.exponents, lambda base: 1.0, _xavier, _xavier),
    "xavier-": Scheme(TABLE_1["xavier"].kernel.exponents, lambda base: 1.0, _xavier, _xavier),
    "lazy": Scheme(TABLE_1["lazy"].kernel.exponents, lambda base: 1.0, _kaiming, _kaiming, center=True),
}
"""+ is the learning phase, - the kernel phase; `ntk` and `lazy` are kernel, `mean_field` is learning."""


MUP = "mup"
MUP_POWERS = {"sgd": (1.0, 0.0, -1.0, 1.0), "adam": (0.0, -1.0, -1.0, 0.0)}
"""Powers of kappa in the rates of first, hidden, and last weights and of biases (Yang et al. 2022, Table 3)."""


class Layer(NamedTuple):
    """A weight layer."""

    name: str
    module: nn.Linear | AnyConvolution

    @property
    def inputs(self) -> int:
        """Fan-in."""
        return fan_in(self.module, self.module.weight)

    @property
    def outputs(self) -> int:
        """Number of output channels."""
        return int(self.module.weight.shape[0])


@name_keywords()
def parametrize(
    model: nn.Module,
    scheme: str | Exponents,
    lr: float,
    *,
    base_width: int = 100,
    kappa: float | None = None,
    generator: torch.Generator | None = None,
    optimizer: Literal["sgd", "adam"] = "sgd",
) -> tuple[ScaledOutput, list[dict[str, Any]]]:
    """Put a network of any width into a phase.

    Draw weights, scale the output, and set learning rates by Table 1 of Xu & Ziyin 2024, or by the maximal update
    parametrization (muP) of Yang & Hu 2021.

        model, groups = fl.steer.parametrize(model, "mean_field", lr=0.05)
        optimizer = torch.optim.SGD(groups)

    With kappa = width / base_width, at width d with d0 inputs:

    | scheme | phase | output times | first weights | readout | learning rates |
    | --- | --- | --- | --- | --- | --- |
    | `ntk` | kernel | 1 / sqrt(d) | N(0, 2/d0) | N(0, 1) | lr |
    | `mean_field` | learning | sqrt(base_width) / d | N(0, 2/d0) | N(0, 1) | lr kappa |
    | `kaiming+` | learning | 1 / kappa | N(0, 2/d0) | N(0, 2/d) | lr kappa |
    | `kaiming-` | kernel | 1 | N(0, 2/d0) | N(0, 2/d) | lr / kappa |
    | `xavier+` | learning | 1 | N(0, 2/(d0 + d)) | N(0, 2/(d + C)) | lr |
    | `xavier-` | kernel | kappa | N(0, 2/(d0 + d)) | N(0, 2/(d + C)) | lr / kappa^2 |
    | `lazy` | kernel | kappa, f0 subtracted | N(0, 2/d0) | N(0, 2/d) | lr / kappa^2 |

    | `mup` | learning | 1 | N(0, 2/d0) | N(0, 2/(d kappa)) | lr kappa, lr, lr / kappa |
    | `mup`, Adam | learning | 1 | N(0, 2/d0) | N(0, 2/(d kappa)) | lr, lr / kappa, lr / kappa |

    `mup` follows Yang et al. 2022, Table 3, for networks of any depth; its rates are those of the first, hidden, and
    last weights. Biases have separate groups, named "0.bias", at the rate of the first weights, or lr for the readout.
    At `base_width` all rates are lr. `fl.width_check` checks whether a network follows it.

    The other schemes are the settings of App. B.3; ntk and mean_field, and the + and - of a pair, are equal at
    `base_width`. Errata: App. B.3 prints lr kappa for kaiming-, which is unstable; Table 1 needs lr / kappa. Table 1
    swaps the variances of the two layers of Kaiming. The initial output of `xavier-` grows as sqrt(d), but it is a
    kernel phase.

    `Exponents` define a custom scaling: first weights N(0, kappa^w / d0), readout N(0, kappa^u / base_width), output
    times kappa^gamma, rates lr kappa^rate_w and lr kappa^rate_u.

    The theory is for two weight layers. In deeper networks, hidden layers are drawn N(0, 2/fan_in) and have the rate of
    the first layer divided by kappa^d. This equals the first layer's rate for weights of order one divided by
    sqrt(fan_in) in the forward pass. It preserves the phase if first weights and readout are of order one (`ntk`,
    `mean_field`, `Exponents` with u = w = 0), and for `lazy` at a fixed width. Other schemes raise an error.

    Args:
        model: Linear and convolution layers in order of application; the first is W, the last is u with C outputs.
            Biases start at zero and learn with their layer. Norms raise an error, because they undo the scales. The
            weights are drawn in place.
        scheme: Name in the table, or exponents.
        lr: Learning rate at the base width.
        base_width: Width at which kappa is 1.
        kappa: Scaling parameter; by default the number of outputs of the first layer divided by `base_width`. Exponents
            with d = 0 (`lazy`) have a fixed width: pass kappa to set how lazy.
        generator: Source of random numbers for the weights.
        optimizer: "sgd" (with or without momentum), or "adam" for optimizers whose steps do not depend on the size of
            the gradient. Only `mup` is defined for both.

    Returns:
        The module with the scaled output, which shares the parameters, and optimizer groups with `name` and `lr`, one
        per layer (and, in `mup`, per bias). Do not multiply these rates by `.rate_factor`.
    """
    scaling = None if scheme == MUP else _scheme(scheme, base_width)
    if optimizer not in MUP_POWERS or (optimizer == "adam" and scaling is not None):
        raise InputValueError(
            f"optimizer={optimizer!r} with scheme={scheme!r}, expected 'sgd', or 'adam' with 'mup': the phases of Xu & "
            "Ziyin 2024 hold for gradient descent"
        )
    layers = _layers(model)
    rate, base = checked_number(lr, "lr"), checked_number(base_width, "base_width")
    if not rate > 0 or not base >= 1:
        raise InputValueError(f"lr={lr!r} and base_width={base_width!r}, expected lr > 0 and a width >= 1")
    growth = layers[0].outputs / base if kappa is None else checked_number(kappa, "kappa")
    if not growth > 0:
        raise InputValueError(f"kappa={kappa!r}, expected a number > 0")
    if scaling is None:
        _draw(layers, _maximal_update_variances(layers, growth), generator)
        return ScaledOutput(model, 1.0, center=False), _maximal_update_groups(layers, optimizer, rate, growth)
    exponents = scaling.exponents
    _refuse_deep(layers, exponents, scheme)
    _draw(layers, _variances(scaling, layers, scheme, growth, base_width), generator)
    powers = [exponents.rate_w, *[exponents.rate_w - exponents.d] * (len(layers) - 2), exponents.rate_u]
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in layer.module.parameters() if p.requires_grad],
            "lr": rate * growth**power,
            "name": layer.name,
        }
        for layer, power in zip(layers, powers, strict=True)
    ]
    scale = scaling.scale(base_width) * growth**exponents.gamma
    return ScaledOutput(model, scale, center=scaling.center), groups


def _draw(layers: list[Layer], variances: list[float], generator: torch.Generator | None) -> None:
    with torch.no_grad():
        for (_, module), variance in zip(layers, variances, strict=True):
            module.weight.normal_(0.0, variance**0.5, generator=generator)
            if module.bias is not None:
                module.bias.zero_()


def _maximal_update_variances(layers: list[Layer], growth: float) -> list[float]:
    """Return fan-in variances, with readout entries of order 1 / width in place of 1 / sqrt(width)."""
    *others, last = (_kaiming(layer.inputs, layer.outputs) for layer in layers)
    return [*others, last / growth]


def _maximal_update_groups(layers: list[Layer], optimizer: str, rate: float, growth: float) -> list[dict[str, Any]]:
    first, hidden, last, vector = MUP_POWERS[optimizer]
    powers = [first, *[hidden] * (len(layers) - 2), last]
    groups: list[dict[str, Any]] = []
    for layer, power in zip(layers, powers, strict=True):
        groups.append({"params": [layer.module.weight], "lr": rate * growth**power, "name": layer.name})
        bias = layer.module.bias
        if bias is not None and bias.requires_grad:
            bias_power = 0.0 if layer is layers[-1] else vector
            groups.append({"params": [bias], "lr": rate * growth**bias_power, "name": f"{layer.name}.bias"})
    return groups


def _scheme(scheme: Any, base_width: int) -> Scheme:
    if isinstance(scheme, Exponents):
        # variances are multiplied by powers of kappa later
        return Scheme(scheme, lambda base: 1.0, lambda i, o: 1 / i, lambda i, o: 1 / base_width)
    if not isinstance(scheme, str):
        raise InputTypeError(f"scheme is {type(scheme).__name__}, expected a name or fl.theory.phases.Exponents")
    if scheme not in SCHEMES:
        names = [*SCHEMES, MUP]
        hint = did_you_mean(scheme, names)
        raise InputValueError(f"scheme={scheme!r}, expected one of {', '.join(names)}, or Exponents{hint}")
    return SCHEMES[scheme]


def _variances(scaling: Scheme, layers: list[Layer], scheme: Any, growth: float, base_width: int) -> list[float]:
    first, *hidden, last = layers
    w, u = scaling.variance_w(first.inputs, first.outputs), scaling.variance_u(last.inputs, last.outputs)
    if isinstance(scheme, Exponents):
        w, u = w * growth**scheme.w, u * growth**scheme.u
    return [w, *(_kaiming(layer.inputs, layer.outputs) for layer in hidden), u]


def _layers(model: Any) -> list[Layer]:
    """Return the weight layers; raise if other modules have trainable parameters."""
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    layers, others = [], []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | AnyConvolution) and not getattr(module, "transposed", False):
            layers.append(Layer(name, module))
        elif any(p.requires_grad for p in module.parameters(recurse=False)):
            others.append(f"{name or 'root'} ({type(module).__name__})")
    frozen = [layer.name for layer in layers if not layer.module.weight.requires_grad]
    tied = len({layer.module.weight for layer in layers}) < len(layers)
    if others or frozen or tied or len(layers) < 2:
        wrong = f"{', '.join(others)} with parameters" if others else f"frozen layers {frozen}"
        wrong = wrong if others or frozen else "tied weights" if tied else f"{len(layers)} weight layers"
        raise InputValueError(
            f"the model has {wrong}, expected at least two linear or convolution layers, and no other trainable "
            "parameters: the phases of Xu & Ziyin 2024 hold for such networks; for other networks use "
            "fl.steer.scale_output"
        )
    return layers


def _refuse_deep(layers: list[Layer], exponents: Exponents, scheme: Any) -> None:
    if len(layers) > 2 and exponents.d != 0 and (exponents.u != 0 or exponents.w != 0):
        raise InputValueError(
            f"scheme={scheme!r} with {len(layers)} weight layers, expected two: the phase of deeper networks is "
            "unknown if first weights or readout shrink with width; use 'ntk' or 'mean_field'"
        )
