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
    "uncentered",
    "centered",
    "double_centered",
    "ptk_centered",
    "centered_share",
    "double_centered_share",
    "weight_change",
)
"""The numbers of a layer."""


@dataclass(frozen=True)
class Correlations:
    """How far a layer's weights agree with the gradients that arrive at it, in four centerings.

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
class Deviations:
    """How far K and Kb, estimated from random directions, deviate in independent parts of the draw.

    Parts are groups of samples and, within them, of directions. Deviations D_p are from the mean of the same samples,
    scaled for the sum over parts of f(D_p)^2 to be the variance of f(K) for any linear f: squares of entries, and
    quadratic forms, are too large by the sum over parts of those of the deviations.
    """

    covariance: Tensor
    """(parts, k, k), of K."""
    change: Tensor | None
    """(parts, k, k), of Kb, which the same directions give."""
    freedom: int
    """How many of the parts are independent; 0 where a single direction shows no deviation."""


@dataclass(frozen=True)
class LayerFeatures:
    """One weight matrix W (k, n), h = W x, and the gradients J of the outputs with respect to h (rows, k).

    Rows are samples, positions and outputs; K = J^T J / (samples * positions): the average over samples and positions
    and the sum over outputs. A position is a token or a place of a convolution's kernel; rows x of a convolution are
    its zero-padded patches, channels first. All matrices are float64.

    The AGOP is that of the gradient through this layer alone, dx = W^T dh. In attention the gradient of a token also
    runs through the two other projections; that is another matrix.

    With `outputs=fl.Directions(k)` K and Kb are estimates, and so is every number made from them. Norms of matrices are
    then free of the part that is noise, which would make every correlation too small: a readout has 1 up to its error,
    and may exceed it. `errors` has the standard errors. They are widened by Student's t, so that two of them hold the
    exact number in about 95 of 100 draws; with one direction (k = 1) nothing shows them, and correlations are too
    small.

    Without `initial=` everything that compares with initialization is nan; so is a correlation with a zero matrix, as
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
    deviations: Deviations | None = None
    """How far K and Kb deviate where they are estimates; None where they are exact."""

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
        return self._numbers["uncentered"][0]

    @property
    def centered(self) -> float:
        """C-NFC, rho(Wb^T Wb, Wb^T K Wb)."""
        return self._numbers["centered"][0]

    @property
    def double_centered(self) -> float:
        """rho(Wb^T Wb, Wb^T Kb Wb)."""
        return self._numbers["double_centered"][0]

    @property
    def ptk_centered(self) -> float:
        """rho(W0^T W0, W0^T Kb W0)."""
        return self._numbers["ptk_centered"][0]

    @property
    def centered_share(self) -> float:
        """tr(Wb^T Wb Wb^T K Wb) / tr(W^T W W^T K W): how much of the agreement training has made; may exceed 1."""
        return self._numbers["centered_share"][0]

    @property
    def double_centered_share(self) -> float:
        """tr(Wb^T Wb Wb^T Kb Wb) / tr(Wb^T Wb Wb^T K Wb)."""
        return self._numbers["double_centered_share"][0]

    @property
    def weight_change(self) -> float:
        """|W - W0| / |W|."""
        return self._numbers["weight_change"][0]

    def correlations(self, kind: Kind = "cosine") -> Correlations:
        """All four correlations: `"cosine"` as in Beaglehole et al. 2024, `"pearson"` as in its authors' code.

        Pearson's subtracts the mean of all entries of each matrix first.
        """
        return Correlations(*(value for value, _ in self._correlated(kind)))

    def correlation_errors(self, kind: Kind = "cosine") -> Correlations:
        """Standard errors of `correlations(kind)`: 0 where these are exact, nan where nothing shows their error."""
        return Correlations(*(error for _, error in self._correlated(kind)))

    @property
    def errors(self) -> Mapping[str, float]:
        """Quantity -> its standard error: 0 where it is exact, nan where it is undefined or nothing shows its error."""
        return {name: self._numbers[name][1] for name in QUANTITIES}

    @cached_property
    def _numbers(self) -> Mapping[str, tuple[float, float]]:
        """Quantity -> its value and standard error."""
        names = ("uncentered", "centered", "double_centered", "ptk_centered")
        numbers = dict.fromkeys(QUANTITIES, (torch.nan, torch.nan)) | dict(
            zip(names, self._correlated("cosine"), strict=True)
        )
        if self.initial_weight is None:
            return numbers
        shift, first, changed = self._weight_shift, self._gradient_spread, self._change_spread
        numbers["weight_change"] = _ratio(float(shift.norm()), float(self.weight.norm())), 0.0
        numbers["centered_share"] = _share((shift, first), (self.weight, first))
        if changed is not None:
            numbers["double_centered_share"] = _share((shift, changed), (shift, first))
        return numbers

    def _correlated(self, kind: Kind) -> list[tuple[float, float]]:
        """Every correlation with its error, in the order of `Correlations`."""
        if kind not in ("cosine", "pearson"):
            raise InputValueError(f"kind={kind!r}, expected 'cosine' or 'pearson'")
        first, change, initial = self._gradient_spread, self._change_spread, self.initial_weight
        shift = None if initial is None else self._weight_shift
        pairs = [(self.weight, first), (shift, first), (shift, change), (initial, change)]
        return [_correlation(weight, spread, kind) for weight, spread in pairs]

    @property
    def undefined(self) -> Mapping[str, str]:
        """Quantity -> why it is nan."""
        return {name: self._reason(name) for name in QUANTITIES if getattr(self, name) != getattr(self, name)}

    def _reason(self, name: str) -> str:
        if name != "uncentered" and self.initial_weight is None:
            return "no initial= was given, the state dict at initialization: there is nothing to compare with"
        if not bool(torch.isfinite(self.weight).all()) or not bool(torch.isfinite(self.ptk_covariance).all()):
            return "weights or gradients are not finite"
        if self.deviations is not None and bool(self.ptk_covariance.any()) and self._drowned(name):
            return "noise: what the random directions show is not larger than its error; take more of them"
        if name in ("uncentered", "centered_share", "weight_change"):
            return "the weights, or the gradients that arrive at the layer, are zero"
        if name in ("centered", "double_centered", "double_centered_share") and not bool(self._weight_shift.any()):
            return "the weights have not moved from where they began"
        return "the gradients that arrive at the layer are zero, or have not changed"

    def _drowned(self, name: str) -> bool:
        weight = {"uncentered": self.weight, "ptk_centered": self.initial_weight}.get(name)
        if name in ("centered", "double_centered"):
            weight = self._weight_shift
        spread = self._change_spread if name in ("double_centered", "ptk_centered") else self._gradient_spread
        if weight is None or spread is None or not bool(weight.any()) or not bool(spread.covariance.any()):
            return False
        return not _Form(_scaled(weight), "cosine").size(spread) > 0

    @property
    def _weight_shift(self) -> Tensor:
        if self.initial_weight is None:
            raise InputValueError("no initial= was given, expected the state dict at initialization to compare with")
        return self.weight - self.initial_weight

    @cached_property
    def _gradient_spread(self) -> "_Spread":
        known = self.deviations
        return _Spread(self.ptk_covariance, *((None, 0) if known is None else (known.covariance, known.freedom)))

    @cached_property
    def _change_spread(self) -> "_Spread | None":
        if self.ptk_change is None:
            return None
        known = self.deviations
        return _Spread(self.ptk_change, *((None, 0) if known is None else (known.change, known.freedom)))


