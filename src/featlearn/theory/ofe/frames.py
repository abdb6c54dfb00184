"""The motion of the residual, as a moving subspace, in a form that neither overflows nor cancels.

Write gamma Delta Delta^T = C^1/2 Pi C^1/2. Then Pi(t) projects on the column space of F(t) = diag(weights(t)) rows with
weights sqrt(gamma / c_k) exp(-c_k t) for each mode, beside rows that do not decay and complete F^T F at time 0 to the
identity; K = C^1/2 (1 - Pi) C^1/2. This is the closed form of `solve`, Delta Delta^T = E (F^T F)^-1 E^T with E = exp(-C
t) Delta_0, read as a column space: columns may be combined and scaled freely, so that each time has a basis in which
some r rows (the pivots) form the identity and all others are small. Nothing is then lost where gamma |Delta|^2 is far
above K, or where exp(-c_k t) is far below the smallest number.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.theory.ofe.eigenmodes import Eigenmodes

# A combination of rows that cancels to this share of them is zero with rounding.
CANCELLED = 1e-14


class Frames(NamedTuple):
    """A basis of the column space of F at each time; n rows, r columns."""

    basis: Tensor
    """(T, n, r): F in the basis where the pivots are the identity."""
    decayed: Tensor
    """(T, n, r): exp(-c t) rows in the same basis; 0 for the rows that do not decay."""
    pivots: Tensor
    """(T, r): the row that is the j-th unit vector."""
    signs: Tensor
    """(T,): the sign of the change of basis, for r = 1."""
    others: Tensor
    """(T, n, r): X, the basis with the pivots set to 0."""
    inverse: Tensor
    """(T, r, r): S = (I + X^T X)^-1"""

    def orthonormal(self) -> Tensor:
        """(T, r, r): G with basis @ G orthonormal."""
        lower = torch.linalg.cholesky(self.basis.mT @ self.basis)
        turned: Tensor = torch.linalg.inv(lower).mT
        return turned


def frames_at(modes: Eigenmodes, times: Tensor) -> Frames:
    """Frames at these times of the flow with rate 1, (T,)."""
    return _frames(modes, modes.rates, times)


def frames_at_the_end(modes: Eigenmodes) -> Frames:
    """Return the limit of infinite time, T = 1: the slowest rows win, equal rates share."""
    slowest = modes.rates.sort()
    apart = slowest.values.diff(prepend=slowest.values[:1]) > 1e-12 * slowest.values
    group = torch.zeros_like(modes.rates)
    group[slowest.indices] = apart.cumsum(0).double()
    return _frames(modes, group, group.new_full((1,), 1e6))


def _frames(modes: Eigenmodes, rates: Tensor, times: Tensor) -> Frames:
    rows, pivots = _reduced(modes, rates, times)
    time_index = torch.arange(len(times), device=rows.device)[:, None]
    columns = torch.arange(rows.shape[2], device=rows.device)
    heads = rows[time_index, pivots, columns]  # (T, r)
    sign = rows.sign() * heads.sign()[:, None]
    # differences of rates first: the products with large times would lose them
    slower = times[:, None, None] * (rates[:, None] - rates[pivots][:, None])  # (T, n, r)
    size = rows.abs().log() - (modes.logs[pivots] + heads.abs().log())[:, None] - slower
    basis = sign * (modes.logs[:, None] + size).exp()
    moving = (torch.arange(len(rates), device=rows.device) < modes.moving)[:, None]
    decayed = torch.where(moving, sign * size.exp(), 0.0)
    others = basis.scatter(1, pivots[:, None], 0.0)
    square = torch.eye(len(columns), dtype=rows.dtype, device=rows.device) + others.mT @ others
    return Frames(basis, decayed, pivots, heads.sign().prod(1), others, torch.linalg.inv(square))


def _reduced(modes: Eigenmodes, rates: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the columns of F, exp(logs - rates * time) times rows, until r rows are multiples of unit vectors.

    Gauss and Jordan with complete pivoting, in logarithms. Gives the rows without their weights (T, n, r), and which
    row is the j-th pivot (T, r); columns are in the order of the pivots.
    """
    sizes, (count, columns) = modes.rows.norm(dim=1)[:, None], modes.rows.shape
    rows = modes.rows.expand(len(times), -1, -1).clone()
    time_index = torch.arange(len(times), device=rows.device)
    free = torch.ones(len(times), columns, dtype=torch.bool, device=rows.device)
    pivots, order = (torch.zeros(len(times), columns, dtype=torch.long, device=rows.device) for _ in range(2))
    for j in range(columns):
        logs = torch.where(free[:, None], modes.logs[:, None] + rows.abs().log(), -torch.inf)
        row, column = largest_entries(logs, rates, times)
        pivot_column = rows[time_index, :, column]  # (T, n)
        head = pivot_column[time_index, row]
        factors = rows[time_index, row] / head[:, None]  # (T, r)
        factors[time_index, column] = 0.0
        rows = rows - pivot_column[..., None] * factors[:, None]
        rows = torch.where(rows.abs() <= CANCELLED * sizes, 0.0, rows)
        rows[time_index, row] = 0.0
        rows[time_index, row, column] = head
        free[time_index, column] = False
        pivots[:, j], order[:, j] = row, column
    return rows.gather(2, order[:, None].expand(-1, count, -1)), pivots


def largest_entries(logs: Tensor, rates: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column (T,) of the largest logs - rates * time, logs (T, n, r).

    At large times the products drown the logarithms in rounding; differences from the rate of the best so far do not.
    """
    reference = rates.min().expand(len(times))
    for _ in range(3):
        score = logs - (times[:, None] * (rates - reference[:, None]))[..., None]
        row, column = torch.unravel_index(score.flatten(1).argmax(1), logs.shape[1:])
        reference = rates[row]
    return row, column
