"""Groups of runs: runs that differ only in their seed become one line with a band."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy

from featlearn.diagnosis import Diagnosis
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.verdict import diagnose_findings, findings_of
from featlearn.record import Run
from featlearn.reporting.content_blocks import ChartLine, thin
from featlearn.reporting.run_facts import short

# Entries of run.json that may differ between runs of one experiment.
_OWN = {
    "name",
    "seed",
    "created",
    "finished",
    "overhead",
    "measurements",
    "measuring",
    "wall_share",
    "costs",
    "steps",
    "device",
    "checkpoints",
}
_SHOWN = ("kernel", "outputs", "spectrum", "specialization", "targets", "test")

LONGEST_LABEL = 2
"""Largest number of settings in the label of a run."""

Read = Callable[[Findings], tuple[Sequence[float], Sequence[float]] | None]
"""(steps, values) of one run; None if it has none"""


@dataclass(frozen=True, eq=False)
class RunGroup:
    """One run, or several that share their configuration up to the seed."""

    label: str
    findings: Sequence[Findings]
    color: int
    points: int
    """largest number of points of a line"""
    alone: bool
    """whether it is the only group, so that labels need not name it"""

    @property
    def runs(self) -> list[Run]:
        """The runs themselves."""
        return [one.run for one in self.findings]

    @property
    def first(self) -> Findings:
        """The first run, shown where there is no mean over runs, for example for kernels."""
        return self.findings[0]

    @cached_property
    def sound(self) -> list[Findings]:
        """The runs that did not diverge."""
        return [one for one in self.findings if one.run_data.diverged is None]

    @property
    def left_out(self) -> list[str]:
        """Runs that are left out of means, with the reason; none if all runs diverged."""
        return (
            []
            if not self.sound
            else [
                f"{one.run.name} in the means of {self.label}, as it diverged at step {one.run_data.diverged}"
                for one in self.findings
                if one not in self.sound
            ]
        )

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The diagnosis of these runs."""
        return diagnose_findings(self.findings)

    @cached_property
    def names(self) -> set[str]:
        """Names of the scalars that at least one run has."""
        return {name for run in self.runs for name in run.names}

    def line(self, read: Read, label: str = "", *, color: int | None = None, dash: int = 0) -> ChartLine | None:
        """A curve of the group, the mean over its runs that did not diverge; None if no run has it."""
        used = self.sound or self.findings
        found = [curve for curve in map(read, used) if curve is not None and len(curve[0])]
        if not found:
            return None
        until = math.inf if self.sound else min(float(one.run_data.steps) for one in used)
        name = self.named(label)
        shade = self.color if color is None else color
        if len(found) == 1:
            return ChartLine(
                name, *thin(*found[0], self.points), shade, dash, group=self.color, kind=label, until=until
            )
        x, mean, low, high = band(found, self.points)
        return ChartLine(name, x, mean, shade, dash, low, high, self.color, label, until)

    def named(self, label: str) -> str:
        """The label of a line."""
        return self.label if not label else label if self.alone else f"{self.label}: {label}"

    def scalar(self, name: str, label: str = "", *, color: int | None = None, dash: int = 0) -> ChartLine | None:
        """The curve of a recorded scalar."""
        return self.line(lambda one: finite(one.run, name), label, color=color, dash=dash)


def finite(run: Run, name: str) -> tuple[list[float], list[float]] | None:
    """(steps, values) of the finite values of a recorded scalar; None if there are none."""
    pairs = [(float(line["step"]), line["values"][name]) for line in run.lines if name in line["values"]]
    pairs = [pair for pair in pairs if math.isfinite(pair[1])]
    return ([s for s, _ in pairs], [v for _, v in pairs]) if pairs else None


def groups(runs: Any, *, bands: bool = True, points: int) -> list[RunGroup]:
    """Open runs, raise for damaged ones, and group those that differ only in their seed."""
    opened = findings_of(runs)
    together: list[list[Findings]] = []
    for findings in opened:
        _sound(findings.run)
        home = next((other for other in together if bands and _belongs(findings.run, _runs(other))), None)
        if home is None:
            together.append([findings])
        else:
            home.append(findings)
    labels = _labels([some[0].run for some in together])
    return [
        RunGroup(label, some, color, points, len(together) == 1)
        for color, (label, some) in enumerate(zip(labels, together, strict=True))
    ]


def _runs(findings: Sequence[Findings]) -> list[Run]:
    return [one.run for one in findings]


def _sound(run: Run) -> None:
    """Read all data of the report, so that damaged runs raise before anything is written."""
    _ = run.lines, run.events
    for name in _SHOWN:
        for step in run.arrays.get(name, ()):
            run.array(name, step)


def _belongs(run: Run, others: Sequence[Run]) -> bool:
    """Whether a run equals the others up to its seed, which no other has."""
    seed = run.config.get("seed")
    return (
        seed is not None
        and all(other.config.get("seed") not in (None, seed) for other in others)
        and _identity(run.config) == _identity(others[0].config)
    )


def _identity(config: Mapping[str, Any]) -> str:
    settings = config.get("settings")
    if isinstance(settings, Mapping):
        config = {**config, "settings": {key: value for key, value in settings.items() if key != "seed"}}
    return json.dumps({key: value for key, value in config.items() if key not in _OWN}, sort_keys=True, default=str)


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return the settings that differ if they tell runs apart, else the names, numbered where several share one."""
    settings = [given if isinstance(given := run.config.get("settings"), Mapping) else {} for run in runs]
    names = [name for name in dict.fromkeys(name for each in settings for name in each) if name != "seed"]
    differing = [name for name in names if len({str(each.get(name)) for each in settings}) > 1]
    if 0 < len(differing) <= LONGEST_LABEL and all(name in each for each in settings for name in differing):
        labels = [", ".join(f"{name} {short(each[name])}" for name in differing) for each in settings]
        if len(set(labels)) == len(runs):
            return labels
    run_names = [run.name for run in runs]
    return [name if run_names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(run_names)]


def band(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]], points: int
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Mean, smallest and largest value over the common range of steps, interpolated in log(1 + step).

    Under a budget, each run is measured at its own steps.
    """
    begin, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    places = sorted({p for x, _ in curves for p in x if begin <= p <= end})
    places, _ = thin(places, places, points)
    values = numpy.array([numpy.interp(numpy.log1p(places), numpy.log1p(x), y) for x, y in curves])
    return places, values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist()
