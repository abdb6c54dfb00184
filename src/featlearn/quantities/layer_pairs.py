"""Consecutive layers: how far their weights are aligned, and what gradient flow conserves between them."""

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from featlearn.audited_model import AuditedModel, Settings
from featlearn.errors import InputTypeError, InputValueError
from featlearn.graph.graph import REARRANGEMENTS
from featlearn.linear_maps.consecutive import Pair, consecutive
from featlearn.measurement import Measurement
from featlearn.network.inputs import Inputs
from featlearn.ops import Direct, Use
from featlearn.planning.memory import refuse_over_budget
from featlearn.signatures import name_keywords
from featlearn.torch_internals import saved

Norm = Literal["fro", "spectral"]


@dataclass(frozen=True)
class LayerPair:
    """The alignment of two weights that follow each other."""

    value: float
    """zeta = |U W| / (|U| |W|); nan with a `reason`."""
    random: float
    """What independent random weights of this shape have: 1 / sqrt(k) in the Frobenius norm."""
    width: int
    """k, the channels they share."""
    reason: str = ""
    """Why the value is undefined."""

    def __str__(self) -> str:
        if self.reason:
            return f"undefined: {self.reason}"
        return f"{self.value:.3f}, random {self.random:.3f}, width {self.width}"


T = TypeVar("T")


class LayerPairs(dict[tuple[str, str], T]):
    """(layer, next layer) -> what was asked of the two."""

    def __init__(self, pairs: Mapping[tuple[str, str], T], left_out: Mapping[str, str]) -> None:
        super().__init__(pairs)
        self.left_out = dict(left_out)
        """Trainable matrices that are in no pair because they cannot be read as linear maps: parameter -> reason."""

    def __str__(self) -> str:
        width = max([5, *(len(f"{a} -> {b}") for a, b in self)])
        lines = [f"{f'{a} -> {b}':{width}}  {pair}" for (a, b), pair in self.items()]
        return "\n".join([*lines, *(f"left out: {name}: {reason}" for name, reason in self.left_out.items())])


@name_keywords()
def layer_alignment(
    model: nn.Module, x: Inputs, *, norm: Norm = "fro", **settings: Unpack[Settings]
) -> LayerPairs[LayerPair]:
    """zeta = |U W| / (|U| |W|) of weights that follow each other in the executed forward pass.

    See Xu & Ziyin 2024, Sec. 3.2.

    Pairs are read off the computation: through activations, norms, pooling, residual sums and from the values of
    attention to what comes after it, until the next weight. In a residual network a layer follows every branch that
    its input is the sum of.

    Args:
        model, x: As for `fl.ntk`. A few samples of x are run, to see which layers follow each other.
        norm: `"fro"`, which for random weights vanishes with the width and for vectors is |cos|; or `"spectral"`.
        **settings: As for `fl.ntk`, without a `group`.

    Returns:
        (layer, next layer) -> `LayerPair`, with `.left_out`. For convolutions W is (channels, inputs * kernel area)
        and U (outputs * kernel area, channels), the channels being those between the two.
    """
    return layer_alignment_of(AuditedModel(model, **settings), x=x, norm=norm)


def layer_alignment_of(audited: AuditedModel, *, x: Inputs | None = None, norm: Norm = "fro") -> LayerPairs[LayerPair]:
    """Compute the alignment of consecutive weights: see `fl.layer_alignment`."""
    if norm not in ("fro", "spectral"):
        raise InputValueError(f"norm={norm!r}, expected 'fro' or 'spectral'")
    audited.request.refuse("layer_alignment", "group")
    with sdpa_kernel(SDPBackend.MATH), audited.measuring([audited.inputs(x)], keep_weights=True) as measurement:
        measurement.refuse_no_gradient(of_example=True)
        pairs, known = consecutive(measurement.example())
        for pair in pairs.values():
            if pair.after is not None:
                product = len(pair.after) * pair.before.shape[1] * pair.before.element_size()
                refuse_over_budget(audited.request.memory, product, "a product of two weights")
        return LayerPairs({names: pair_alignment(pair, norm) for names, pair in pairs.items()}, known.left_out)


def pair_alignment(pair: Pair, norm: Norm) -> LayerPair:
    """The alignment of one pair of a measurement that is under way."""
    before, after = pair.before, pair.after
    width = len(before)
    if after is None:
        return LayerPair(torch.nan, torch.nan, width, pair.reason)
    kind = "fro" if norm == "fro" else 2
    expected = width**-0.5 if norm == "fro" else random_spectral_alignment(len(after), width, before.shape[1])
    sizes = float(torch.linalg.norm(after, kind)) * float(torch.linalg.norm(before, kind))
    if sizes == 0.0:
        return LayerPair(torch.nan, expected, width, "a weight is zero")
    return LayerPair(float(torch.linalg.norm(after @ before, kind)) / sizes, expected, width)


