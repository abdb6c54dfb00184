"""The evidence behind the regime: every number with its threshold."""

import math
from collections.abc import Sequence

from featlearn.diagnosis.evidence import (
    FALLEN,
    FEATURES_MOVED,
    FITTED,
    GAP,
    GREW,
    STATISTICS_MOVED,
    TURNED,
    Evidence,
    Threshold,
    evidence,
    mean,
    sample,
    sample_of,
    unknown,
)
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.judgment import Numbers, Regime
from featlearn.diagnosis.usefulness import Helped, Usefulness
from featlearn.diagnosis.words import dead_network, percent, points

SIDES = {-1: "lazy", 0: "between", 1: "rich"}
NOUNS = {
    "misclassified": "of the test points misclassified",
    "labels": "of the labels of the test points wrong",
    "variance": "of the test variance missed",
}


def regime_evidence(findings: Sequence[Findings], given: Numbers) -> list[Evidence]:
    """Return all statements on the regime."""
    return [
        *breakdowns(findings),
        *_warnings(findings),
        *_about_gap(findings, given),
        *_about_features(findings, given),
        *_about_kernel(findings, given),
        *_about_loss(findings, given),
        *_about_use(findings),
    ]


def breakdowns(findings: Sequence[Findings]) -> list[Evidence]:
    """Return the steps at which runs broke down."""
    steps = [(one.run.name, one.run_data.diverged, one.run_data.steps) for one in findings]
    return [
        Evidence("regime", f"{name} broke down at step {at}; it is read up to step {last}", float(at), "", "")
        for name, at, last in steps
        if at is not None
    ]


def _warnings(findings: Sequence[Findings]) -> list[Evidence]:
    """Return warnings about what makes the numbers of kernels less reliable; they do not concern the gap."""
    kinds = sorted({kind for one in findings if (kind := one.run_data.optimizer[0]) not in ("", "SGD")})
    notes = [f"the steps of {kind} do not follow the tangent kernel: times are less certain" for kind in kinds]
    if any(one.run_data.batch_norm for one in findings):
        notes.append("the network has BatchNorm; its kernels are those of eval mode, not of the steps of training")
    unfrozen = max(one.run_data.unfrozen for one in findings)
    if unfrozen:
        notes.append(
            f"the set of trained weights changed by step {unfrozen}: kernels before and after are not compared"
        )
    if any(one.run_data.dead for one in findings):
        notes.append(dead_network(findings[0].run_data.dead_layers))
    return [Evidence("regime", note, math.nan, "", "") for note in notes]


def _about_gap(findings: Sequence[Findings], given: Numbers) -> list[Evidence]:
    gap = given.gap
    if gap is None:
        return [unknown("regime", f"how far the function left its linearization: {given.missing}")]
    link = (
        "" if all(one.gap.through_link for one in findings) else " (the plain gap: none through the link is recorded)"
    )
    says = (
        f"the linearization at the start misses {gap.words} of the change of the centered outputs {given.where}{link}"
    )
    statements = [evidence("regime", says, gap, _limits(GAP), GAP, SIDES[gap.side(GAP, given.rounding)])]
    plain = sample_of([one.gap.plain_value for one in findings])
    if plain is not None and not link:
        says = f"without the link, the output function behind the last trained map, it misses {plain.words}"
        statements.append(evidence("regime", says, plain, "", GAP, ""))
    if given.rounding:
        says = f"rounding of the outputs may be {given.rounding:.2g} of their change"
        statements.append(Evidence("regime", says, given.rounding, "", ""))
    shrunk = [one.gap for one in findings if one.gap.without_decay]
    with_decay = sample([gap.probe.last for gap in shrunk if gap.probe is not None])
    unshrunk = sample([gap.unshrunk.last for gap in shrunk if gap.unshrunk is not None])
    if unshrunk is not None and with_decay is not None:
        says = (
            f"weight decay has shrunk layers: on the probe it misses {with_decay.words}, without that {unshrunk.words}"
        )
        statements.append(evidence("regime", says, unshrunk, "", GAP, ""))
    if math.isfinite(given.rich_from):
        says = f"the gap is rich from step {given.rich_from:.3g} on, after the data were fitted"
        against = f"loss at {FITTED.high:g} of the first with a lazy gap"
        statements.append(Evidence("regime", says, given.rich_from, against, FITTED.source, verdict="lazy then rich"))
    return statements


