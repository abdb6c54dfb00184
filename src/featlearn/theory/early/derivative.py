"""Where the centered neural feature correlation starts (Beaglehole et al. 2024, Prop. 3 and Eq. 6)."""

from typing import Any, Literal, NamedTuple

from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.linalg.correlation import Kind
from featlearn.linalg.correlation import correlation as correlation
from featlearn.shapes import checked_finite
from featlearn.theory.arguments import checked_rows
from featlearn.theory.early.symmetric import checked_symmetric

Loss = Literal["sum-half", "mean", "mean-half", "mean-over-outputs", "cross-entropy"]


class DerivativeMatrices(NamedTuple):
    """Wdot^T Wdot and Wdot^T K Wdot of a layer at initialization, both (d, d), d the inputs of the layer.

    After time t of gradient flow the centered NFM is t^2 times the first and the centered AGOP t^2 times the second, to
    leading order; their second time derivatives are **twice** these.
    """

    nfm: Tensor
    """X^T L calK L X"""
    agop: Tensor
    """X^T L calK^2 L X, for K = J^T J; divide by n for the K with 1/n that makes the AGOP W^T K W."""


def loss_derivative(outputs: Tensor, targets: Tensor, loss: Loss = "sum-half") -> Tensor:
    """dL/df for every output of every sample, of the shape of `outputs`, (n,) or (n, c): the `residual` of Eq. 6.

    | loss | what is differentiated | dL/df |
    | --- | --- | --- |
    | `"sum-half"` | 1/2 sum (f - y)^2 | f - y |
    | `"mean"` | 1/n sum (f - y)^2 | 2 (f - y) / n |
    | `"mean-half"` | 1/(2n) sum (f - y)^2 | (f - y) / n |
    | `"mean-over-outputs"` | 1/(n c) sum (f - y)^2, `nn.MSELoss()` | 2 (f - y) / (n c) |
    | `"cross-entropy"` | -1/n sum y log softmax(f), `nn.CrossEntropyLoss()` | (softmax(f) - y) / n |

    `targets` have the shape of `outputs`; for cross-entropy they are one-hot or class probabilities.

    Beaglehole et al. 2024 take the network to vanish on the data, f = 0 (Sec. 4.1): then dL/df is -y up to a factor for
    the squared losses, and since neither sign nor scale changes a correlation, **the targets y themselves may be passed
    as `residual`** (L = diag(y)). For cross-entropy f = 0 gives (1/c - y) / n, which is not proportional to y.

    Erratum: the print calls dL/df the residuals y - f; the sign is the other one.
    """
    f, y = checked_finite(outputs, "outputs"), checked_finite(targets, "targets")
    if f.dim() not in (1, 2) or f.shape != y.shape or f.numel() == 0:
        raise InputValueError(
            f"outputs have shape {tuple(f.shape)} and targets {tuple(y.shape)}, expected both (n,) or both (n, c); "
            "pass one-hot targets for classes"
        )
    factors = {"sum-half": 1.0, "mean": 2 / len(f), "mean-half": 1 / len(f), "mean-over-outputs": 2 / f.numel()}
    if loss in factors:
        return factors[loss] * (f - y.to(f.device))
    if loss != "cross-entropy":
        raise InputValueError(f"loss={loss!r}, expected {', '.join(map(repr, factors))} or 'cross-entropy'")
    if f.dim() == 1 or f.shape[1] == 1:
        raise InputValueError(
            f"outputs have shape {tuple(f.shape)}, expected (n, c) with c > 1 classes for cross-entropy; "
            "give a single logit z as the two logits (0, z)"
        )
    return (f.softmax(1) - y.to(f.device)) / len(f)


def derivative_correlation(X: Tensor, residual: Tensor, ptk: Tensor, kind: Kind = "cosine") -> Tensor:
    """Correlation of X^T L calK L X and X^T L calK^2 L X: the C-NFC at which training starts.

    See Beaglehole et al. 2024, Eq. 6, 8.

    Arguments and conventions as in `derivative_matrices`. For gradient descent it is exact after one step, if K is
    taken at the initial weights. 1 where calK is a multiple of a projection. Neither the scale nor the common sign of
    the residuals matters, nor a factor of the PTK; the targets may stand for the residuals where f = 0.

    `kind="cosine"` is the printed definition, <A, B> / (|A| |B|); `"pearson"` first subtracts from each matrix the mean
    of all its entries, as the authors' published code does for the curves of Fig. 2: the two give different numbers.
    nan where residuals or PTK vanish. With `expected_ptk` in the place of calK it is the first-order prediction of
    App. D (which also replaces calK^2 by the square of the expectation).

    Erratum: Eq. 8 prints the denominators of this ratio with the exponent -1/2, which must be +1/2.
    """
    return correlation(*derivative_matrices(X, residual, ptk), kind=kind)