def random_spectral_alignment(m: int, k: int, n: int) -> float:
    """Spectral |U W| / (|U| |W|) of large independent random matrices U (m, k) and W (k, n).

    The largest singular value of the product is sqrt(m n x*) with x* = min over psi > 0 of
    (1 + psi)(1 + psi k / m)(1 + psi k / n) / psi; square matrices give 3 sqrt(3) / 8.
    """
    # The derivative of log x*: psi/(1+psi) + r psi/(1+r psi) + s psi/(1+s psi) = 1, rising in psi.
    r, s = k / m, k / n
    low, high = 0.0, 1.0
    while high / (1 + high) + r * high / (1 + r * high) + s * high / (1 + s * high) < 1:
        high *= 2
    for _ in range(200):
        psi = (low + high) / 2
        rising = psi / (1 + psi) + r * psi / (1 + r * psi) + s * psi / (1 + s * psi) < 1
        low, high = (psi, high) if rising else (low, psi)
    psi = (low + high) / 2
    largest = (1 + psi) * (1 + r * psi) * (1 + s * psi) / psi
    return math.sqrt(m * n * largest) / ((math.sqrt(m) + math.sqrt(k)) * (math.sqrt(k) + math.sqrt(n)))


@dataclass(frozen=True)
class LayerBalance:
    """W W^T / eta - U^T U / eta' of two weights that follow each other, over the channels they share."""

    value: Tensor
    """(k, k) where nothing but linear ops lie between them; else its diagonal, (k,). float64."""
    conserved: bool
    """Whether gradient flow keeps it, for any loss."""
    reason: str = ""
    """Why it is not conserved, or has no value."""

    def __str__(self) -> str:
        state = "conserved" if self.conserved else f"not conserved: {self.reason}"
        return f"norm {float(self.value.norm()):.3g}, {state}"


_LINEAR = REARRANGEMENTS | {
    "MeanBackward0",
    "MeanBackward1",
    "SumBackward0",
    "SumBackward1",
    "AvgPool1DBackward0",
    "AvgPool2DBackward0",
    "AvgPool3DBackward0",
    "AdaptiveAvgPool2DBackward0",
    "ConstantPadNdBackward0",
    "NegBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "IndexBackward0",
}
_HOMOGENEOUS = _LINEAR | {
    "ReluBackward0",
    "LeakyReluBackward0",
    "ThresholdBackward0",
    "AbsBackward0",
    "MaxPool2DWithIndicesBackward0",
    "MaxPool3DWithIndicesBackward0",
    "SqueezeBackward1",
    "MaxPool1DBackward0",
}


@name_keywords()
def layer_balance(
    model: nn.Module,
    x: Inputs,
    *,
    rates: Mapping[str, float] | Optimizer | None = None,
    **settings: Unpack[Settings],
) -> LayerPairs[LayerBalance]:
    """What gradient flow conserves between consecutive layers: W W^T / eta - U^T U / eta'.

    See Atanasov et al. 2022, App. B, Xu & Ziyin 2024, Sec. 3.

    All of it for linear networks; its diagonal where activations are positively homogeneous (ReLU, leaky ReLU, max
    pooling) and for grouped layers. A bias of the first layer counts as one more column of W. Not conserved, and said
    so: layers with other activations, norms, residual sums or attention between them, weights that are used twice,
    rescaled or otherwise computed, biases that do not train, and training by anything but plain SGD.

    Args:
        model, x: As for `fl.ntk`. A few samples of x are run, to see which layers follow each other.
        rates: learning rates by layer (globs, the first that matches counts), or an optimizer whose groups have them;
            by default 1 for all.
        **settings: As for `fl.ntk`, without a `group`.
    """
    return layer_balance_of(AuditedModel(model, **settings), x=x, rates=rates)


def layer_balance_of(
    audited: AuditedModel, *, x: Inputs | None = None, rates: Mapping[str, float] | Optimizer | None = None
) -> LayerPairs[LayerBalance]:
    """Compute what gradient flow conserves between consecutive layers: see `fl.quantities.layer_balance`."""
    audited.request.refuse("layer_balance", "group")
    with sdpa_kernel(SDPBackend.MATH), audited.measuring([audited.inputs(x)], keep_weights=True) as measurement:
        measurement.refuse_no_gradient(of_example=True)
        pairs, known = consecutive(measurement.example())
        for pair in pairs.values():
            product = len(pair.before) ** 2 * pair.before.element_size()
            refuse_over_budget(audited.request.memory, product, "a product of two weights")
        eta = Rates(rates, measurement.originals, list(known.by_name))
        balances = {names: pair_balance(pair, names, eta, measurement) for names, pair in pairs.items()}
        return LayerPairs(balances, known.left_out)


