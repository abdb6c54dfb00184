"""The verdict on one or several runs, in words and with its evidence."""

import json
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from featlearn.diagnosis.departure import Departure
from featlearn.diagnosis.evidence import Evidence
from featlearn.diagnosis.findings import findings_of
from featlearn.diagnosis.gap_curve import GapCurve
from featlearn.diagnosis.judgment import Regime, assess_regime, numbers, rich_from
from featlearn.diagnosis.layers import LayerLearning, LayerPairMechanism
from featlearn.diagnosis.machine import KernelMachine
from featlearn.diagnosis.opinions import Opinion
from featlearn.diagnosis.statements import (
    assess_features,
    assess_kernel_machine,
    assess_layers,
    assess_opinions,
    assess_settling,
    assess_silence,
)
from featlearn.diagnosis.usefulness import Usefulness
from featlearn.errors import InputTypeError, InputValueError
from featlearn.linalg.estimate import Estimate
from featlearn.record import Run, open_run

SCHEMA = 2
"""Version of `Diagnosis.to_json`; increased when a name is removed or changes its meaning."""
WIDTH = 100
"""Columns of `str(diagnosis)`."""


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The diagnosis of a run. `print` it; `evidence` has every statement with its number and threshold."""

    regime: Regime
    """"lazy" (the linearization at the start explains it), "rich" (features were learned), "mixed", "lazy then rich"
    (`times["rich_from"]`), or "cannot tell" """
    numbers: Mapping[str, Estimate]
    """each with its error, nan if unknown: gap, departure, turning, growth, loss_left, which decide the regime; for
    information turning_raw, speedup, speedup_rescaled, alignment_rise, weights_moved"""
    gap: GapCurve
    """the linearization gap of the first run: `float()` at the end, `.steps` and `.values`, `.test`, `.unshrunk`"""
    departure: Departure
    """distance of the first run from training with its frozen first kernel, on probe and test points"""
    growth: Estimate
    """norm of the last kernel divided by that of the first"""
    turning: Estimate
    """1 - cosine of the centered first and last kernel"""
    useful: Usefulness
    """test error of regression with the first and with the last kernel, of the first run"""
    opinions: Mapping[str, Opinion]
    """what other cheap metrics say of the first run, by name"""
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
    specialization: float
    """how much better each output's kernel fits its own target than the others do"""
    feature_rate: float
    """effective feature rate (Shan & Bordelon 2021a, Sec. 7) for kernels and targets of norm one"""
    evidence: Sequence[Evidence]
    runs: tuple[str, ...]
    """names of the runs"""
    headline: str
    """the regime as a sentence; says so if training broke down"""
    diverged: bool
    """whether the loss of any run exploded, or became nan or infinite for good"""

    def __str__(self) -> str:
        head = f"{', '.join(self.runs)}: {self.headline}"
        topics: dict[str, list[str]] = {}
        for item in self.evidence:
            topics.setdefault(item.topic, []).append(str(item))
        sources = list(dict.fromkeys(item.source for item in self.evidence if item.source))
        topics |= {"thresholds": sources} if sources else {}
        lines = [_wrapped(head, "", "  ")]
        for topic, said in topics.items():
            lines += [f"{topic}:", *(_wrapped(one, "  - ", "    ") for one in said)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """All attributes as JSON; nan and infinity become null. `schema` is the version of the format."""
        return json.dumps({"schema": SCHEMA, **_plain(self.__dict__)}, indent=1)


def _wrapped(text: str, first: str, later: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def diagnose(run: Run | str | os.PathLike[str] | Sequence[Run | str | os.PathLike[str]]) -> Diagnosis:
    """Diagnose a watched run: lazy or rich, silent alignment or not, kernel machine or not, and by which mechanism.

    Args:
        run: a run, its path (a directory or a `.zip`), or several runs that differ in their seed. For several runs,
            numbers are means, compared with thresholds by a margin of twice the standard error of the mean.

    Nothing is measured again. Missing or nan data is no error: the diagnosis then says what is unknown, and why. A
    damaged file raises a `RunError`, as its content might change the verdict. The thresholds of the regime were chosen
    on runs whose regime is known by construction; docs/how-to/read-a-diagnosis.md has the table, and explains each
    statement.
    """
    findings = [findings_of(one) for one in _runs(run)]
    mechanism, layers, about_layers = assess_layers(findings)
    regime, headline, about_regime = assess_regime(findings)
    silent, times, about_silence = assess_silence(findings)
    settled, about_settling = assess_settling(findings)
    machine, about_machine = assess_kernel_machine(findings)
    specialization, rate, about_features = assess_features(findings)
    evidence = about_regime
    if not all(one.run_data.lost for one in findings):
        evidence = [
            *about_regime,
            *assess_opinions(findings),
            *about_silence,
            *about_settling,
            *about_machine,
            *about_layers,
            *about_features,
        ]
    found, first = numbers(findings), findings[0]
    times |= {"kernel_settled": settled, "rich_from": rich_from(findings)}
    return Diagnosis(
        regime,
        found,
        first.gap,
        first.departure,
        found["growth"],
        found["turning"],
        first.useful,
        {one.name: one for one in first.opinions},
        silent,
        machine,
        mechanism,
        layers,
        times,
        specialization,
        rate,
        tuple(evidence),
        tuple(one.run.name for one in findings),
        headline,
        any(one.run_data.diverged is not None for one in findings),
    )


def _runs(given: Any) -> list[Run]:
    if isinstance(given, Run):
        return [given]
    if isinstance(given, str | os.PathLike):
        return [open_run(given)]
    if isinstance(given, Sequence):
        if not given:
            raise InputValueError("no runs are given, expected at least one")
        return [one for part in given for one in _runs(part)]
    raise InputTypeError(f"run is {type(given).__name__}, expected a Run, its path, or several of them")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, GapCurve):
        return _plain(
            {
                "value": value.value,
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
