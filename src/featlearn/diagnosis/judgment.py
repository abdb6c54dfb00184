"""The regime of one run or several, from the linearization gap; and the verdict in a sentence."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from featlearn.diagnosis.departure import departs
from featlearn.diagnosis.evidence import (
    DEPARTED,
    FALLEN,
    FITTED,
    GAP,
    GREW,
    OVERSHOT,
    SAME_SHAPE,
    SHAPE_SPEED,
    SPEED,
    TURNED,
    Evidence,
    Sample,
    Threshold,
    estimate_of,
    evidence,
    mean,
    sample,
    sample_of,
    unknown,
)
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.loss_speed import SpeedRatio, Unknown
from featlearn.diagnosis.usefulness import Usefulness
from featlearn.linalg.estimate import Estimate

Regime = Literal["lazy", "rich", "mixed", "lazy then rich", "cannot tell"]
_SIDES = {-1: "lazy", 0: "between", 1: "rich"}


class Verdict(NamedTuple):
    """The regime as a word and as a sentence."""

    regime: Regime
    sentence: str


class Numbers(NamedTuple):
    """What the regime rests on, over all runs; None where it is unknown."""

    gap: Sample | None
    turning: Sample | None
    growth: Sample | None
    left: Sample | None
    """lowest loss divided by the first"""
    departed: bool | None
    """whether training left the frozen first kernel, by more than the replay's own error"""
    settled: bool
    """whether the loss has stopped falling"""
    rich_from: float
    """step from which the gap was rich, after the data were fitted; nan if it was not so"""
    no_gap: str = "the linearization gap was not recorded"
    """why there is no gap, where there is none"""


def numbers(findings: Sequence[Findings]) -> dict[str, Estimate]:
    """The numbers behind the regime, as means over runs with their errors; nan if unknown."""
    speeds = [one.speed for one in findings if isinstance(one.speed, SpeedRatio)]
    return {
        "gap": estimate_of(sample_of([one.gap.value for one in findings])),
        "departure": estimate_of(sample_of([one.departure.value for one in findings])),
        "turning": estimate_of(sample_of([one.turning for one in findings])),
        "turning_raw": estimate_of(sample([one.turning_raw for one in findings])),
        "growth": estimate_of(sample_of([one.growth for one in findings], logarithmic=True)),
        "speedup": estimate_of(sample_of([speed.frozen for speed in speeds], logarithmic=True)),
        "speedup_rescaled": estimate_of(sample_of([speed.rescaled for speed in speeds], logarithmic=True)),
        "alignment_rise": estimate_of(sample([one.events.rise for one in findings])),
        "loss_left": estimate_of(sample([one.loss_left for one in findings])),
        "weights_moved": estimate_of(sample([one.weights_moved for one in findings])),
    }


def regime_numbers(findings: Sequence[Findings]) -> Numbers:
    """What the regime rests on."""
    left = [departs(one.departure, DEPARTED.high) for one in findings]
    known = [one for one in left if one is not None]
    return Numbers(
        sample_of([one.gap.value for one in findings]),
        sample_of([one.turning for one in findings]),
        sample_of([one.growth for one in findings], logarithmic=True),
        sample([one.loss_left for one in findings]),
        2 * sum(known) > len(known) if known else None,
        all(one.settled_loss for one in findings),
        rich_from(findings),
        _no_gap(findings),
    )


def _no_gap(findings: Sequence[Findings]) -> str:
    return "; ".join(dict.fromkeys(one.gap.reason for one in findings if one.gap.reason))


def rich_from(findings: Sequence[Findings]) -> float:
    """Mean step from which the gap was rich after the data were fitted; nan if that was not so in every run."""
    steps = [one.rich_from for one in findings]
    return mean(steps) if all(map(math.isfinite, steps)) else math.nan