@dataclass(frozen=True)
class _Spread:
    """A covariance with its root, which several correlations share and which costs more than all the rest of them."""

    covariance: Tensor
    deviations: Tensor | None = None
    """(parts, k, k) where it is an estimate."""
    freedom: int = 0

    @cached_property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.covariance).all())

    @cached_property
    def root(self) -> Tensor:
        return _root(self.covariance)

    def along(self, weight: Tensor) -> "tuple[Tensor, _Spread]":
        """R and Q^T K Q for W = Q R: every number of W and K is one of them, and they are n x n where n < k.

        A wide layer of few inputs takes no root of a k x k matrix then. Twice as many units as inputs make up for the
        root that several weights would share.
        """
        if weight.shape[0] < 2 * weight.shape[1] or not self.finite or not _finite(weight):
            return weight, self
        basis, rest = torch.linalg.qr(weight)
        return rest, _Spread(basis.mT @ self.covariance @ basis)


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
    weight, spread = spread.along(weight)
    return float((weight @ weight.mT @ spread.root).square().sum())


def _share(above: tuple[Tensor, _Spread], below: tuple[Tensor, _Spread]) -> tuple[float, float]:
    """The ratio of two overlaps and its error; both are linear in the covariance, and their errors are correlated."""
    first, second = _overlap(*above), _overlap(*below)
    value = _ratio(first, second)
    if above[1].deviations is None or below[1].deviations is None or value != value:
        return value, value - value
    if not below[1].freedom:
        return value, torch.nan
    moved = [torch.einsum("pij,ij->p", s.deviations, _power(w)) for w, s in (above, below) if s.deviations is not None]
    deviations = (moved[0] - value * moved[1]) / second
    # To second order: the mean of a ratio is not the ratio of the means.
    curved = (value * moved[1].square() - moved[0] * moved[1]).sum() / second**2
    from featlearn.linalg.sampling import student  # late: only random directions need it

    return value - float(curved), float(deviations.norm()) * student(below[1].freedom)