def derivative_matrices(X: Tensor, residual: Tensor, ptk: Tensor) -> DerivativeMatrices:
    """Wdot^T Wdot = X^T L calK L X and Wdot^T K Wdot = X^T L calK^2 L X, both (d, d).

    See Beaglehole et al. 2024, Prop. 3, Eq. 4, 5.

    - `X` (n, d): inputs of the layer (of the network, for its first layer).
    - `residual` (n,), or (n, c) for c outputs: dL/df, from `loss_derivative`, or the targets where f = 0.
    - `ptk`: calK = J J^T, the scalar products of df/dh, **without 1/n**. (n, n) for one output; for c outputs
      (n c, n c) with rows (sample, output), samples slowest, or (n, n, c, c).

    With c outputs X is repeated for every output. Any other rows may be stacked by hand, as long as all three agree:
    `X` (N, d), `residual` (N,), `ptk` (N, N), with rows (sample, position) for a layer that is shared between positions
    and the residual of a sample repeated at its positions.

    Conventions: dL/dW = J^T L X, Wdot = -J^T L X, K = J^T J here. Gradient descent with step eta gives after one step
    Wb^T Wb = eta^2 `nfm` exactly, and Wb^T K0 Wb = eta^2 `agop`.

    Errata: Eq. 5, Eq. 7, Sec. 4.2 and Prop. 8 write K (k, k) where calK (n, n) is meant; the proof of Prop. 3 drops the
    sign of Wdot (harmless); the feature covariance K is printed once with and once without 1/n: Prop. 3 is exact
    without it, the AGOP is W^T K W only with it.
    """
    weighted, outputs = residual_rows(X, residual)
    return products(weighted, checked_ptk(ptk, weighted, outputs))


def products(weighted: Tensor, kernel: Tensor) -> DerivativeMatrices:
    """V^T K V and V^T K^2 V for rows V = L X and symmetric kernels, (..., d, d)."""
    carried = kernel @ weighted
    # the second is a Gram matrix: positive and symmetric to the last digit
    return DerivativeMatrices(weighted.mT @ carried, carried.mT @ carried)


def residual_rows(X: Any, residual: Any) -> tuple[Tensor, int]:
    """L X, (N, d), rows (sample, output), and the number of outputs."""
    rows = checked_rows(X)
    slopes = checked_finite(residual, "residual").to(rows.device)
    outputs = slopes.shape[1:].numel()
    if slopes.dim() not in (1, 2) or not outputs or slopes.numel() not in (len(rows), len(rows) * outputs):
        raise InputValueError(
            f"X has shape {tuple(rows.shape)} and residual {tuple(slopes.shape)}, expected (n, d) with (n,) or (n, c): "
            "one dL/df for every output of every row"
        )
    if len(rows) != slopes.numel():
        rows = rows.repeat_interleave(outputs, 0)
    return slopes.reshape(-1, 1) * rows, outputs


def checked_ptk(ptk: Any, weighted: Tensor, outputs: int) -> Tensor:
    """calK as (N, N), rows (sample, output)."""
    kernel = checked_finite(ptk, "ptk").to(weighted.device)
    if kernel.dim() == 4 and kernel.shape[2:] == (outputs, outputs):
        kernel = kernel.transpose(1, 2).reshape(kernel.shape[0] * outputs, -1)
    rows = len(weighted)
    if tuple(kernel.shape) != (rows, rows):
        full = f" or (n, n, c, c) = {(rows // outputs, rows // outputs, outputs, outputs)}" if outputs > 1 else ""
        raise InputValueError(
            f"ptk has shape {tuple(checked_finite(ptk, 'ptk').shape)}, expected {(rows, rows)}{full}: calK = J J^T "
            "between all rows, not the (k, k) covariance J^T J"
        )
    return checked_symmetric(kernel, "ptk")
