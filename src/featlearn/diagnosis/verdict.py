"""The verdict on one or several runs, in words and with its evidence."""

import json
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from featlearn.diagnosis.evidence import Evidence
from featlearn.diagnosis.findings import findings_of
from featlearn.diagnosis.judgement import Regime, assess_regime, numbers
from featlearn.diagnosis.layers import LayerLearning, LayerPairMechanism
from featlearn.diagnosis.machine import KernelMachine
from featlearn.diagnosis.statements import (
    LISTED,
    assess_features,
    assess_kernel_machine,
    assess_layers,
    assess_settling,
    assess_silence,
    learned_in,
)
from featlearn.errors import InputTypeError, InputValueError
from featlearn.record import Run, open_run

SCHEMA = 1
"""Version of `Diagnosis.to_json`; increased when a name is removed or changes its meaning."""
WIDTH = 100
"""Columns of `str(diagnosis)`."""


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The diagnosis of a run. `print` it; `evidence` has every statement with its number and threshold."""

    regime: Regime
    """"lazy" (a fixed kernel explains it), "rich" (features were learned), "mixed", or "cannot tell" """
    numbers: Mapping[str, float]
    """what decides the regime: kernel_moved (centred), speedup, alignment_rise, loss_left; for information
    kernel_moved_raw, speedup_rescaled, kernel_growth, weights_moved"""
    silent: bool | None
    """whether alignment was complete before kernel norm and loss moved; None if unknown"""
    kernel_machine: KernelMachine
    """which kernel reproduces the network by regression, and how well"""
    mechanism: Mapping[str, LayerPairMechanism]
    """by layer pair, "first--second", as the run names its layers"""
    layers: Mapping[str, LayerLearning]
    """how much each layer learned, sorted by how far its weight moved"""
    times: Mapping[str, float]
    """steps: loss_half, alignment_90, norm_10, kernel_settled; means over runs, nan if an event did not happen or lies
    in a gap between measurements in any run"""
    specialization: float
    """how much better each output's kernel fits its own target than the others do"""
    feature_rate: float
    """effective feature rate (Shan & Bordelon 2021a, Sec. 7) for kernels and targets of norm one"""
    evidence: Sequence[Evidence]
    runs: tuple[str, ...]
    """names of the runs"""
    headline: str
    """the regime as a sentence; says so if training broke down"""

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
    regime, headline, about_regime = assess_regime(findings, learned_in(layers)[:LISTED])
    silent, times, about_silence = assess_silence(findings)
    settled, about_settling = assess_settling(findings)
    machine, about_machine = assess_kernel_machine(findings)
    specialization, rate, about_features = assess_features(findings)
    evidence = about_regime
    if not all(one.run_data.lost for one in findings):
        evidence = [*about_regime, *about_silence, *about_settling, *about_machine, *about_layers, *about_features]
    return Diagnosis(
        regime, numbers(findings), silent, machine, mechanism, layers, {**times, "kernel_settled": settled},
        specialization, rate, tuple(evidence), tuple(one.run.name for one in findings), headline,
    )  # fmt: skip


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
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        return {key: _plain(getattr(value, key)) for key in value.__dataclass_fields__}
    return value
