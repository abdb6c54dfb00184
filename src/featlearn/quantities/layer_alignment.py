"""How far consecutive layers are aligned, beside what random weights would show."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, Unpack

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from featlearn.audited_model import AuditedModel
from featlearn.errors import InputValueError
from featlearn.linear_maps.consecutive import Pair, consecutive
from featlearn.network.inputs import Inputs
from featlearn.planning.memory import refuse_over_budget
from featlearn.request import Settings
from featlearn.signatures import name_keywords

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
    return layer_alignment_of(AuditedModel(model, **settings), x, norm=norm)


def layer_alignment_of(audited: AuditedModel, x: Inputs, *, norm: Norm = "fro") -> LayerPairs[LayerPair]:
    """The layer alignment of an audited model: see `fl.layer_alignment`."""
    if norm not in ("fro", "spectral"):
        raise InputValueError(f"norm={norm!r}, expected 'fro' or 'spectral'")
    audited.request.refuse("layer_alignment", "group")
    with sdpa_kernel(SDPBackend.MATH), audited.measuring([x], keep_weights=True) as measurement:
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
