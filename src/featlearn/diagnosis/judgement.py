"""The regime of one run or several: each number is compared with its threshold; and the verdict in a sentence."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from featlearn.diagnosis.evidence import (
    ALIGNMENT_ROSE,
    CLEARLY_MOVED,
    FALLEN,
    KERNEL_MOVED,
    SHAPE_SPEED,
    SPEED,
    Evidence,
    Sample,
    Threshold,
    evidence,
    mean,
    mean_of,
    sample,
    unknown,
)
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.loss_speed import SpeedRatio, Unknown

Regime = Literal["lazy", "rich", "mixed", "cannot tell"]
_SIDES = {-1: "lazy", 0: "between", 1: "rich"}


def numbers(findings: Sequence[Findings]) -> dict[str, float]:
    """The numbers that decide the regime, as means over runs; nan if unknown."""
    speeds = [one.speed for one in findings if isinstance(one.speed, SpeedRatio)]
    return {
        "kernel_moved": mean([one.moved for one in findings]),
        "kernel_moved_raw": mean([one.moved_raw for one in findings]),
        "speedup": mean_of(sample([speed.frozen for speed in speeds], logarithmic=True)),
        "speedup_rescaled": mean_of(sample([speed.rescaled for speed in speeds], logarithmic=True)),
        "alignment_rise": mean([one.events.rise for one in findings]),
        "loss_left": mean([one.loss_left for one in findings]),
        "kernel_growth": mean_of(sample([one.events.growth for one in findings], logarithmic=True)),
        "weights_moved": mean([one.weights_moved for one in findings]),
    }


class Votes(NamedTuple):
    """What each number indicates: -1 lazy, 1 rich, 0 neither; None if unknown."""

    moved: int | None
    speed: int | None
    rise: int | None

    @property
    def missing(self) -> list[str]:
        """The unknown numbers, in words."""
        return [words for side, words in zip(self, _MISSING, strict=True) if side is None]

    @property
    def majority(self) -> Regime:
        """Lazy or rich with at least two votes for it and none against, else mixed.

        The speed of the loss has two votes: alone it classifies all calibration runs. Alignment that did not rise is no
        vote against rich, as a network may learn features that do not align with the targets.
        """
        votes = [self.speed, self.speed, self.moved, self.rise]
        if votes.count(1) >= 2 and -1 not in votes[:3]:
            return "rich"
        return "lazy" if votes.count(-1) >= 2 and 1 not in votes else "mixed"

    @property
    def regime(self) -> Regime:
        """With one number unknown, the regime that it cannot change, or that both others indicate; else unknown."""
        if not self.missing:
            return self.majority
        if len(self.missing) > 1:
            return "cannot tell"
        name = self._fields[self.index(None)]
        possible = {self._replace(**{name: side}).majority for side in (-1, 0, 1)}
        known = [side for side in self if side is not None]
        if len(possible) == 1:
            return possible.pop()
        if known[0] == known[1] != 0:
            return "rich" if known[0] == 1 else "lazy"
        return "cannot tell"


_MISSING = ("how far the kernel moved", "how much faster than its first kernel it learned", "how much alignment rose")


def votes_of(moved: Sample | None, frozen: Sample | None, rise: Sample | None) -> Votes:
    """Votes of three numbers: distance of the kernel, speed of the loss, rise of alignment."""
    return Votes(_side(moved, _moved_threshold(frozen)), _side(frozen, SPEED), _side_of_rise(rise))


def regime_of(moved: Sample | None, frozen: Sample | None, rise: Sample | None, left: Sample | None) -> Regime:
    """The regime by votes; unless it is rich, unknown if the loss has hardly fallen."""
    found = votes_of(moved, frozen, rise).regime
    return "cannot tell" if found != "rich" and _unfinished(left) else found


def assess_regime(findings: Sequence[Findings], learned: Sequence[str] = ()) -> tuple[Regime, str, list[Evidence]]:
    """The regime as a word and as a sentence, with its evidence.

    `learned` are the layers whose neural feature correlation rose; the sentence names them for lazy training.
    """
    moved, left = (sample([getattr(one, name) for one in findings]) for name in ("moved", "loss_left"))
    rise = sample([one.events.rise for one in findings])
    speeds = [one.speed for one in findings]
    frozen = sample([speed.frozen for speed in speeds if isinstance(speed, SpeedRatio)], logarithmic=True)
    if all(one.run_data.lost for one in findings):
        return "cannot tell", _broken(findings) + "Nothing else can be told.", _breakdowns(findings)
    statements = [
        *_breakdowns(findings), *_warnings(findings), _moved(moved, _moved_threshold(frozen)), *_faster(speeds, frozen),
        _aligned(rise, constant=all(one.constant_target for one in findings)),
    ]  # fmt: skip
    if left is not None:
        statements.append(evidence(
            "regime", f"at its lowest the loss on the probe was {left.mean:.2g} of the first", left,
            f"at most {FALLEN.high:g} to tell", FALLEN, "thin" if _unfinished(left) else "",
        ))  # fmt: skip
    regime = regime_of(moved, frozen, rise, left)
    return regime, _broken(findings) + _sentence(regime, votes_of(moved, frozen, rise), left, learned), statements


def _side(value: Sample | None, threshold: Threshold) -> int | None:
    return None if value is None else value.side(threshold)


def _moved_threshold(frozen: Sample | None) -> Threshold:
    return CLEARLY_MOVED if frozen is None else KERNEL_MOVED


def _side_of_rise(rise: Sample | None) -> int | None:
    if rise is not None and rise.mean < -ALIGNMENT_ROSE.low:
        return 0  # alignment fell: the kernel moved away from the task, which is not lazy
    return _side(rise, ALIGNMENT_ROSE)


def _unfinished(left: Sample | None) -> bool:
    return left is None or not left.mean <= FALLEN.high


def _broken(findings: Sequence[Findings]) -> str:
    """The beginning of the verdict if training broke down."""
    broken = [one for one in findings if one.run_data.diverged is not None]
    if not broken:
        return ""
    if len(findings) > 1:
        return f"training broke down on {len(broken)} of {len(findings)} runs. Before: "
    run_data = broken[0].run_data
    if run_data.diverged == 0:
        return "the loss was not finite before the first step. "
    if run_data.lost:
        return f"training broke down at step {run_data.diverged}. "
    return f"training broke down at step {run_data.diverged}. Up to step {run_data.steps}: "


def _sentence(regime: Regime, votes: Votes, left: Sample | None, learned: Sequence[str] = ()) -> str:
    """The regime as a sentence, with the reason."""
    if regime == "rich":
        why = "The kernel left its first state behind" if votes.moved == 1 else (
            "The loss fell faster than the first kernel predicts"
        )  # fmt: skip
        return f"rich training. {why}: features were learned."
    if regime == "lazy":
        why = "The first kernel predicts how the loss fell" if votes.speed == -1 else (
            "The kernel hardly moved, and alignment hardly changed"
        )  # fmt: skip
        if learned:
            return f"lazy training. {why}; yet the neural feature correlation rose in {', '.join(learned)}."
        return f"lazy training. {why}: few features were learned."
    if regime == "mixed":
        some = "do not agree" if {-1, 1} <= set(votes) else "lie in between"
        return f"mixed, between lazy and rich: the numbers below {some}."
    begun = "cannot tell whether training was lazy or rich: "
    if _unfinished(left):
        how = "the loss has hardly fallen" if left is not None else "the loss was not recorded before and after it"
        return f"{begun}{how}."
    return f"{begun}it is not known {' and '.join(votes.missing)}, and the rest does not settle it."


def _breakdowns(findings: Sequence[Findings]) -> list[Evidence]:
    steps = [(one.run.name, one.run_data.diverged, one.run_data.steps) for one in findings]
    return [
        Evidence("regime", f"{name} broke down at step {at}; it is read up to step {last}", float(at), "", "")
        for name, at, last in steps if at is not None
    ]  # fmt: skip


def _warnings(findings: Sequence[Findings]) -> list[Evidence]:
    """Warnings about optimisers and layers that make the numbers less reliable."""
    kinds = sorted({kind for one in findings if (kind := one.run_data.optimizer[0]) not in ("", "SGD")})
    notes = [f"trained with {kind}, whose steps are not those of the tangent kernel: speeds are less sure"
             for kind in kinds]  # fmt: skip
    if any(one.run_data.batch_norm for one in findings):
        notes.append("the network has BatchNorm; its kernels are those of eval mode, not of the steps of training")
    return [Evidence("regime", note, math.nan, "", "") for note in notes]


def _moved(moved: Sample | None, threshold: Threshold) -> Evidence:
    if moved is None:
        return unknown("regime", "how far the kernel moved: the first kernel and a later one were not both recorded")
    says = f"the kernel, centred and of norm one, moved by {moved.words} (1 - cosine with the first)"
    return evidence("regime", says, moved, _words(threshold), threshold, _SIDES[moved.side(threshold)])


def _faster(speeds: Sequence[SpeedRatio | Unknown], frozen: Sample | None) -> list[Evidence]:
    known = [speed for speed in speeds if isinstance(speed, SpeedRatio)]
    rescaled = sample([speed.rescaled for speed in known], logarithmic=True)
    if frozen is None or rescaled is None:
        reasons = "; ".join(sorted({speed.reason for speed in speeds if isinstance(speed, Unknown)}))
        return [unknown("regime", f"how much faster than its first kernel it learned: {reasons}")]
    least = "at least " if any(speed.bound for speed in known) else ""
    level = sum(speed.level for speed in known) / len(known)
    says = f"to {level:.2g} of the first loss, the frozen first kernel takes {least}{frozen.words} times as long"
    grown = f"multiplied to its later size, the first kernel takes {least}{rescaled.words} times as long"
    shape = "shape" if rescaled.side(SHAPE_SPEED) == 1 else "cannot tell" if least else "growth"
    return [
        evidence("regime", says, frozen, _words(SPEED), SPEED, _SIDES[frozen.side(SPEED)]),
        evidence("regime", grown, rescaled, f"above {SHAPE_SPEED.high:g} its change of shape made training faster",
             SHAPE_SPEED, shape),
    ]  # fmt: skip


def _aligned(rise: Sample | None, *, constant: bool) -> Evidence:
    side = _side_of_rise(rise)
    if rise is None or side is None:
        why = "the target is constant" if constant else "it was not recorded before and after training"
        return unknown("regime", f"how much centred alignment rose: {why}")
    says = f"centred kernel-task alignment changed by {rise.words}"
    against = f"lazy within ±{ALIGNMENT_ROSE.low:g}, rich above {ALIGNMENT_ROSE.high:g}"
    return evidence("regime", says, rise, against, ALIGNMENT_ROSE, _SIDES[side])


def _words(threshold: Threshold) -> str:
    return f"lazy below {threshold.low:g}, rich above {threshold.high:g}"
