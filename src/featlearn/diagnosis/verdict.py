"""The verdict on one or several runs, in words and with its evidence."""

import json
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from featlearn.diagnosis.evidence import Evidence, estimate_of
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.gap_curve import GapCurve
from featlearn.diagnosis.judgment import Regime, judge, regime_numbers, rich_from, samples
from featlearn.diagnosis.layers import LayerLearning, LayerPairMechanism
from featlearn.diagnosis.machine import KernelMachine
from featlearn.diagnosis.moved_features import MovedFeatures
from featlearn.diagnosis.opinions import Opinion
from featlearn.diagnosis.regime_evidence import breakdowns, helped, regime_evidence
from featlearn.diagnosis.statements import (
    assess_kernel_machine,
    assess_layers,
    assess_opinions,
    assess_settling,
    assess_silence,
    learned_in,
)
from featlearn.diagnosis.usefulness import Helped, Usefulness
from featlearn.diagnosis.words import name_layers, percent
from featlearn.errors import InputTypeError, InputValueError
from featlearn.linalg.estimate import Estimate
from featlearn.record import Run, open_run

SCHEMA = 4
"""Version of `Diagnosis.to_json`; increased when a name is removed or changes its meaning."""
WIDTH = 100
"""Columns of `Diagnosis.full`."""
PRIVATE = ("findings",)
"""Fields that are not part of the JSON document."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Diagnosis:
    """The diagnosis of a run. `print` it for a summary; `full` has every statement with its number and threshold."""

    regime: Regime
    """"lazy" (the linearization at the start explains it), "rich" (features were learned), "mixed", "lazy then rich"
    (`times["rich_from"]`), or "cannot tell" """
    so_far: str
    """what it looks like so far and what is missing, where too little was learned for a regime; else empty"""
    helped: Helped
    """whether learning features helped on unseen data: "yes", "no" or "cannot tell" """
    why_helped: str
    """the same in a sentence, with its numbers"""
    numbers: Mapping[str, Estimate]
    """each with its error, nan if unknown: gap, features_moved, turning, growth, loss_left, which decide the
    regime; for information plain_gap, statistics_moved, turning_raw, alignment_rise, weights_moved"""
    gap: GapCurve
    """the linearization gap of the first run: `float()` at the end, `.steps` and `.values`, `.test`, `.where`"""
    plain_gap: Estimate
    """the gap of the first run without the link: with the output function behind the last trained map"""
    features_moved: MovedFeatures
    """relative change of what enters the last trained map, of the first run; `.by_layer`, `.cka`"""
    statistics_moved: Estimate
    """the same by running statistics alone"""
    growth: Estimate
    """norm of the last kernel divided by that of the first"""
    turning: Estimate
    """rotation of the kernel: 1 - cosine of the centered first and last kernel"""
    useful: Usefulness
    """test errors of the first run: the network, kernel regression, the best constant prediction"""
    opinions: Mapping[str, Opinion]
    """metrics of the first run that need no kernel, by name"""
    silent: bool | None
    """whether alignment was complete before kernel norm and loss moved; None if unknown"""
    kernel_machine: KernelMachine
    """which kernel reproduces the network by regression, and how well"""
    mechanism: Mapping[str, LayerPairMechanism]
    """by layer pair, "first--second", as the run names its layers"""
    layers: Mapping[str, LayerLearning]
    """how much each layer learned, sorted by how far its weight moved"""
    times: Mapping[str, float]
    """steps: loss_half, alignment_90, norm_10, kernel_settled, rich_from; means over runs, nan if an event did not
    happen or lies in a gap between measurements in any run"""
    evidence: Sequence[Evidence]
    """every statement with its number, threshold and source"""
    runs: tuple[str, ...]
    """names of the runs"""
    headline: str
    """what happened, in a sentence; says so if training broke down"""
    explanation: str
    """the number behind it, in a sentence; empty if the headline has it"""
    diverged: bool
    """whether the loss of any run exploded, or became nan or infinite for good"""
    findings: Sequence[Findings]
    """what was read from the runs"""

    def __str__(self) -> str:
        return self.summary

    @cached_property
    def summary(self) -> str:
        """The verdict in at most eight lines; advice is tried on a copy if the network is in this process."""
        from featlearn.diagnosis.advice import next_step

        lines = [f"{_listed(self.runs)}: {self.headline}", ""]
        if self.explanation:
            lines.append(f"  {self.explanation}")
        if not self.so_far and not all(one.run_data.lost for one in self.findings):
            lines.append(f"  Did it help?  {self.why_helped}")
        where = learned_in(self.layers)
        if where and self.regime not in ("lazy", "cannot tell"):
            lines.append(f"  Where:        {name_layers(where)}.")
        overhead = self.findings[0].run.config.get("overhead")
        if isinstance(overhead, int | float) and math.isfinite(overhead) and self.findings[0].run_data.steps:
            cost = f"{percent(overhead)} of" if overhead < 2 else f"{overhead:.0f} times the"
            lines.append(f"  Overhead:     {cost} training time.")
        lines += [
            f"  Next:         {next_step(self)}",
            '  More:         run.report("report.html"), or diagnosis.full',
        ]
        return "\n".join(lines)

    @cached_property
    def full(self) -> str:
        """All statements by topic, also those that are inconclusive, with their thresholds."""
        topics: dict[str, list[str]] = {}
        for item in self.evidence:
            topics.setdefault(item.topic, []).append(str(item))
        sources = list(dict.fromkeys(item.source for item in self.evidence if item.source))
        topics |= {"thresholds": sources} if sources else {}
        lines = [_wrapped(f"{', '.join(self.runs)}: {self.headline} {self.explanation}".rstrip(), "", "  ")]
        for topic, statements in topics.items():
            lines += [f"{topic}:", *(_wrapped(statement, "  - ", "    ") for statement in statements)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return all attributes as JSON; nan and infinity become null. `schema` is the version of the format."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in PRIVATE}
        return json.dumps({"schema": SCHEMA, **_plain(fields)}, indent=1)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"


def _wrapped(text: str, first: str, later: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def diagnose(run: Run | str | os.PathLike[str] | Sequence[Run | str | os.PathLike[str]]) -> Diagnosis:
    """Diagnose a watched run: did it learn features, did that help, where, and what to change.

    Args:
        run: A run, its path (a directory or a `.zip`), or several runs that differ in their seed. For several runs,
            numbers are means, compared with thresholds by a margin of twice the standard error of the mean.

    Nothing is measured again. Missing or nan data is no error: the diagnosis then says what is unknown, and why. A
    damaged file raises a `RunError`, as its content might change the verdict. The thresholds of the regime were chosen
    on runs whose regime is known by construction; docs/how-to/read-a-diagnosis.md has the table, and explains each
    statement.
    """
    return diagnose_findings(findings_of(run))


def diagnose_findings(findings: Sequence[Findings]) -> Diagnosis:
    """Return the diagnosis of runs whose data was read."""
    lost = all(one.run_data.lost for one in findings)
    known = samples(findings)
    basis = regime_numbers(findings, known)
    verdict = judge(basis)
    mechanism, layers, about_layers = assess_layers(findings)
    silent, times, about_silence = assess_silence(findings)
    settled, about_settling = assess_settling(findings)
    machine, about_machine = assess_kernel_machine(findings)
    answer, why = helped(findings, verdict.regime)
    evidence = breakdowns(findings)
    if not lost:
        evidence = [
            *regime_evidence(findings, basis, (answer, why)),
            *assess_opinions(findings),
            *about_silence,
            *about_settling,
        ]
        evidence += [*about_machine, *about_layers]
    estimates, first = {name: estimate_of(number) for name, number in known.items()}, findings[0]
    return Diagnosis(
        regime="cannot tell" if lost else verdict.regime,
        so_far="" if lost else verdict.so_far,
        helped=answer,
        why_helped=why,
        numbers=estimates,
        gap=first.gap,
        plain_gap=first.gap.plain_value,
        features_moved=first.features_moved,
        statistics_moved=first.statistics_moved,
        growth=estimates["growth"],
        turning=estimates["turning"],
        useful=first.useful,
        opinions=first.opinions,
        silent=silent,
        kernel_machine=machine,
        mechanism=mechanism,
        layers=layers,
        times={**times, "kernel_settled": settled, "rich_from": rich_from(findings)},
        evidence=tuple(evidence),
        runs=tuple(one.run.name for one in findings),
        headline=_breakdown(findings) + ("Nothing else can be told." if lost else verdict.headline),
        explanation="" if lost else verdict.number,
        diverged=any(one.run_data.diverged is not None for one in findings),
        findings=tuple(findings),
    )


def _breakdown(findings: Sequence[Findings]) -> str:
    """Return the beginning of the headline if training broke down."""
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


def findings_of(runs: Any) -> list[Findings]:
    """Open runs, and return their findings; those that are passed, also in a diagnosis, keep their numbers."""
    if isinstance(runs, Findings):
        return [runs]
    if isinstance(runs, Diagnosis):
        return list(runs.findings)
    if isinstance(runs, Run):
        return [Findings(runs)]
    if isinstance(runs, str | os.PathLike):
        return [Findings(open_run(runs))]
    if not isinstance(runs, Sequence):
        raise InputTypeError(f"runs are {type(runs).__name__}, expected a Run, its path, or several of them")
    if not runs:
        raise InputValueError("no runs are passed, expected at least one")
    return [findings for part in runs for findings in findings_of(part)]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, GapCurve):
        return _plain(
            {
                "value": value.value,
                "where": value.where,
                "through_link": value.through_link,
                "steps": value.steps,
                "values": value.values,
                "test": [] if value.test is None else value.test.values.tolist(),
                "unshrunk": [] if value.unshrunk is None else value.unshrunk.values.tolist(),
            }
        )
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        return {key: _plain(getattr(value, key)) for key in value.__dataclass_fields__}
    return value
