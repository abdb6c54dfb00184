"""What one layer's weights and gradients say of feature learning: NFM, AGOP, PTK covariance and their correlations."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from featlearn.errors import InputValueError

Kind = Literal["cosine", "pearson"]
QUANTITIES = (
    "uncentered", "centered", "double_centered", "ptk_centered", "centered_share", "double_centered_share",
    "weight_change",
)  # fmt: skip
"""The numbers of a layer."""


@dataclass(frozen=True)
class Correlations:
    """How far a layer's weights agree with the gradients that arrive at it, in four centrings.

    See Beaglehole et al. 2024, Sec. 3 and App. C.

    rho(A, B) is the cosine <A, B> / (|A| |B|), or Pearson's correlation of all entries.
    """

    uncentered: float
    """UC-NFC: rho(W^T W, W^T K W)."""
    centered: float
    """C-NFC: rho(Wb^T Wb, Wb^T K Wb), Wb = W - W0."""
    double_centered: float
    """rho(Wb^T Wb, Wb^T Kb Wb) with Kb = (J - J0)^T (J - J0) / rows."""
    ptk_centered: float
    """rho(W0^T W0, W0^T Kb W0)."""


@dataclass(frozen=True)
class LayerFeatures:
    """One weight matrix W (k, n), h = W x, and the gradients J of the outputs with respect to h (rows, k).

    Rows are samples, positions and outputs; K = J^T J / (samples * positions): the average over samples and positions
    and the sum over outputs. A position is a token or a place of a convolution's kernel; rows x of a convolution are
    its zero-padded patches, channels first. All matrices are float64.

    The AGOP is that of the gradient through this layer alone, dx = W^T dh. In attention the gradient of a token also
    runs through the two other projections; that is another matrix.

    Without `initial=` everything that compares with initialisation is nan; so is a correlation with a zero matrix, as
    C-NFC before the first step (Beaglehole et al. 2024 calls it 0). `undefined` gives the reasons.
    """

    weight: Tensor
    """W, (k, n); the blocks of a grouped layer stand on the diagonal."""
    ptk_covariance: Tensor
    """K, (k, k)."""
    initial_weight: Tensor | None = None
    """W0, (k, n)."""
    ptk_change: Tensor | None = None
    """Kb = (J - J0)^T (J - J0) / (samples * positions), (k, k)."""
    is_readout: bool = False
    """Whether h is the output itself, up to a constant: over all outputs K is then a multiple of the identity, and
    UC-NFC is 1 whatever was learned."""
    role: str | None = None
    """`"q"`, `"k"`, `"v"` where h enters attention as queries, keys or values."""
    rows: int = 0
    """Samples times positions."""
    parameters: tuple[str, ...] = ()
    """Names of the parameters that the weight is, or is made from."""

    @property
    def nfm(self) -> Tensor:
        """The neural feature matrix F = W^T W, (n, n)."""
        return self.weight.mT @ self.weight

    @property
    def agop(self) -> Tensor:
        """The average gradient outer product G = W^T K W, (n, n)."""
        return self.weight.mT @ self.ptk_covariance @ self.weight

    @property
    def centered_nfm(self) -> Tensor:
        """Wb^T Wb with Wb = W - W0, (n, n)."""
        return self._weight_shift.mT @ self._weight_shift

    @property
    def centered_agop(self) -> Tensor:
        """Wb^T K Wb, (n, n)."""
        return self._weight_shift.mT @ self.ptk_covariance @ self._weight_shift

    @property
    def uncentered(self) -> float:
        """UC-NFC, rho(W^T W, W^T K W)."""
        return self._cosines.uncentered

    @property
    def centered(self) -> float:
        """C-NFC, rho(Wb^T Wb, Wb^T K Wb)."""
        return self._cosines.centered

    @property
    def double_centered(self) -> float:
        """rho(Wb^T Wb, Wb^T Kb Wb)."""
        return self._cosines.double_centered

    @property
    def ptk_centered(self) -> float:
        """rho(W0^T W0, W0^T Kb W0)."""
        return self._cosines.ptk_centered

    @cached_property
    def centered_share(self) -> float:
        """tr(Wb^T Wb Wb^T K Wb) / tr(W^T W W^T K W): how much of the agreement training has made; may exceed 1."""
        if self.initial_weight is None:
            return torch.nan
        return _ratio(_overlap(self._weight_shift, self._arriving), _overlap(self.weight, self._arriving))

    @cached_property
    def double_centered_share(self) -> float:
        """tr(Wb^T Wb Wb^T Kb Wb) / tr(Wb^T Wb Wb^T K Wb)."""
        if self.initial_weight is None or self._changed is None:
            return torch.nan
        shift = self._weight_shift
        return _ratio(_overlap(shift, self._changed), _overlap(shift, self._arriving))

    @property
    def weight_change(self) -> float:
        """|W - W0| / |W|."""
        if self.initial_weight is None:
            return torch.nan
        return _ratio(float(self._weight_shift.norm()), float(self.weight.norm()))

    def correlations(self, kind: Kind = "cosine") -> Correlations:
        """All four correlations: `"cosine"` as in Beaglehole et al. 2024, `"pearson"` as in its authors' code.

        Pearson's subtracts the mean of all entries of each matrix first.
        """
        if kind not in ("cosine", "pearson"):
            raise InputValueError(f"kind={kind!r}, expected 'cosine' or 'pearson'")
        first, change, initial = self._arriving, self._changed, self.initial_weight
        shift = None if initial is None else self._weight_shift
        return Correlations(
            _correlation(self.weight, first, kind),
            _correlation(shift, first, kind),
            _correlation(shift, change, kind),
            _correlation(initial, change, kind),
        )

    @property
    def undefined(self) -> Mapping[str, str]:
        """Quantity -> why it is nan."""
        return {name: self._reason(name) for name in QUANTITIES if getattr(self, name) != getattr(self, name)}

    def _reason(self, name: str) -> str:
        if name != "uncentered" and self.initial_weight is None:
            return "no initial= was given: there is nothing to compare with"
        if not bool(torch.isfinite(self.weight).all()) or not bool(torch.isfinite(self.ptk_covariance).all()):
            return "weights or gradients are not finite"
        if name in ("uncentered", "centered_share", "weight_change"):
            return "the weights, or the gradients that arrive at the layer, are zero"
        if name in ("centered", "double_centered", "double_centered_share") and not bool(self._weight_shift.any()):
            return "the weights have not moved from where they began"
        return "the gradients that arrive at the layer are zero, or have not changed"

    @property
    def _weight_shift(self) -> Tensor:
        if self.initial_weight is None:
            raise InputValueError("no initial= was given, expected the state dict at initialisation to compare with")
        return self.weight - self.initial_weight

    @cached_property
    def _cosines(self) -> Correlations:
        return self.correlations()

    @cached_property
    def _arriving(self) -> "_Spread":
        return _Spread(self.ptk_covariance)

    @cached_property
    def _changed(self) -> "_Spread | None":
        return None if self.ptk_change is None else _Spread(self.ptk_change)


@dataclass(frozen=True)
class _Spread:
    """A covariance with its root, which several correlations share and which costs more than all the rest of them."""

    covariance: Tensor

    @cached_property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.covariance).all())

    @cached_property
    def root(self) -> Tensor:
        return _root(self.covariance)


def _root(covariance: Tensor) -> Tensor:
    """The symmetric square root: traces of products are then sums of squares, and nothing cancels."""
    values, vectors = torch.linalg.eigh(covariance)
    # What is zero but for rounding would come out of the root with half of its digits.
    rounding = len(values) * torch.finfo(values.dtype).eps * values.abs().max()
    root: Tensor = (vectors * torch.where(values > rounding, values, 0.0).sqrt()) @ vectors.mT
    return root


def _overlap(weight: Tensor, spread: _Spread) -> float:
    """tr(W^T W W^T K W) = |M S|^2 with M = W W^T and S^2 = K: k x k matrices, whatever the number of inputs."""
    if not spread.finite or not _finite(weight):
        return torch.nan
    return float((weight @ weight.mT @ spread.root).square().sum())


def _finite(matrix: Tensor) -> bool:
    return bool(torch.isfinite(matrix).all())


def _correlation(weight: Tensor | None, spread: _Spread | None, kind: Kind) -> float:
    """rho(W^T W, W^T K W)."""
    if weight is None or spread is None or not spread.finite or not _finite(weight):
        return torch.nan
    weight = _scaled(weight)
    if kind == "pearson":
        grown = weight.mT @ _scaled(spread.covariance) @ weight
        first, second = (m - m.mean() for m in (weight.mT @ weight, grown))
        return _ratio(float((first * second).sum()), float(first.norm() * second.norm()))
    gram, root = weight @ weight.mT, _scaled(spread.root)
    mixed = gram @ root
    return _ratio(float(mixed.square().sum()), float(gram.norm() * (root @ mixed).norm()))


def _scaled(matrix: Tensor) -> Tensor:
    """Scales drop out; without this fourth powers of small weights and gradients would underflow."""
    return matrix / matrix.abs().max() if bool(matrix.any()) else matrix


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator != 0.0 else torch.nan


class NeuralFeatures(dict[str, LayerFeatures]):
    """Layer -> its features, in the order of the model's parameters; printed, a table."""

    def __init__(self, layers: Mapping[str, LayerFeatures], left_out: Mapping[str, str]) -> None:
        super().__init__(layers)
        self.left_out = dict(left_out)
        """Trainable matrices that are no linear map of their input, or cannot be read as one: parameter -> reason."""

    def mean(self, quantity: str = "uncentered") -> float:
        """The average of a quantity over layers, readouts (always 1) and undefined values left out."""
        if quantity not in QUANTITIES:
            raise InputValueError(f"quantity={quantity!r}, expected one of {', '.join(QUANTITIES)}")
        values = [getattr(layer, quantity) for layer in self.values() if not layer.is_readout]
        defined = [value for value in values if value == value]
        return sum(defined) / len(defined) if defined else torch.nan

    def __str__(self) -> str:
        width = max([5, *map(len, self)])
        lines = [f"{'layer':{width}}  {'shape':>13}  {'UC-NFC':>7}  {'C-NFC':>7}  {'C/UC':>7}  {'|W-W0|/|W|':>10}"]
        for name, layer in self.items():
            shape = " x ".join(map(str, layer.weight.shape))
            numbers = f"{layer.uncentered:7.3f}  {layer.centered:7.3f}  {layer.centered_share:7.3f}"
            note = "  readout" if layer.is_readout else ""
            lines.append(f"{name or '(root)':{width}}  {shape:>13}  {numbers}  {layer.weight_change:10.3f}{note}")
        lines += [f"left out: {name}: {reason}" for name, reason in self.left_out.items()]
        return "\n".join(lines)
