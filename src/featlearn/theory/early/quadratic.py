"""Expected first moves of a quadratic network with one hidden layer (Beaglehole et al. 2024, Prop. 8, corrected)."""

from dataclasses import dataclass

from torch import Tensor

from featlearn.theory.arguments import checked_count, checked_rows, checked_vector
from featlearn.theory.early.derivative import correlation


@dataclass(frozen=True)
class QuadraticMeans:
    """Averages over networks f = a^T (W x)^2 at initialization, with C = X^T Y X and B = X^T X."""

    nfm: Tensor
    """E[Wdot^T Wdot] = 4 C^2, (d, d)"""
    agop: Tensor
    """E[Wdot^T K Wdot] = 16 [(3/k) tr(B) C^2 + (1 + 5/k) C B C], (d, d), for K = J^T J without 1/n"""
    ptk: Tensor
    """E[calK] = 4 X X^T, (n, n)"""
    squared_ptk: Tensor
    """E[calK^2] = 16 [(3/k) tr(B) X X^T + (1 + 5/k) X X^T X X^T], (n, n)"""
    correlation: Tensor
    """Cosine of `nfm` and `agop`: the mean term of Eq. 7 at this width"""
    limit_correlation: Tensor
    """The same at infinite width, rho(C^2, C B C): the NTK regime"""


def quadratic_means(X: Tensor, y: Tensor, width: int) -> QuadraticMeans:
    """Expected centered NFM, centered AGOP and squared PTK of f = a^T (W x)^2 at the first move.

    See Beaglehole et al. 2024, Prop. 8, Eq. 27 to 29 (corrected).

    `X` (n, d), `y` (n,): targets, for a network that vanishes on the data, or dL/df; a_s ~ N(0, 1),
    W_si ~ N(0, 1/k), k = `width`; phi' = 2 z is kept, K = J^T J has no 1/n.

    The correlation of the two means predicts Eq. 6 for k much larger than d; where k is near d the covariance term of
    Eq. 7 counts as well (`mean_and_covariance_terms`, `exact_word_traces`). nan where C vanishes.

    Erratum: the print has E[Wdot^T K Wdot] = 3 tr(B) C^2 + 6 C B C. It leaves out the pairs of different hidden units,
    which give the leading C B C, the 1/k of the rest, and the factors 4 and 16 of phi' = 2 z. The relative weight of
    the two terms is wrong, not only the scale: at k = 65536 the print predicts 0.9997 where 0.9717 is observed.
    """
    rows = checked_rows(X)
    target = checked_vector(y, "y", len(rows)).to(rows.device)
    k = checked_count(width, "width")
    single, second, outer = rows.T @ (target[:, None] * rows), rows.T @ rows, rows @ rows.T
    fourth, sandwiched = single @ single, single @ second @ single
    spread, leading = 3 / k * second.trace(), 1 + 5 / k
    nfm, agop = 4 * fourth, 16 * (spread * fourth + leading * sandwiched)
    return QuadraticMeans(
        nfm=nfm,
        agop=agop,
        ptk=4 * outer,
        squared_ptk=16 * (spread * outer + leading * outer @ outer),
        correlation=correlation(nfm, agop),
        limit_correlation=correlation(fourth, sandwiched),
    )


def data_matrices(X: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return a = (X^T Y X)^2 and B = X^T X, both (d, d): all that the data bring to the early correlation.

    See Beaglehole et al. 2024, Eq. 14.

    `X` (n, d); `y` (n,), Y = diag(y): the targets, for a network that vanishes on the data, or dL/df. The paper's
    M_X|Y^(4) and M_X^(2) of Sec. 4.2, the arguments of `free_probability` and `exact_word_traces`.
    """
    rows = checked_rows(X)
    weighted = rows.T @ (checked_vector(y, "y", len(rows)).to(rows.device)[:, None] * rows)
    return weighted @ weighted, rows.T @ rows