def verdict_of(given: Numbers) -> Verdict:
    """The regime: what the gap says, unless other evidence contradicts it or too little was learned to tell."""
    gap = given.gap
    if gap is None:
        return Verdict("cannot tell", f"cannot tell whether training was lazy or rich: {given.no_gap}.")
    side = gap.side(GAP)
    if given.left is not None and given.left.mean > FALLEN.high and gap.side(OVERSHOT) != -1:
        return Verdict(
            "cannot tell",
            f"cannot tell whether training was lazy or rich: weights were thrown far away "
            f"(gap {gap.words}) while the loss fell only to {given.left.mean:.2g} of the first. Lower the "
            "learning rate.",
        )
    if side == 1 and math.isfinite(given.rich_from):
        return Verdict(
            "lazy then rich",
            f"lazy, then rich from step {given.rich_from:.3g} on. The loss fell to a "
            f"quarter while the function moved as its linearization at the start says; features came later "
            f"(gap {gap.words}).",
        )
    if side == 1:
        return _left_linearization(given, gap)
    if given.left is not None and given.left.mean > FALLEN.high and not given.settled:
        return Verdict(
            "cannot tell",
            "cannot tell whether training was lazy or rich: the loss has fallen only to "
            f"{given.left.mean:.2g} of the first, and every network begins lazily.",
        )
    if side == 0:
        return _between(gap)
    if given.departed:
        return Verdict(
            "mixed",
            f"mixed: the outputs moved along the linearization at the start (gap {gap.words}), but "
            "training departed from that of the frozen first kernel.",
        )
    return Verdict(
        "lazy",
        "lazy training. The function moved as its linearization at the start says (gap "
        f"{gap.words}): the features are those of the start.",
    )


def _between(gap: Sample) -> Verdict:
    if GAP.low <= gap.mean <= GAP.high:
        return Verdict(
            "mixed",
            f"mixed, between lazy and rich: the linearization at the start misses {gap.words} of "
            "the change of the outputs.",
        )
    reached = GAP.low if gap.mean < GAP.low else GAP.high
    return Verdict(
        "mixed",
        f"mixed: the linearization at the start misses {gap.words} of the change of the outputs, "
        f"and two of these errors reach over the threshold {reached:g}. More test points (or, without any, "
        "a larger probe) or more runs would tell.",
    )


def _left_linearization(given: Numbers, gap: Sample) -> Verdict:
    turned, grew = given.turning, given.growth
    same_shape = turned is not None and turned.side(SAME_SHAPE) == -1
    if same_shape and turned is not None and grew is not None and grew.side(GREW) == 1:
        return Verdict(
            "mixed",
            f"mixed: the function left its linearization (gap {gap.words}) because the kernel grew "
            f"{grew.mean:.3g} times; it hardly turned ({turned.words}). Training became faster, and learned "
            "few features.",
        )
    if given.departed is False and same_shape:
        return Verdict(
            "mixed",
            f"mixed: the function left its linearization (gap {gap.words}), but training was that "
            "of the frozen first kernel.",
        )
    mostly = ""
    if turned is not None and grew is not None and turned.mean < SAME_SHAPE.high and grew.side(GREW) == 1:
        mostly = f" Mostly the kernel grew, {grew.mean:.3g} times; it turned by {turned.words}."
    if given.left is not None and given.left.mean > FALLEN.high:
        mostly += f" But the loss has fallen only to {given.left.mean:.2g} of the first."
    return Verdict(
        "rich",
        "rich training. The linearization at the start misses "
        f"{gap.words} of the change of the function: features were learned.{mostly}",
    )


def assess_regime(findings: Sequence[Findings]) -> tuple[Regime, str, list[Evidence]]:
    """The regime as a word and as a sentence, with its evidence."""
    if all(one.run_data.lost for one in findings):
        return "cannot tell", _broken(findings) + "Nothing else can be told.", _breakdowns(findings)
    given = regime_numbers(findings)
    found = verdict_of(given)
    statements = [
        *_breakdowns(findings),
        *_warnings(findings),
        *_about_gap(findings, given),
        _about_departure(findings, given.departed),
        *_about_kernel(findings, given),
        *_faster([one.speed for one in findings]),
        *_about_loss(given),
        *_about_use(findings),
    ]
    return found.regime, _broken(findings) + found.sentence + _good(findings), statements


