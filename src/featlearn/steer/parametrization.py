"""Networks in the kernel or the learning phase, by the scaling of weights, output and rates.

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
    """A scaling: its exponents, and what they start from."""

    exponents: Exponents
    scale: Callable[[int], float]
    """base width -> multiplier of the output at that width"""
    variance_w: Callable[[int, int], float]
    """(fan_in, fan_out) -> variance of the first weights"""
    variance_u: Callable[[int, int], float]
    """the same for the readout"""
    center: bool = False


def _kaiming(inputs: int, outputs: int) -> float:
    return 2 / inputs


def _xavier(inputs: int, outputs: int) -> float:
    return 2 / (inputs + outputs)


def _one(inputs: int, outputs: int) -> float:
    return 1.0


SCHEMES: dict[str, Scheme] = {
    "ntk": Scheme(TABLE_1["ntk"].kernel.exponents, lambda base: base**-0.5, _kaiming, _one),
    "mean_field": Scheme(TABLE_1["mean_field"].learning.exponents, lambda base: base**-0.5, _kaiming, _one),
    "kaiming+": Scheme(TABLE_1["kaiming"].learning.exponents, lambda base: 1.0, _kaiming, _kaiming),
    "kaiming-": Scheme(TABLE_1["kaiming"].kernel.exponents, lambda base: 1.0, _kaiming, _kaiming),
    "xavier+": Scheme(TABLE_1["xavier"].learning.exponents, lambda base: 1.0, _xavier, _xavier),
    "xavier-": Scheme(TABLE_1["xavier"].kernel.exponents, lambda base: 1.0, _xavier, _xavier),
    "lazy": Scheme(TABLE_1["lazy"].kernel.exponents, lambda base: 1.0, _kaiming, _kaiming, center=True),
}
"""+ is the learning phase, - the kernel phase; `ntk` and `lazy` are kernel, `mean_field` is learning."""


MUP = "mup"
MUP_POWERS = {"sgd": (1.0, 0.0, -1.0, 1.0), "adam": (0.0, -1.0, -1.0, 0.0)}
"""Powers of kappa in the rates of first, hidden and last weights and of biases (Yang et al. 2022, Table 3)."""


class Layer(NamedTuple):
    """A weight layer."""

    name: str
    module: nn.Linear | AnyConvolution

    @property
    def inputs(self) -> int:
        """fan-in"""
        return fan_in(self.module, self.module.weight)

    @property
    def outputs(self) -> int:
        """channels that it gives"""
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

    Draws the weights, multiplies the output and sets the rates by Table 1 of Xu & Ziyin 2024, or by the maximal update
    parametrization, muP, of Yang & Hu 2021.

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

    `mup` is that of Yang et al. 2022, Table 3, for networks of any depth: rates are those of the first, the hidden and
    the last weights. Its biases have groups of their own, named "0.bias": they learn at the rate of the first weights,
    those of the readout at lr. At `base_width` all rates are lr. `fl.width_check` tells whether a network follows it.

    The others are the settings of App. B.3; ntk and mean_field, and the + and - of a pair, coincide at `base_width`.
    Errata: App. B.3 prints lr kappa for kaiming-, which is unstable; Table 1 needs lr / kappa. Table 1 has the
    variances of the two layers of Kaiming exchanged. `xavier-` starts with an output that grows as sqrt(d), and is a
    kernel phase all the same.

    `Exponents` are a scaling of your own: first weights N(0, kappa^w / d0), readout N(0, kappa^u / base_width), output
    times kappa^gamma, rates lr kappa^rate_w and lr kappa^rate_u.

    The theory is that of two weight layers. For more, the layers in between are drawn N(0, 2/fan_in) and get the rate
    of the first divided by kappa^d: what weights of order one, divided by sqrt(fan_in) where they are used, would
    have at the rate of the first. That keeps the phase where first weights and readout are of order one (`ntk`,
    `mean_field`, `Exponents` with u = w = 0), and, at a fixed width, for `lazy`; others are refused.

    Args:
        model: linear and convolution layers, in the order in which they are applied; the first is W, the last is u, its
            outputs C. Biases start at zero and learn with their layer. Norms are refused: they undo the scales. The
            weights are drawn in place.
        scheme: a name of the table, or exponents.
        lr: learning rate at the base width.
        base_width: width at which kappa is 1.
        kappa: the scaling parameter, where it is not to be the width of the first layer, in outputs, divided by
            `base_width`. Exponents with d = 0 (`lazy`) keep the width: give kappa to say how lazy.
        generator: randomness of the weights.
        optimizer: "sgd", with momentum or not, or "adam" and others whose steps do not depend on the size of the
            gradient. Only `mup` is defined for both.

    Returns:
        The module that gives the scaled output, around the same parameters, and groups for an optimizer, one for each
        layer (and, in `mup`, its bias), with its `name` and `lr`. Do not multiply these rates by `.rate_factor` again.
    """
    chosen = None if scheme == MUP else _scheme(scheme, base_width)
    if optimizer not in MUP_POWERS or (optimizer == "adam" and chosen is not None):
        raise InputValueError(
            f"optimizer={optimizer!r} with scheme={scheme!r}, expected 'sgd', or 'adam' with 'mup': the phases of Xu & "
            "Ziyin 2024 are those of gradient descent"
        )
    layers = _layers(model)
    rate, base = checked_number(lr, "lr"), checked_number(base_width, "base_width")
    if not rate > 0 or not base >= 1:
        raise InputValueError(f"lr={lr!r} and base_width={base_width!r}, expected lr > 0 and a width >= 1")
    growth = layers[0].outputs / base if kappa is None else checked_number(kappa, "kappa")
    if not growth > 0:
        raise InputValueError(f"kappa={kappa!r}, expected a number > 0")
    if chosen is None:
        _draw(layers, _maximal_update_variances(layers, growth), generator)
        return ScaledOutput(model, 1.0, center=False), _maximal_update_groups(layers, optimizer, rate, growth)
    exponents = chosen.exponents
    _refuse_deep(layers, exponents, scheme)
    _draw(layers, _variances(chosen, layers, scheme, growth, base_width), generator)
    powers = [exponents.rate_w, *[exponents.rate_w - exponents.d] * (len(layers) - 2), exponents.rate_u]
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in layer.module.parameters() if p.requires_grad],
            "lr": rate * growth**power,
            "name": layer.name,
        }
        for layer, power in zip(layers, powers, strict=True)
    ]
    scale = chosen.scale(base_width) * growth**exponents.gamma
    return ScaledOutput(model, scale, center=chosen.center), groups


