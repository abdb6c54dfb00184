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
    mean_record,
    sample,
    unknown,
)
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.judgment import Numbers, Regime
from featlearn.diagnosis.usefulness import SAME, Helped, Usefulness
from featlearn.diagnosis.words import dead_network, percent, points

SIDES = {-1: "lazy", 0: "between", 1: "rich"}


def regime_evidence(findings: Sequence[Findings], basis: Numbers, answer: tuple[Helped, str]) -> list[Evidence]:
    """Return all statements on the regime; `answer`: whether it helped."""
    return [
        *breakdowns(findings),
        *_warnings(findings),
        *_about_gap(findings, basis),
        *_about_features(findings, basis),
        *_about_kernel(findings, basis),
        *_about_loss(findings, basis),
        *_about_use(findings, answer),
    ]


def breakdowns(findings: Sequence[Findings]) -> list[Evidence]:
    """Return the steps at which runs broke down."""
    steps = [(one.run.name, one.run_data.diverged, one.run_data.steps) for one in findings]
    return [
        Evidence("regime", f"{name} broke down at step {at}; it is read up to step {last}", float(at))
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
    return [Evidence("regime", note) for note in notes]


def _about_gap(findings: Sequence[Findings], basis: Numbers) -> list[Evidence]:
    gap = basis.gap
    if gap is None:
        return [unknown("regime", f"how far the function left its linearization: {basis.missing}")]
    link = (
        "" if all(one.gap.through_link for one in findings) else " (the plain gap: none through the link is recorded)"
    )
    says = (
        f"the linearization at the start misses {gap.words} of the change of the centered outputs {basis.where}{link}"
    )
    statements = [evidence("regime", says, gap, _limits(GAP), GAP, SIDES[gap.side(GAP, basis.rounding)])]
    plain = sample([one.gap.plain_value for one in findings])
    merged = _merged_weights(findings[0])
    if merged:
        says = f"{merged} weights were taken as they act: frozen map and adapter, or product of factors, as one"
        statements.append(Evidence("regime", says, float(merged)))
    if plain is not None and not link:
        without = "without the link, the output function behind the last trained map"
        without += " and in the factors themselves" if merged else ""
        statements.append(evidence("regime", f"{without}, it misses {plain.words}", plain, "", GAP, ""))
    if basis.rounding:
        says = f"rounding of the outputs may be {basis.rounding:.2g} of their change"
        statements.append(Evidence("regime", says, basis.rounding))
    shrunk = [one.gap for one in findings if one.gap.without_decay]
    with_decay = sample([gap.probe.last for gap in shrunk if gap.probe is not None])
    unshrunk = sample([gap.unshrunk.last for gap in shrunk if gap.unshrunk is not None])
    if unshrunk is not None and with_decay is not None:
        says = (
            f"weight decay has shrunk layers: on the probe it misses {with_decay.words}, without that {unshrunk.words}"
        )
        statements.append(evidence("regime", says, unshrunk, "", GAP, ""))
    if math.isfinite(basis.rich_from):
        says = f"the gap is rich from step {basis.rich_from:.3g} on, after the data were fitted"
        against = f"loss at {FITTED.high:g} of the first with a lazy gap"
        statements.append(Evidence("regime", says, basis.rich_from, against, FITTED.source, verdict="lazy then rich"))
    return statements


def _about_features(findings: Sequence[Findings], basis: Numbers) -> list[Evidence]:
    """Return how far the features moved, and the share of the buffers."""
    statistics, statements = basis.statistics_moved, list[Evidence]()
    moved = sample([one.features_moved for one in findings])
    if moved is not None:
        cka = mean([one.features_moved.cka for one in findings])
        beside = f" (CKA with the start {cka:.3f})" if math.isfinite(cka) else ""
        says = f"what enters the last trained map changed by {moved.words} of its size{beside}"
        word = "moved" if moved.side(FEATURES_MOVED) == 1 else "as at the start"
        against = f"moved above {FEATURES_MOVED.high:g}"
        statements.append(evidence("regime", says, moved, against, FEATURES_MOVED, word))
    if statistics is not None and statistics.mean > 0:
        says = f"running statistics alone changed it by {statistics.words}"
        word = "moved" if statistics.side(STATISTICS_MOVED) == 1 else "as at the start"
        against = f"moved above {STATISTICS_MOVED.high:g}"
        statements.append(evidence("regime", says, statistics, against, STATISTICS_MOVED, word))
    return statements


def _about_kernel(findings: Sequence[Findings], basis: Numbers) -> list[Evidence]:
    """Return rotation and growth of the kernel."""
    turned, grew = basis.turning, basis.growth
    if turned is None:
        recorded = all(one.both_kernels for one in findings)
        why = "the centered kernel vanishes" if recorded else "the first kernel and a later one were not both recorded"
        statements = [unknown("regime", f"how far the kernel rotated: {why}")]
    else:
        says = f"the centered kernel rotated by {turned.words} (1 - cosine with the first)"
        against = f"kept its shape below {TURNED.low:g}, rotated above {TURNED.high:g}"
        # Not lazy or rich: settling BatchNorm averages rotate a kernel, too.
        word = {-1: "kept its shape", 0: "between", 1: "rotated"}[turned.side(TURNED)]
        statements = [evidence("regime", says, turned, against, TURNED, word)]
    if grew is not None:
        says = f"the kernel norm became {grew.words} times the first"
        shrank = Threshold(1 / GREW.high, 1 / GREW.high, GREW.source)
        word = "grew" if grew.side(GREW) == 1 else "shrank" if grew.side(shrank) == -1 else "kept its size"
        against = f"grown above {GREW.high:g}, shrunk below {1 / GREW.high:g}"
        statements.append(evidence("regime", says, grew, against, GREW, word))
    return statements


def _about_loss(findings: Sequence[Findings], basis: Numbers) -> list[Evidence]:
    if basis.left is None:
        return [unknown("regime", f"how far the loss fell: {findings[0].run_data.why_no_ratio}")]
    settled = all(one.settled_loss for one in findings)
    says = (
        f"at its lowest the learnable loss was {basis.left.mean:.2g} of the first{'' if settled else ', still falling'}"
    )
    moved = mean([one.run_data.outputs_moved for one in findings])
    if basis.left.mean > FALLEN.high and math.isfinite(moved):
        says += f"; the predictions moved by {moved:.2g} of what was to be learned"
    against = f"at most {FALLEN.high:g}, or no longer falling, for a regime"
    return [evidence("regime", says, basis.left, against, FALLEN, "thin" if basis.learned is False else "")]


def _about_use(findings: Sequence[Findings], answer: tuple[Helped, str]) -> list[Evidence]:
    """Return whether learning features helped; the value is the error with the first kernel less the network's."""
    gain = sample([one.useful.first - one.useful.network for one in findings])
    if gain is None:
        reasons = dict.fromkeys(one.useful.reason for one in findings)
        return [unknown("usefulness", f"whether learning helped on unseen data: {'; '.join(reasons)}")]
    return [Evidence("usefulness", answer[1], gain.mean, spread=gain.spread, runs=gain.runs, verdict=answer[0])]


def helped(findings: Sequence[Findings], regime: Regime) -> tuple[Helped, str]:
    """Return whether learning features helped on unseen data: yes, no or cannot tell; and why, in a sentence."""
    known = [one.useful for one in findings if math.isfinite(one.useful.network)]
    if not known:
        reason = findings[0].useful.reason
        return "cannot tell", f"Cannot tell: {reason}."
    answers = {one.helped for one in known}
    answer: Helped = answers.pop() if len(answers) == 1 and len(known) == len(findings) else "cannot tell"
    useful = mean_record(known)
    fit = _fit(useful)
    share = (lambda error: percent(1 - error)) if useful.unit != "variance" else percent
    rival = f"a kernel method on the initial features reaches {share(useful.first)}"
    if any(one.learned is None and one.helped == "cannot tell" for one in known):
        beside = f"; {rival}" if useful.first < useful.constant else ""
        unclear = f"which {useful.tested} test samples cannot tell from a constant prediction"
        return "cannot tell", f"Cannot tell. {fit}, {unclear}{beside}."
    if any(one.learned is False for one in known):
        word = {"no": "No", "cannot tell": "Cannot tell", "yes": "Yes"}[answer]
        beside = "" if useful.nothing_learnable else f"; {rival}"
        most = useful.most_learned
        better = f"at most {points(most)} better" if most > SAME else "no better"
        return answer, f"{word}. {fit}: {better} than a constant prediction{beside}."
    if not math.isfinite(useful.first):
        return answer, f"Cannot tell. {fit}; {useful.reason}."
    if all(one.worse_than_constant for one in known):
        return answer, f"Cannot tell. {fit}; kernel methods on the probe are worse than a constant prediction."
    seen = f" The kernel method saw the {useful.samples} samples of the probe, the network possibly more."
    if answer == "yes" and regime == "lazy":
        why = "A lazy network that is better saw more data, or was trained on another loss."
        return "cannot tell", f"Cannot tell. {fit}; {rival}. {why}"
    if answer == "yes":
        nearer = useful.later - useful.network <= useful.first - useful.later
        near = f", on the learned features {share(useful.later)}" if nearer else ""
        return answer, f"Yes. {fit}; {rival}{near}.{seen}"
    if answer == "no":
        also = "also reaches" if abs(useful.first - useful.network) <= 0.02 else "reaches"
        return answer, f"No. {fit}; {rival.replace('reaches', also)}."
    margin = 2 * useful.gain_error
    return answer, f"Cannot tell. {fit}; {rival}, within {points(margin)}: too few test points."


def _fit(useful: Usefulness) -> str:
    """Return the fit of the network on the test points beside that of a constant prediction."""
    if useful.unit == "variance":
        return f"Test error is {percent(useful.network)} of the variance"
    noun = "Test accuracy" if useful.unit == "misclassified" else "Accuracy of test labels"
    return f"{noun} is {percent(1 - useful.network)} (chance {percent(1 - useful.constant)})"


def _limits(threshold: Threshold) -> str:
    return f"lazy below {threshold.low:g}, rich above {threshold.high:g}"


def _merged_weights(findings: Findings) -> int:
    """Return how many weights the gap takes as one product: adapters beside a frozen map, weights made of factors."""
    merged = findings.run_data.curve("gap/merged_weights", least=1)
    return 0 if merged is None else int(merged.last)
