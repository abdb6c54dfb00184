"""Residuals of several outputs: how the columns turn among themselves.

The closed form gives Delta Delta^T. For one output that is the residual itself, up to a sign that never changes. For
several, q = F G with Delta = exp(-C t) Delta_0 G obeys dq/dt = -(1 - q q^T) C q: q^T dq/dt = 0, so q is carried along
the moving subspace without turning in it, by parallel transport. Between neighboring subspaces Q1, Q2 that is the
orthogonal polar factor of Q2^T Q1, exact for a geodesic; its error is even in the step, so that halving steps and
extrapolating converges fast.
"""

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.theory.ofe.eigenmodes import Eigenmodes
from featlearn.theory.ofe.frames import frames_at

LEVELS = 4  # 1, 2, 4, 8 and 16 steps over an interval
TOLERANCE = 1e-13
DEEPEST = 60


def residuals(modes: Eigenmodes, times: Tensor) -> Tensor:
    """(T, m, r): Delta in the touched modes of C and the columns of Z, at times (T,) >= 0 in any order."""
    frames = frames_at(modes, times)
    ours = frames.decayed[:, : modes.moving] @ frames.orthonormal()
    if modes.rows.shape[1] < 2:
        return ours * frames.signs[:, None, None]
    start = frames_at(modes, times.new_zeros(1))
    first = (start.basis @ start.orthonormal())[0]
    turn = first.T @ (modes.logs.exp()[:, None] * modes.rows)
    scale = float(modes.rates.max())
    begin, turns = 0.0, torch.empty_like(frames.inverse)
    for i in times.argsort().tolist():
        end = float(torch.log1p(scale * times[i]))
        if end > begin:
            turn = _nearest(_rotation(modes, begin, end, scale) @ turn)
        begin, turns[i] = end, turn
    return ours @ turns


def _rotation(modes: Eigenmodes, begin: float, end: float, scale: float, depth: int = 0) -> Tensor:
    """(r, r): from the frame at `begin` to that at `end`; both are log(1 + scale * time)."""
    moments = torch.linspace(begin, end, 2**LEVELS + 1, dtype=torch.float64, device=modes.rates.device)
    frames = frames_at(modes, torch.expm1(moments) / scale)
    carried = frames.basis @ frames.orthonormal()
    table: list[Tensor] = []
    error = torch.inf
    for level in range(LEVELS + 1):
        nodes = carried[:: 2 ** (LEVELS - level)]
        row = [_product(_nearest(nodes[1:].mT @ nodes[:-1]))]
        for k, before in enumerate(table, start=1):
            row.append(row[-1] + (row[-1] - before) / (4**k - 1))
        if table:
            error = float((row[-1] - table[-1]).abs().max())
        table = row
        if error <= TOLERANCE:
            return table[-1]
    if depth == DEEPEST:
        raise InputValueError(
            f"the residual of several outputs could not be followed from t = {float(moments[0].expm1() / scale):.3g}; "
            "expected a kernel and targets whose eigenvalues are known to rounding; loss and kernel do not need it"
        )
    middle = (begin + end) / 2
    return _rotation(modes, middle, end, scale, depth + 1) @ _rotation(modes, begin, middle, scale, depth + 1)


def _nearest(matrices: Tensor) -> Tensor:
    """Return the nearest orthogonal matrices."""
    left, _, right = torch.linalg.svd(matrices)
    nearest: Tensor = left @ right
    return nearest


def _product(matrices: Tensor) -> Tensor:
    """Return the last times ... times the first."""
    result = matrices[0]
    for following in matrices[1:]:
        result = following @ result
    return result