def _about_gap(findings: Sequence[Findings], given: Numbers) -> list[Evidence]:
    gap = given.gap
    if gap is None:
        return [unknown("regime", f"how far the function left its linearization: {given.no_gap}")]
    where = "on test points" if all(one.gap.test is not None for one in findings) else "on the probe"
    says = f"the linearization at the start misses {gap.words} of the change of the centered outputs {where}"
    found = [evidence("regime", says, gap, _words(GAP), GAP, _SIDES[gap.side(GAP)])]
    probe = sample([one.gap.probe.last for one in findings if one.gap.probe is not None])
    unshrunk = sample([one.gap.unshrunk.last for one in findings if one.gap.unshrunk is not None])
    if unshrunk is not None and probe is not None:
        says = f"layers have shrunk as a whole: on the probe it misses {probe.words}, without that {unshrunk.words}"
        found.append(evidence("regime", says, unshrunk, "", GAP, ""))
    step = rich_from(findings)
    if math.isfinite(step):
        says = f"the gap is rich from step {step:.3g} on, after the data were fitted"
        found.append(
            Evidence(
                "regime",
                says,
                step,
                f"loss at {FITTED.high:g} of the first with a lazy gap",
                FITTED.source,
                verdict="lazy then rich",
            )
        )
    return found


def _about_departure(findings: Sequence[Findings], departed: bool | None) -> Evidence:
    known = [one.departure for one in findings if math.isfinite(float(one.departure))]
    found = sample_of([one.value for one in known])
    if found is None:
        reasons = "; ".join(sorted({one.departure.reason for one in findings}))
        return unknown("regime", f"how far training departed from the frozen first kernel: {reasons}")
    where = "on test points" if all(one.test is not None for one in known) else "on the probe"
    says = f"training with the frozen first kernel comes no nearer to the network than {found.words} {where}"
    # The same answer as in the headline: the two cannot contradict each other.
    verdict = {True: "departed", False: "followed", None: "cannot tell"}[departed]
    error, apart = mean([float(one.value.stderr) for one in known]), mean([one.between_kernels for one in known])
    if verdict == "cannot tell" and apart <= DEPARTED.high < found.mean - 2 * error:
        says += (
            f"; that of the last kernel is only {apart:.2g} from it, so that the replay is off and not the "
            "network: it was trained on more samples than the probe, say"
        )
    elif verdict == "cannot tell" and math.isfinite(error):
        says += f"; it was off by {error:.2g} while the network was linear, so that this does not count"
    return evidence("regime", says, found, f"lazy at most {DEPARTED.high:g}", DEPARTED, verdict)


def _about_kernel(findings: Sequence[Findings], given: Numbers) -> list[Evidence]:
    """Turning and growth of the kernel, told apart."""
    turned = given.turning
    if turned is None:
        recorded = all(one.both_kernels for one in findings)
        why = "the centered kernel vanishes" if recorded else "the first kernel and a later one were not both recorded"
        found = [unknown("regime", f"how far the kernel turned: {why}")]
    else:
        says = f"the kernel, centered and of norm one, turned by {turned.words} (1 - cosine with the first)"
        against = f"kept its shape below {TURNED.low:g}, turned above {TURNED.high:g}"
        # Not lazy or rich: settling BatchNorm averages turn a kernel, too.
        told = {-1: "kept its shape", 0: "between", 1: "turned"}[turned.side(TURNED)]
        found = [evidence("regime", says, turned, against, TURNED, told)]
    if given.growth is not None:
        says = f"the kernel norm became {given.growth.words} times the first"
        grew = "grew" if given.growth.side(GREW) == 1 else "kept its size"
        found.append(evidence("regime", says, given.growth, f"grown above {GREW.high:g}", GREW, grew))
    return found


def _about_loss(given: Numbers) -> list[Evidence]:
    if given.left is None:
        return [unknown("regime", "how far the loss fell: it was not recorded before and after training")]
    thin = given.left.mean > FALLEN.high and not given.settled
    still = "" if given.settled else ", still falling"
    says = f"at its lowest the loss was {given.left.mean:.2g} of the first{still}"
    against = f"at most {FALLEN.high:g}, or no longer falling, for lazy"
    return [evidence("regime", says, given.left, against, FALLEN, "thin" if thin else "")]