class Rates:
    """Learning rates of layers and of their parameters."""

    def __init__(
        self, rates: Mapping[str, float] | Optimizer | None, parameters: Mapping[str, Tensor], layers: list[str]
    ) -> None:
        self.reason = ""
        """Why the optimizer does not follow the gradient."""
        self._given = rates
        self._of_parameter: dict[str, float] = {}
        if isinstance(rates, Optimizer):
            groups = [(p, float(group["lr"])) for group in rates.param_groups for p in group["params"]]
            by_parameter = {id(parameter): lr for parameter, lr in groups}
            self._of_parameter = {name: by_parameter.get(id(p), 0.0) for name, p in parameters.items()}
            plain = type(rates) is torch.optim.SGD
            if not plain or any(group["momentum"] or group["weight_decay"] for group in rates.param_groups):
                self.reason = f"{type(rates).__name__} with these settings does not follow the gradient"
        elif isinstance(rates, Mapping):
            for glob in rates:
                if not any(fnmatch.fnmatchcase(name, glob) for name in layers):
                    raise InputValueError(f"rates has {glob!r}, which matches no layer of {', '.join(layers)}")
            if not rates:
                raise InputValueError("rates is empty, expected a learning rate for every layer, {'*': 1.0} say")
        elif rates is not None:
            raise InputTypeError(f"rates is {type(rates).__name__}, expected a mapping of layer names or an optimizer")

    def of(self, layer: str, parameter: str) -> float:
        """The rate of one parameter of a layer; 0 if the optimizer does not have it."""
        if self._of_parameter:
            return self._of_parameter[parameter]
        if not isinstance(self._given, Mapping):
            return 1.0
        matched = [rate for glob, rate in self._given.items() if fnmatch.fnmatchcase(layer, glob)]
        if not matched:
            raise InputValueError(f"rates have no entry for {layer!r}, expected one for every layer; add '*'")
        return matched[0]


def pair_balance(pair: Pair, names: tuple[str, str], eta: Rates, measurement: Measurement) -> LayerBalance:
    """The balance of one pair of a measurement that is under way."""
    if pair.after is None:
        return LayerBalance(pair.before.new_full((len(pair.before),), torch.nan), False, pair.reason)
    rate, next_rate = (eta.of(n, one.parameters[0]) for n, one in zip(names, (pair.first, pair.second), strict=True))
    for name, found in zip(names, (rate, next_rate), strict=True):
        if not found > 0:
            raise InputValueError(f"the learning rate of {name!r} is {found}, expected one above zero")
    bias, bias_name = _bias(pair, measurement)
    bias_rate = rate if bias_name is None else eta.of(names[0], bias_name)
    columns = pair.before / rate**0.5
    if bias is not None and bias_rate:
        columns = torch.cat([columns, bias[:, None] / bias_rate**0.5], 1)
    scaled = {node for node in pair.between if _constant_scale(node)}
    kinds = {node.name() for node in pair.between - scaled}
    if kinds <= _LINEAR and pair.first.blocks == pair.second.blocks == 1:
        value = columns @ columns.mT - pair.after.mT @ pair.after / next_rate
    else:
        value = columns.square().sum(1) - pair.after.square().sum(0) / next_rate
    reason = eta.reason or _broken(pair, kinds, bias_name, bias_rate, measurement)
    return LayerBalance(value, not reason, reason)


def _broken(pair: Pair, kinds: set[str], bias: str | None, bias_rate: float, measurement: Measurement) -> str:
    """Why gradient flow does not conserve the balance of a pair; empty if it does."""
    uses = measurement.example().uses
    names = [*pair.first.parameters, *pair.second.parameters, *([] if bias is None else [bias])]
    if kinds - _HOMOGENEOUS:
        return f"{', '.join(sorted(kinds - _HOMOGENEOUS))} between them"
    if not pair.alone:
        return "other layers feed the second, are fed by the first, or one is used twice"
    if not pair.first.plain or not pair.second.plain:
        return "a weight is computed from its parameters"
    if any(len(uses[name].readings) != 1 for name in names):
        return "a weight or a bias is used elsewhere, too"
    if (bias is None and _adds_constant(pair.first.readings[0].use)) or bias_rate == 0.0:
        return "the first layer has a bias that is not trained"
    return ""


def _adds_constant(use: Use) -> bool:
    """Whether the op adds a bias, asked where none that trains was found."""
    name = use.node.name()
    if name.startswith(("Addmm", "Baddbmm")):
        return True
    return name.startswith("Convolution") and use.saved("bias_sym_sizes_opt") is not None


def _constant_scale(node: Any) -> bool:
    """Whether a node multiplies or divides by a number."""
    if node.name() not in ("MulBackward0", "DivBackward0"):
        return False
    factors = [saved(node, side) for side in ("self", "other")]
    sizes = [factor.numel() if isinstance(factor, Tensor) else 1 for factor in factors if factor is not None]
    constant = sum(child is not None for child, _ in node.next_functions) == 1
    return constant and sizes == [1]


def _bias(pair: Pair, measurement: Measurement) -> tuple[Tensor | None, str | None]:
    """What the first op adds to its product, and the parameter it is."""
    node = pair.first.readings[0].use.node
    for name, uses in measurement.example().uses.items():
        for reading in uses.readings:
            if reading.use.node is node and isinstance(reading.form, Direct):
                bias = measurement.parameters[name].detach().double().flatten()
                bias = bias if pair.first.units is None else bias[pair.first.units]
                return (bias if len(bias) == len(pair.before) else None), name
    return None, None
