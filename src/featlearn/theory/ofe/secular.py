"""Eigenvalues and eigenvectors after a rank-one update, to relative precision, from the secular equation.

A spike that is a million times the kernel leaves a dense eigensolver ten digits for the rest of the spectrum. Here
every root is found as its distance from the nearest pole, so that small and large eigenvalues keep their digits side by
side (Gu and Eisenstat 1994).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError

NEGLIGIBLE = 1e-280
# Roots are sought for this many pairs of root and pole at a time.
ELEMENTS = 2**24


class Update(NamedTuple):
    """Eigendecomposition of diag(poles) + weight z z^T."""

    values: Tensor
    """(n,), ascending."""
    vectors: Tensor
    """(n, n), columns."""
    overlaps: Tensor
    """(n,): v_k . z"""


def rank_one_update(poles: Tensor, z: Tensor, weight: float) -> Update:
    """Eigendecomposition of diag(poles) + weight z z^T, poles (n,) ascending, z (n,), weight >= 0."""
    rotated, reflections = _concentrated(poles, z)
    shift = weight * rotated.square()
    # what moves less than this moves by its own shift, and the distances stay far from the smallest double
    moved = shift > NEGLIGIBLE * torch.maximum(poles[-1], shift.sum())
    values, overlaps = poles + shift, rotated.clone()
    vectors = torch.eye(len(z), dtype=z.dtype, device=z.device)
    if bool(moved.any()):
        index = moved.nonzero()[:, 0]
        values[index], block, overlaps[index] = _distinct(poles[index], rotated[index], weight)
        vectors[index[:, None], index] = block
    for first, last, axis in reflections:
        part = vectors[first:last]
        vectors[first:last] = part - 2 * torch.outer(axis, axis @ part)
    order = values.argsort(stable=True)
    return Update(values[order], vectors[:, order], overlaps[order])


def _concentrated(poles: Tensor, z: Tensor) -> tuple[Tensor, list[tuple[int, int, Tensor]]]:
    """Within equal poles, turn the basis so that one vector carries all of z; Householder axes say how."""
    counts = torch.unique_consecutive(poles, return_counts=True)[1].tolist()
    rotated, reflections, first = z.clone(), [], 0
    for count in counts:
        part = z[first : first + count]
        if count > 1 and bool((part != 0).any()):
            scale = part.abs().max()
            axis = part / scale
            size = axis.norm() * (1.0 if float(part[-1]) >= 0 else -1.0)
            axis[-1] += size
            axis = axis / axis.norm()
            rotated[first : first + count] = 0.0
            rotated[first + count - 1] = -size * scale
            reflections.append((first, first + count, axis))
        first += count
    return rotated, reflections


def _distinct(poles: Tensor, z: Tensor, weight: float) -> Update:
    """Return the same where poles ascend strictly and no entry of z vanishes: every eigenvalue moves."""
    weights = weight * z.square()
    gaps = torch.cat([poles.diff(), weights.sum()[None]])
    middle = (poles[:-1, None] - poles) + gaps[:-1, None] / 2  # (n - 1, n), exact at the two poles next to it
    upper = (weights / middle).sum(1) > 1  # the root is nearer to the upper pole
    nearest = torch.arange(len(poles), device=poles.device)
    nearest[:-1] += upper
    sign = torch.ones_like(poles)
    sign[:-1] -= 2.0 * upper
    reach = torch.cat([gaps[:-1] / 2, gaps[-1:]])
    offsets = poles - poles[nearest, None]  # (root, pole)
    rows = max(1, ELEMENTS // len(poles))
    distance = torch.cat(
        [
            secular_roots(
                part, weights.expand_as(part), *(values[first : first + rows] for values in (nearest, sign, reach))
            )
            for first, part in zip(range(0, len(poles), rows), offsets.split(rows), strict=True)
        ]
    )
    away = (sign * distance)[:, None] - offsets  # c_k - lambda_i, (root k, pole i)
    # Loewner: the z for which these roots are exact, without which the vectors would not be orthogonal
    apart = (poles[:, None] - poles).fill_diagonal_(1.0)
    entries = z.sign() * (((away / apart).abs().log().sum(0) - math.log(weight)) / 2).exp()
    columns = (entries / away).T
    largest = columns.abs().amax(0)  # its square may be too large for a double
    sizes = largest * (columns / largest).norm(dim=0)
    values = poles[nearest] + sign * distance
    return Update(values, columns / sizes, 1 / (weight * sizes))


class _Search(NamedTuple):
    """Roots that are being sought, one row each."""

    pole_weight: Tensor
    others: Tensor
    offsets: Tensor
    sign: Tensor
    low: Tensor
    high: Tensor
    distance: Tensor


def secular_roots(offsets: Tensor, weights: Tensor, nearest: Tensor, sign: Tensor, reach: Tensor) -> Tensor:
    """Solve 1 = sum_i weights_i / (c - lambda_i) for c = lambda_o + sign * distance: the distances (R,).

    Args:
        offsets: (R, n): lambda_i - lambda_o.
        weights: (R, n), positive at o.
        nearest: (R,): the index o of the nearest pole.
        sign: (R,): on which side of it the root lies.
        reach: (R,): how far it can be, 0 < distance <= reach.
    """
    at = nearest[:, None]
    pole_weight, others = weights.gather(1, at)[:, 0], weights.scatter(1, at, 0.0)
    # where nothing weighs, any number but zero will do
    offsets = torch.where(others == 0, -2 * reach[:, None], offsets)
    low = (reach * 1e-300).clamp_min(1e-310)
    search = _Search(pole_weight, others, offsets, sign, low, reach, torch.minimum(pole_weight, reach))
    result, left = torch.zeros_like(reach), torch.arange(len(reach), device=reach.device)
    for _ in range(300):
        search, done = _refined(search)
        result[left] = search.distance
        if bool(done.all()):
            return result
        left, search = left[~done], _Search(*(part[~done] for part in search))
    raise InputValueError("the secular equation did not converge, expected finite eigenvalues and targets")


def _refined(search: _Search) -> tuple[_Search, Tensor]:
    """A step of Newton's method where it stays between the bounds, of geometric bisection where not; who is done."""
    pole_weight, others, offsets, sign, low, high, distance = search
    away = (sign * distance)[:, None] - offsets
    terms = others / away
    rest = 1 - terms.sum(1)
    # h = distance * sign * (1 - sum) is smooth at the pole, negative before the root and positive behind it
    value = sign * distance * rest - pole_weight
    slope = sign * rest + distance * (terms / away).sum(1)
    low, high = torch.where(value <= 0, distance, low), torch.where(value >= 0, distance, high)
    step = distance - value / slope
    inside = step.isfinite() & (step > low) & (step < high)
    tiny = 4 * torch.finfo(torch.float64).eps
    # where terms cancel, the value is rounding before the steps are
    rounded = value.abs() <= tiny * (distance * (1 + terms.abs().sum(1)) + pole_weight)
    following = torch.where(inside, step, torch.where(rounded, distance, low.sqrt() * high.sqrt()))
    done = rounded | ((following - distance).abs() <= tiny * distance) | (high <= low * (1 + tiny))
    return search._replace(low=low, high=high, distance=following), done
