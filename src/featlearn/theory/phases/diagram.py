"""The phase diagram over any two exponents, as numbers and as a picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError, did_you_mean
from featlearn.palette import GREEN, LIGHT_GRAY, SKY
from featlearn.theory.arguments import checked_count
from featlearn.theory.phases.classification import EQUAL, Phase, classify
from featlearn.theory.phases.exponents import Exponents
from featlearn.theory.phases.scalings import stable_rate

AXES: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("d", "gamma", "u", "w", "rate_u", "rate_w")},
    "rate": ("rate_u", "rate_w"),
    "variance": ("u", "w"),
}
"""What an axis may be: one exponent, or two that move together."""

SYMBOLS = {
    "d": "width $c_d$",
    "gamma": r"output scale $c_\gamma$",
    "u": "readout variance $c_u$",
    "w": "input variance $c_w$",
    "rate_u": r"readout rate $c_{\eta_u}$",
    "rate_w": r"input rate $c_{\eta_w}$",
    "rate": r"learning rates $c_\eta$",
    "variance": "both variances $c_u = c_w$",
}
COLORS = {Phase.FROZEN: LIGHT_GRAY, Phase.UNSTABLE: "#F6D9A8", Phase.KERNEL: SKY, Phase.LEARNING: GREEN}

Point = tuple[float, float]
"""(x, y)"""
Affine = tuple[float, float, float]
"""c + a x + b y as (c, a, b)"""


class Segment(NamedTuple):
    """A stretch of a line on which training is neither frozen nor unstable."""

    phase: Phase
    start: Point
    end: Point


@dataclass(frozen=True, eq=False)
class Diagram:
    """Phases over two exponents. X and Y are the numbers of grid values."""

    x: str
    y: str
    x_values: Tensor
    """(X,)"""
    y_values: Tensor
    """(Y,)"""
    phases: tuple[tuple[Phase, ...], ...]
    """Y rows of X phases, exactly at the grid values"""
    outside: Phase
    """the phase around the region"""
    inside: Phase | None
    """the phase in the region; None where the window does not meet it"""
    region: tuple[Point, ...]
    """corners of the region, a convex polygon, exact and free of the grid"""
    stable: tuple[Segment, ...]
    """the sides of the region on which training is stable; between frozen and unstable there is only this line"""

    def plot(self, ax: Any = None) -> Any:
        """Draw it; returns the matplotlib axes."""
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.subplots(figsize=(3.25, 2.75), layout="constrained")[1]
        shown = {self.outside}
        ax.set_facecolor(COLORS[self.outside])
        if self.inside is not None:
            ax.fill(*zip(*self.region, strict=True), color=COLORS[self.inside], linewidth=0)
            shown.add(self.inside)
        for segment in self.stable:
            ends = zip(segment.start, segment.end, strict=True)
            ax.plot(*ends, color=COLORS[segment.phase], linewidth=4, solid_capstyle="butt")
            shown.add(segment.phase)
        handles = [ax.fill([], [], color=COLORS[phase])[0] for phase in Phase if phase in shown]
        labels = [str(phase) for phase in Phase if phase in shown]
        # its own ground: the colors of the plane are also those of the handles
        ax.legend(handles, labels, fontsize="small", frameon=True, facecolor="white", framealpha=1)
        ax.set(
            xlabel=SYMBOLS[self.x],
            ylabel=SYMBOLS[self.y],
            xlim=(float(self.x_values[0]), float(self.x_values[-1])),
            ylim=(float(self.y_values[0]), float(self.y_values[-1])),
        )
        return ax


def diagram(
    exponents: Exponents,
    x: str = "gamma",
    y: str = "rate",
    *,
    x_range: Point = (-2.0, 2.0),
    y_range: Point = (-2.0, 2.0),
    points: int = 81,
    balanced_start: bool = True,
    correlated_target: bool = True,
    at_stable_rate: bool = False,
) -> Diagram:
    """Return the phase diagram over two exponents, the others as in `exponents` (Xu & Ziyin 2024, Theorem 2).

    Frozen and unstable fill the plane; kernel and learning lie on the line between them, max(A, B) = 0. With
    `at_stable_rate` every point gets the learning rates of Cor. 1 and the line fills the plane instead: kernel where
    gamma + s > 0, learning elsewhere, s = d + max(u, w) for equal rates.

    Args:
        exponents: the limit that the plane goes through.
        x: first axis: "d", "gamma", "u", "w", "rate_u", "rate_w", or two at once: "rate" (both), "variance" (u and w).
        y: second axis, the same.
        x_range: first and last value of x.
        y_range: first and last value of y.
        points: grid values along each axis, for `Diagram.phases`.
        balanced_start: whether P / Q -> 1, as in `classify`.
        correlated_target: as in `classify`.
        at_stable_rate: choose the mean of the two rates by `stable_rate` at every point.
    """
    _check(x, y, at_stable_rate)
    window = _window(x_range, y_range)
    points = checked_count(points, "points")
    values = [torch.linspace(*bounds, points, dtype=torch.float64) for bounds in (x_range, y_range)]

    def at(first: float, second: float) -> Exponents:
        return replace(exponents, **(dict.fromkeys(AXES[x], first) | dict.fromkeys(AXES[y], second)))

    def phase(first: float, second: float) -> Phase:
        there = at(first, second)
        there = there.at_rate(stable_rate(there)) if at_stable_rate else there
        return classify(there, balanced_start, correlated_target=correlated_target)

    sides = [_affine(side, at) for side in _sides(at_stable_rate, correlated_target)]
    region = _clipped(window, sides)
    return Diagram(
        x=x,
        y=y,
        x_values=values[0],
        y_values=values[1],
        phases=tuple(tuple(phase(a, b) for a in values[0].tolist()) for b in values[1].tolist()),
        outside=Phase.UNSTABLE if not at_stable_rate else Phase.KERNEL if balanced_start else Phase.LEARNING,
        inside=phase(*_middle(region)) if region else None,
        region=tuple(region),
        stable=() if at_stable_rate else tuple(_stable(region, sides, phase)),
    )


def _check(x: str, y: str, at_stable_rate: bool) -> None:
    for name in (x, y):
        if name not in AXES:
            hint = did_you_mean(name, AXES)
            raise InputValueError(f"axis {name!r}, expected one of {', '.join(AXES)}{hint}")
    if set(AXES[x]) & set(AXES[y]):
        raise InputValueError(f"axes {x!r} and {y!r} move the same exponent, expected two that are free of each other")
    if at_stable_rate and "rate" in (x, y):
        raise InputValueError("axis 'rate' with at_stable_rate, which chooses the rate; expected other axes")


def _sides(at_stable_rate: bool, correlated_target: bool) -> list[Callable[[Exponents], float]]:
    """Functions that are <= 0 in the region: frozen, or learning for stable rates."""
    if at_stable_rate:
        return [
            lambda e: e.gamma + e.d + e.u - (e.rate_u - e.rate_w) / 2,
            lambda e: e.gamma + e.d + e.w + (e.rate_u - e.rate_w) / 2,
        ]
    kernel: list[Callable[[Exponents], float]] = [
        lambda e: 2 * e.gamma + e.d + e.rate_w + e.u,
        lambda e: 2 * e.gamma + e.d + e.rate_u + e.w,
    ]
    return [lambda e: e.feature_term, *kernel] if correlated_target else kernel


def _affine(side: Callable[[Exponents], float], at: Callable[[float, float], Exponents]) -> Affine:
    corner = side(at(0.0, 0.0))
    return corner, side(at(1.0, 0.0)) - corner, side(at(0.0, 1.0)) - corner


def _window(x_range: Point, y_range: Point) -> list[Point]:
    (left, right), (low, high) = x_range, y_range
    if not (left < right and low < high):
        raise InputValueError(f"ranges {x_range} and {y_range}, expected first < last")
    return [(left, low), (right, low), (right, high), (left, high)]


def _middle(polygon: list[Point]) -> Point:
    return sum(x for x, _ in polygon) / len(polygon), sum(y for _, y in polygon) / len(polygon)


def _value(side: Affine, point: Point) -> float:
    return side[0] + side[1] * point[0] + side[2] * point[1]


def _clipped(polygon: list[Point], sides: Sequence[Affine]) -> list[Point]:
    """The part of a convex polygon where every side is <= 0 (Sutherland and Hodgman)."""
    for side in sides:
        vertices: list[Point] = []
        for start, end in zip(polygon, [*polygon[1:], *polygon[:1]], strict=True):
            before, after = _value(side, start), _value(side, end)
            if before <= EQUAL:
                vertices.append(start)
            if min(before, after) < -EQUAL and max(before, after) > EQUAL:
                share = before / (before - after)
                vertices.append((start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])))
        polygon = vertices
    return polygon if len(polygon) > 2 else []


def _stable(region: list[Point], sides: Sequence[Affine], phase: Callable[[float, float], Phase]) -> list[Segment]:
    """Return the edges of the region that lie on one of its sides, not on the frame of the window."""
    segments = []
    for start, end in zip(region, [*region[1:], *region[:1]], strict=True):
        on_side = any(abs(_value(side, start)) < 1e-7 > abs(_value(side, end)) for side in sides if side[1] or side[2])
        if on_side and start != end:
            segments.append(Segment(phase((start[0] + end[0]) / 2, (start[1] + end[1]) / 2), start, end))
    return segments