def _power(weight: Tensor) -> Tensor:
    """(W W^T)^2: tr(W^T W W^T K W) = <(W W^T)^2, K>."""
    gram = weight @ weight.mT
    return gram @ gram


class _Form:
    """<W^T W, W^T K W> and <W^T K W, W^T K' W>, with the mean of all entries taken off for Pearson's."""

    def __init__(self, weight: Tensor, kind: Kind) -> None:
        self.gram = weight @ weight.mT
        self.linear = self.gram @ self.gram
        self.square = float(self.gram.square().sum())
        self.ones: Tensor | None = None
        if kind == "pearson":
            # W 1 / sqrt(n): the sum of all entries of W^T K W, divided by n, is then ones^T K ones.
            self.ones = weight.sum(1) / weight.shape[1] ** 0.5
            whole = float(self.ones.square().sum())
            self.linear = self.linear - whole * torch.outer(self.ones, self.ones)
            self.square -= whole**2

    def weighted(self, covariance: Tensor) -> Tensor:
        """B with <B, K'> = <W^T K W, W^T K' W>."""
        whole = self.gram @ covariance @ self.gram
        if self.ones is not None:
            whole = whole - (self.ones @ covariance @ self.ones) * torch.outer(self.ones, self.ones)
        return whole

    def own(self, covariance: Tensor) -> float:
        """|W^T K W|^2 = tr(M K M K) with M = W W^T, by one product of matrices."""
        half = self.gram @ covariance
        whole = float((half * half.mT).sum())
        return whole if self.ones is None else whole - float(self.ones @ covariance @ self.ones) ** 2

    def size(self, spread: _Spread) -> float:
        """|W^T K W|^2 without what is noise in it."""
        parts = [] if spread.deviations is None or not spread.freedom else list(spread.deviations)
        return self.own(spread.covariance) - sum(map(self.own, parts))


def _finite(matrix: Tensor) -> bool:
    return bool(torch.isfinite(matrix).all())


def _correlation(weight: Tensor | None, spread: _Spread | None, kind: Kind) -> tuple[float, float]:
    """rho(W^T W, W^T K W) and its error."""
    if weight is None or spread is None or not spread.finite or not _finite(weight):
        return torch.nan, torch.nan
    weight = _scaled(weight)
    if spread.deviations is not None:
        return _estimated_correlation(weight, spread, kind)
    if kind == "pearson":
        grown = weight.mT @ _scaled(spread.covariance) @ weight
        first, second = (m - m.mean() for m in (weight.mT @ weight, grown))
        value = _ratio(float((first * second).sum()), float(first.norm() * second.norm()))
    else:
        weight, spread = spread.along(weight)
        gram, root = weight @ weight.mT, _scaled(spread.root)
        mixed = gram @ root
        value = _ratio(float(mixed.square().sum()), float(gram.norm() * (root @ mixed).norm()))
    return value, value - value  # 0, or nan


def _estimated_correlation(weight: Tensor, spread: _Spread, kind: Kind) -> tuple[float, float]:
    """The same from estimates: the numerator is linear in K, the square of the denominator less what is noise in it."""
    assert spread.deviations is not None
    largest = spread.covariance.abs().max()
    if not largest > 0:
        return torch.nan, torch.nan
    spread = _Spread(spread.covariance / largest, spread.deviations / largest, spread.freedom)
    assert spread.deviations is not None
    form = _Form(weight, kind)
    above, below = float((form.linear * spread.covariance).sum()), form.size(spread)
    if not form.square > 0 or not below > 0:
        return torch.nan, torch.nan
    value = above / (form.square * below) ** 0.5
    if not spread.freedom:
        return value, torch.nan
    first = torch.einsum("pij,ij->p", spread.deviations, form.linear)
    second = 2 * torch.einsum("pij,ij->p", spread.deviations, form.weighted(spread.covariance))
    # To first order, then the second order of the mean: d^2 (a q^-1/2) = -da dq q^-3/2 / 2 + 3/8 a dq^2 q^-5/2.
    scale = (form.square * below) ** 0.5
    deviations = first / scale - value * second / (2 * below)
    curved = -(first * second).sum() / (2 * below * scale) + 0.375 * value * (second / below).square().sum()
    from featlearn.linalg.sampling import student  # late: only random directions need it

    return value - float(curved), float(deviations.norm()) * student(spread.freedom)


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
        from featlearn.quantities.feature_table import feature_table  # late: few features are printed

        return feature_table(self, self.left_out)
