"""Recorded runs by their path."""

from pathlib import Path
from typing import TYPE_CHECKING

from featlearn.errors import RunError

if TYPE_CHECKING:
    from featlearn.record import Run

FOLDER = Path("runs")
"""Where `featlearn diagnose` puts runs."""


def recorded_runs(path: Path) -> list[Path]:
    """The run at a path, or the seeds of one experiment that lie in this folder; empty if there are none."""
    if (path / "run.json").is_file() or (path.suffix == ".zip" and path.is_file()):
        return [path]
    seeds = [found.parent for found in path.glob("seed-*/run.json")] if path.is_dir() else []
    return sorted(seeds, key=lambda seed: (len(seed.name), seed.name))


def advice(name: str) -> str:
    """What to call, for a word that is no recorded run."""
    close = FOLDER / name
    return f"; did you mean {close}?" if recorded_runs(close) else "; featlearn runs ls FOLDER lists runs"


def open_recorded_run(path: Path) -> "Run":
    """The run at a path; an error says what to call instead."""
    from featlearn.record import open_run

    found = recorded_runs(path)
    if found not in ([], [path]):
        raise RunError(
            f"{path} is a folder of {len(found)} runs, expected one of them, {found[0]} for example; "
            f"featlearn diagnose {path} judges all together"
        )
    if not found and not path.exists():
        raise RunError(f"{path} is not there, expected the folder or the .zip of a run{advice(str(path))}")
    return open_run(path)
