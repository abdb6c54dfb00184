"""From a diagnosis to changes that make training richer or lazier.

See Xu & Ziyin 2024, Cor. 1 to 3; Shan & Bordelon 2021b, Sec. 4.2; Beaglehole et al. 2024, Sec. 5.1.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from featlearn.diagnosis import Diagnosis, diagnose
from featlearn.errors import InputValueError
from featlearn.record import Run

__all__ = ["Advice", "Change", "advise"]

EXPONENT = 0.74
"""The odds gap / (1 - gap) of the linearization gap go about as gamma to this power: fitted to ReLU networks on digits,
gamma from 0.01 to 30, gap from 0.11 to 0.98. Smooth networks are steeper where they are lazy, so that this goes further
than they need."""
WANTED = {"rich": 0.7, "lazy": 0.05}
"""The gap that is aimed at: well beyond the thresholds of a diagnosis."""
NEAREST = 0.99
"""A gap above is taken for this one: there it says no more how far it is to lazy training."""
GUESS = 100.0
SMALLEST, LARGEST = 3.0, 1000.0


@dataclass(frozen=True)
class Change:
    """One way to go; the ways of an advice are alternatives, not steps."""

    what: str
    call: str
    """in Python"""
    rate_factor: float
    """what to multiply the learning rate by; nan where the change sets it"""
    expect: str
    because: str

    def __str__(self) -> str:
        rate = "" if math.isnan(self.rate_factor) else f", learning rate times {self.rate_factor:.3g}"
        return f"{self.what}: {self.call}{rate}\n    expect: {self.expect}\n    because: {self.because}"


@dataclass(frozen=True)
class Advice:
    """What to change in a run."""

    toward: str
    regime: str
    """what the run was"""
    gamma: float
    """divisor of the output, beside whatever it was divided by already; 1 where nothing has to change"""
    changes: tuple[Change, ...]
    note: str

    @property
    def rate_factor(self) -> float:
        """gamma^2, for the learning rate of the first change."""
        return self.gamma**2

    def __str__(self) -> str:
        head = f"The run was {self.regime}; to make it {self.toward}: {self.note}"
        return "\n".join([head, *(f"  {i}. {change}" for i, change in enumerate(self.changes, 1))])


def advise(
    run: Run | str | os.PathLike[str] | Sequence[Run | str | os.PathLike[str]] | Diagnosis,
    toward: Literal["rich", "lazy"],
) -> Advice:
    """What to change to make a run richer or lazier, and what to expect.

    By Xu & Ziyin 2024, dividing the output by gamma and multiplying the learning rate by gamma^2 raises the target's
    share in the speed of training, over that of the first kernel, by gamma^2. It keeps the kernel times the rate, so
    training is as stable at its start as before (Cor. 1). The factor is estimated from the linearization gap. Diagnose
    the new run, and repeat if the change was too small.

    Args:
        run: a run, its path, several runs that differ in their seed, or a diagnosis.
        toward: "rich" or "lazy".
    """
    if toward not in ("rich", "lazy"):
        raise InputValueError(f"toward={toward!r}, expected 'rich' or 'lazy'")
    found = run if isinstance(run, Diagnosis) else diagnose(run)
    if found.regime == toward:
        return Advice(toward, found.regime, 1.0, (), "nothing has to change.")
    gamma = _gamma(found, toward)
    note = "any one of these."
    if found.regime == "cannot tell":
        note = "it is not known where it stands, so that this is a guess. Any one of these."
    return Advice(toward, found.regime, gamma, tuple(_changes(found, gamma, toward)), note)


def _gamma(found: Diagnosis, toward: str) -> float:
    """The divisor of the output, rounded to two digits."""
    gap = float(found.numbers["gap"])
    if math.isfinite(gap):
        factor = (_odds(WANTED[toward]) / max(_odds(min(gap, NEAREST)), 1e-12)) ** (1 / EXPONENT)
    else:
        factor = GUESS if toward == "rich" else 1 / GUESS
    if toward == "rich":
        return float(f"{min(max(factor, SMALLEST), LARGEST):.2g}")
    return float(f"{1 / min(max(1 / factor, SMALLEST), 10 * LARGEST):.2g}")


def _odds(share: float) -> float:
    return share / (1 - share)


def _changes(found: Diagnosis, gamma: float, toward: str) -> list[Change]:
    weights = len(found.layers)
    kept = (
        f"at first the loss falls as before, the rate times the kernel being the same (Adam, which does not know the "
        f"size of gradients: learning rate times {gamma:.3g})"
    )
    if toward == "rich":
        then = (
            f"{kept}; then the kernel grows and turns to the task, alignment rises, and the frozen first kernel falls "
            "behind. The grown kernel may need a smaller step: if the loss jumps, divide the learning rate by 4"
        )
    else:
        then = f"{kept}, and goes on so: the kernel stays, and its regression predicts the network. It may take longer"
    what = "divide the output" if gamma >= 1 else f"multiply the output by {1 / gamma:.3g}"
    changes = [
        Change(
            what,
            f"model = fl.steer.scale_output(model, {1 / gamma:.3g})",
            gamma**2,
            then,
            "Xu & Ziyin 2024, Eq. 15: the feature term over the kernel term grows as gamma^2; the same as labels times "
            "gamma (Shan & Bordelon 2021b, Sec. 4.2)",
        )
    ]
    if weights > 1:
        sigma = gamma ** (-1 / weights)
        changes.append(
            Change(
                "scale the first weights",
                f"fl.steer.scale_init(model, {sigma:.3g})",
                gamma ** (2 - 2 / weights),
                "the same, if the network is homogeneous (ReLU, no norms, no biases); its output starts "
                f"{'smaller' if sigma < 1 else 'larger'}, too",
                f"Beaglehole et al. 2024, Sec. 5.1: {weights} weight layers times sigma are an output times "
                f"sigma^{weights}",
            )
        )
    scheme = '"mean_field" or "kaiming+"' if toward == "rich" else '"ntk" or "kaiming-"'
    corollary = "Cor. 2: rates as width, output as its inverse" if toward == "rich" else "Cor. 3: rates below width"
    changes.append(
        Change(
            "choose the scaling with width",
            f"model, groups = fl.steer.parametrize(model, {scheme}, lr)",
            math.nan,
            "features are learned at any width alike" if toward == "rich" else "the wider, the lazier",
            f"Xu & Ziyin 2024, {corollary}, Table 1",
        )
    )
    if toward == "rich":
        changes.append(
            Change(
                "limit the speed of each layer",
                "optimizer = fl.steer.SLO(fl.steer.speed_groups(model, {...}), lr)",
                math.nan,
                "the fast layers leave their first weights, and learn features; see docs/how-to/steer-with-slo.md",
                "Beaglehole et al. 2024, Sec. 5.2",
            )
        )
    return changes