def _draw(layers: list[Layer], variances: list[float], generator: torch.Generator | None) -> None:
    with torch.no_grad():
        for (_, module), variance in zip(layers, variances, strict=True):
            module.weight.normal_(0.0, variance**0.5, generator=generator)
            if module.bias is not None:
                module.bias.zero_()


def _maximal_update_variances(layers: list[Layer], growth: float) -> list[float]:
    """Fan-in scaling, and a readout whose entries shrink as 1 / width, not 1 / sqrt(width)."""
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
            own = 0.0 if layer is layers[-1] else vector
            groups.append({"params": [bias], "lr": rate * growth**own, "name": f"{layer.name}.bias"})
    return groups


def _scheme(scheme: Any, base_width: int) -> Scheme:
    if isinstance(scheme, Exponents):
        own = scheme  # the variances grow with kappa, which is only known later
        return Scheme(own, lambda base: 1.0, lambda i, o: 1 / i, lambda i, o: 1 / base_width)
    if not isinstance(scheme, str):
        raise InputTypeError(f"scheme is {type(scheme).__name__}, expected a name or fl.theory.phases.Exponents")
    if scheme not in SCHEMES:
        known = [*SCHEMES, MUP]
        hint = did_you_mean(scheme, known)
        raise InputValueError(f"scheme={scheme!r}, expected one of {', '.join(known)}, or Exponents{hint}")
    return SCHEMES[scheme]


def _variances(chosen: Scheme, layers: list[Layer], scheme: Any, growth: float, base_width: int) -> list[float]:
    first, *hidden, last = layers
    w, u = chosen.variance_w(first.inputs, first.outputs), chosen.variance_u(last.inputs, last.outputs)
    if isinstance(scheme, Exponents):
        w, u = w * growth**scheme.w, u * growth**scheme.u
    return [w, *(_kaiming(layer.inputs, layer.outputs) for layer in hidden), u]


def _layers(model: Any) -> list[Layer]:
    """The weight layers, which must hold every trainable parameter."""
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
        wrong = f"{', '.join(others)} with parameters of their own" if others else f"frozen layers {frozen}"
        wrong = wrong if others or frozen else "tied weights" if tied else f"{len(layers)} weight layers"
        raise InputValueError(
            f"the model has {wrong}, expected at least two linear or convolution layers, trainable, and nothing else "
            "that trains: the phases of Xu & Ziyin 2024 are those of such networks; for others scale the output, "
            "fl.steer.scale_output"
        )
    return layers


def _refuse_deep(layers: list[Layer], exponents: Exponents, scheme: Any) -> None:
    if len(layers) > 2 and exponents.d != 0 and (exponents.u != 0 or exponents.w != 0):
        raise InputValueError(
            f"scheme={scheme!r} with {len(layers)} weight layers, expected two: first weights or a readout that shrink "
            "with the width have no known phase in deeper networks; take 'ntk' or 'mean_field'"
        )