def _about_features(findings: Sequence[Findings], given: Numbers) -> list[Evidence]:
    """Return how far the features moved, and the share of the buffers."""
    statistics, statements = given.statistics_moved, list[Evidence]()
    moved = sample_of([one.features_moved for one in findings])
    if moved is not None:
        cka = mean([one.features_moved.cka for one in findings])
        beside = f" (CKA with the start {cka:.3f})" if math.isfinite(cka) else ""
        says = f"what enters the last trained map changed by {moved.words} of its size{beside}"
        told = "moved" if moved.side(FEATURES_MOVED) == 1 else "as at the start"
        against = f"moved above {FEATURES_MOVED.high:g}"
        statements.append(evidence("regime", says, moved, against, FEATURES_MOVED, told))
    if statistics is not None and statistics.mean > 0:
        says = f"running statistics alone changed it by {statistics.words}"
        told = "moved" if statistics.side(STATISTICS_MOVED) == 1 else "as at the start"
        against = f"moved above {STATISTICS_MOVED.high:g}"
        statements.append(evidence("regime", says, statistics, against, STATISTICS_MOVED, told))
    return statements


def _about_kernel(findings: Sequence[Findings], given: Numbers) -> list[Evidence]:
    """Return rotation and growth of the kernel."""
    turned, grew = given.turning, given.growth
    if turned is None:
        recorded = all(one.both_kernels for one in findings)
        why = "the centered kernel vanishes" if recorded else "the first kernel and a later one were not both recorded"
        statements = [unknown("regime", f"how far the kernel rotated: {why}")]
    else:
        says = f"the centered kernel rotated by {turned.words} (1 - cosine with the first)"
        against = f"kept its shape below {TURNED.low:g}, rotated above {TURNED.high:g}"
        # Not lazy or rich: settling BatchNorm averages rotate a kernel, too.
        told = {-1: "kept its shape", 0: "between", 1: "rotated"}[turned.side(TURNED)]
        statements = [evidence("regime", says, turned, against, TURNED, told)]
    if grew is not None:
        says = f"the kernel norm became {grew.words} times the first"
        shrank = Threshold(1 / GREW.high, 1 / GREW.high, GREW.source)
        told = "grew" if grew.side(GREW) == 1 else "shrank" if grew.side(shrank) == -1 else "kept its size"
        against = f"grown above {GREW.high:g}, shrunk below {1 / GREW.high:g}"
        statements.append(evidence("regime", says, grew, against, GREW, told))
    return statements


def _about_loss(findings: Sequence[Findings], given: Numbers) -> list[Evidence]:
    if given.left is None:
        return [unknown("regime", f"how far the loss fell: {findings[0].run_data.why_no_ratio}")]
    settled = all(one.settled_loss for one in findings)
    says = (
        f"at its lowest the learnable loss was {given.left.mean:.2g} of the first{'' if settled else ', still falling'}"
    )
    moved = mean([one.run_data.outputs_moved for one in findings])
    if given.left.mean > FALLEN.high and math.isfinite(moved):
        says += f"; the predictions moved by {moved:.2g} of what was to be learned"
    against = f"at most {FALLEN.high:g}, or no longer falling, for a regime"
    return [evidence("regime", says, given.left, against, FALLEN, "thin" if given.learned is False else "")]