def _about_use(findings: Sequence[Findings]) -> list[Evidence]:
    known = [one.useful for one in findings if not one.useful.reason]
    if not known:
        return []
    first, later, network = (mean([getattr(one, name) for one in known]) for name in ("first", "later", "network"))
    unit = "of the test points misclassified" if known[0].unit == "misclassified" else "of the test variance missed"
    error = mean([one.error for one in known])
    sure = f" (the change ± {error:.2g})" if math.isfinite(error) else ""
    says = (
        f"regression on the probe: with the first kernel {first:.3g} {unit}, with the last {later:.3g}{sure}; "
        f"the network {network:.3g}"
    )
    verdict = {True: "better", False: "worse", None: "the same"}[_better(known)]
    return [Evidence("usefulness", says, later - first, "", "", runs=len(known), verdict=verdict)]


def _better(known: Sequence[Usefulness]) -> bool | None:
    """Whether the last kernel is better than the first in all runs (True), worse (False), or neither."""
    said = {one.better for one in known}
    return said.pop() if len(said) == 1 else None


def _good(findings: Sequence[Findings]) -> str:
    """Rich is not the same as good: what the kernels say of the test points."""
    known = [one.useful for one in findings if not one.useful.reason]
    if not known:
        return ""
    word = {True: "better than", False: "worse than", None: "about as good as"}[_better(known)]
    return f" For unseen points the last kernel is {word} the first."


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


def _breakdowns(findings: Sequence[Findings]) -> list[Evidence]:
    steps = [(one.run.name, one.run_data.diverged, one.run_data.steps) for one in findings]
    return [
        Evidence("regime", f"{name} broke down at step {at}; it is read up to step {last}", float(at), "", "")
        for name, at, last in steps
        if at is not None
    ]


def _warnings(findings: Sequence[Findings]) -> list[Evidence]:
    """Warnings about optimizers and layers that make the numbers of kernels less reliable; the gap does not mind."""
    kinds = sorted({kind for one in findings if (kind := one.run_data.optimizer[0]) not in ("", "SGD")})
    notes = [
        f"trained with {kind}, whose steps are not those of the tangent kernel: speeds are less sure" for kind in kinds
    ]
    if any(one.run_data.batch_norm for one in findings):
        notes.append("the network has BatchNorm; its kernels are those of eval mode, not of the steps of training")
    return [Evidence("regime", note, math.nan, "", "") for note in notes]


def _faster(speeds: Sequence[SpeedRatio | Unknown]) -> list[Evidence]:
    known = [speed for speed in speeds if isinstance(speed, SpeedRatio)]
    frozen = sample_of([speed.frozen for speed in known], logarithmic=True)
    rescaled = sample_of([speed.rescaled for speed in known], logarithmic=True)
    if frozen is None or rescaled is None:
        reasons = "; ".join(sorted({speed.reason for speed in speeds if isinstance(speed, Unknown)}))
        return [unknown("speed", f"how much faster than its first kernel it learned: {reasons}")]
    least = "at least " if any(speed.bound for speed in known) else ""
    level = sum(speed.level for speed in known) / len(known)
    says = f"to {level:.2g} of the first loss, the frozen first kernel takes {least}{frozen.words} times as long"
    grown = f"multiplied to its later size, the first kernel takes {least}{rescaled.words} times as long"
    shape = "shape" if rescaled.side(SHAPE_SPEED) == 1 else "cannot tell" if least else "growth"
    return [
        evidence("speed", says, frozen, _words(SPEED), SPEED, _SIDES[frozen.side(SPEED)]),
        evidence(
            "speed",
            grown,
            rescaled,
            f"above {SHAPE_SPEED.high:g} its change of shape made training faster",
            SHAPE_SPEED,
            shape,
        ),
    ]


def _words(threshold: Threshold) -> str:
    return f"lazy below {threshold.low:g}, rich above {threshold.high:g}"
