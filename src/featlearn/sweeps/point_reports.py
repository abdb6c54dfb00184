"""Reports on the runs of each point of a sweep, in the folders of the points."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from featlearn.errors import RunError
from featlearn.reporting.page import report
from featlearn.sweeps.executors import submit_all
from featlearn.sweeps.folder import REPORT
from featlearn.sweeps.grid import Point
from featlearn.sweeps.point_run import one_line
from featlearn.sweeps.progress import SweepProgress

if TYPE_CHECKING:
    from featlearn.sweeps.results import Sweep


def write_reports(sweep: "Sweep", executor: Any, *, quiet: bool) -> list[Path]:
    """Write reports that are missing or older than their runs, with progress; return all paths.

    A report that fails raises a `RunError` after all others are written.
    """
    targets = [(point, target, runs) for point, target, runs in _targets(sweep) if not _is_current(target)]
    calls = {
        number: (
            _write_report,
            [str(run.resolve()) for run in runs],
            str(target),
            str(point) if point.settings else sweep.path.name,
        )
        for number, (point, target, runs) in enumerate(targets)
    }
    failures: list[str] = []
    with SweepProgress("reports", len(calls), 0, 0, quiet=quiet) as progress, submit_all(calls, executor) as results:
        for number, error in results:
            message = None if error is None else one_line(error)
            progress.finish_seed(f"report of {targets[number][0]}", message)
            if message is not None:
                failures.append(f"{targets[number][0]}: {message}")
    if failures:
        raise RunError(f"{len(failures)} of {len(calls)} reports cannot be written; the first, of {failures[0]}")
    return [target for _, target, _ in _targets(sweep)]


def report_links(sweep: "Sweep", folder: Path) -> dict[str, str]:
    """Return point -> link, relative to the folder, to its report if that is newer than its runs."""
    return {
        point.id: quote(Path(os.path.relpath(target.resolve(), folder.resolve())).as_posix())
        for point, target, _ in _targets(sweep)
        if _is_current(target)
    }


def _targets(sweep: "Sweep") -> Iterator[tuple[Point, Path, list[Path]]]:
    """Yield points with runs, the path of their report, and their runs."""
    for point, _ in sweep.points:
        runs = sweep.run_paths({name: point.settings.get(name) for name in sweep.settings})
        if runs:
            yield point, sweep.path / point.id / REPORT, runs


def _title(sweep: "Sweep", point: Point) -> str:
    return str(point) if point.settings else sweep.path.name


def _is_current(target: Path) -> bool:
    newest = max(file.stat().st_mtime_ns for file in target.parent.glob("seed-*.json"))
    return target.exists() and target.stat().st_mtime_ns >= newest


def _write_report(runs: Sequence[str], target: str, title: str) -> None:
    report(runs, target, title=title)