def _about_use(findings: Sequence[Findings]) -> list[Evidence]:
    known = [one.useful for one in findings if math.isfinite(one.useful.network)]
    if not known:
        reasons = dict.fromkeys(one.useful.reason for one in findings)
        return [unknown("usefulness", f"whether learning helped on unseen data: {'; '.join(reasons)}")]
    names = ("network", "constant", "first", "later")
    network, constant, first, later = (mean([getattr(one, name) for one in known]) for name in names)
    noun = NOUNS[known[0].unit]
    says = f"the network: {network:.3g} {noun}; the best constant prediction {constant:.3g}"
    if not math.isfinite(first):
        return [Evidence("usefulness", says, network, "", "", runs=len(known))]
    says += f"; regression on the {known[0].samples or 'same'} samples of the probe with the first kernel {first:.3g}"
    says += f", with the last {later:.3g}"
    error = mean([one.error for one in known])
    if math.isfinite(error):
        says += f" (difference ± {error:.2g})"
    better = {True: "better", False: "worse", None: "the same"}[_better(known)]
    return [Evidence("usefulness", says, later - first, "", "", runs=len(known), verdict=better)]


def _better(known: Sequence[Usefulness]) -> bool | None:
    """Return whether the last kernel is better than the first in all runs (True), worse (False), or neither."""
    answers = {one.better for one in known}
    return answers.pop() if len(answers) == 1 else None


def helped(findings: Sequence[Findings], regime: Regime) -> tuple[Helped, str]:
    """Return whether learning features helped on unseen data: yes, no or cannot tell; and why, in a sentence."""
    known = [one.useful for one in findings if math.isfinite(one.useful.network)]
    if not known:
        reason = findings[0].useful.reason
        return "cannot tell", f"Cannot tell: {reason}."
    answers = {one.helped for one in known}
    answer: Helped = answers.pop() if len(answers) == 1 and len(known) == len(findings) else "cannot tell"
    names = ("network", "constant", "first", "later")
    network, constant, first, later = (mean([getattr(one, name) for one in known]) for name in names)
    told = _fit(known[0], network, constant)
    if any(one.learned is False for one in known):
        word = {"no": "No", "cannot tell": "Cannot tell", "yes": "Yes"}[answer]
        return answer, f"{word}. {told}, which is no better than a constant prediction."
    if not math.isfinite(first):
        return answer, f"Cannot tell. {told}; {known[0].reason}."
    if all(one.worse_than_constant for one in known):
        return answer, f"Cannot tell. {told}; kernel methods on the probe are worse than a constant prediction."
    share = (lambda error: percent(1 - error)) if known[0].unit != "variance" else percent
    rival = f"a kernel method on the initial features reaches {share(first)}"
    seen = f" The kernel method saw the {known[0].samples} samples of the probe, the network possibly more."
    if answer == "yes" and regime == "lazy":
        why = "A lazy network that is better saw more data, or was trained on another loss."
        return "cannot tell", f"Cannot tell. {told}; {rival}. {why}"
    if answer == "yes":
        near = "" if later - network > first - later else f", on the learned features {share(later)}"
        return answer, f"Yes. {told}; {rival}{near}.{seen}"
    if answer == "no":
        also = "also reaches" if abs(first - network) <= 0.02 else "reaches"
        return answer, f"No. {told}; {rival.replace('reaches', also)}."
    margin = 2 * mean([one.gain_error for one in known])
    return answer, f"Cannot tell. {told}; {rival}, within {points(margin)}: too few test points."


def _fit(useful: Usefulness, network: float, constant: float) -> str:
    """Return the fit of the network on the test points beside that of a constant prediction."""
    if useful.unit == "variance":
        return f"Test error is {percent(network)} of the variance"
    noun = "Test accuracy" if useful.unit == "misclassified" else "Accuracy of test labels"
    return f"{noun} is {percent(1 - network)} (chance {percent(1 - constant)})"


def _limits(threshold: Threshold) -> str:
    return f"lazy below {threshold.low:g}, rich above {threshold.high:g}"
