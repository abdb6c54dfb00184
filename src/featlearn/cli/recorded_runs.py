"""Find recorded runs by path."""

from pathlib import Path
from typing import TYPE_CHECKING

from featlearn.errors import RunError

if TYPE_CHECKING:
    from featlearn.record import Run

FOLDER = Path("runs")
"""Folder in which `featlearn diagnose` creates runs."""


def recorded_runs(path: Path) -> list[Path]:
    """Return the run at a path, or the runs of seeds in this folder; empty if there are none."""
    if (path / "run.json").is_file() or (path.suffix == ".zip" and path.is_file()):
        return [path]
    seeds = [file.parent for file in path.glob("seed-*/run.json")] if path.is_dir() else []
    return sorted(seeds, key=lambda seed: (len(seed.name), seed.name))


def advice(name: str) -> str:
    """Suggest a command for a word that is not a recorded run."""
    close = FOLDER / name
    return f"; did you mean {close}?" if recorded_runs(close) else "; featlearn runs ls FOLDER lists runs"


def open_recorded_run(path: Path) -> "Run":
    """Open the run at a path, or raise an error that suggests a command."""
    from featlearn.record import open_run

    paths = recorded_runs(path)
    if paths not in ([], [path]):
        raise RunError(
            f"{path} is a folder of {len(paths)} runs, expected a single run such as {paths[0]}; featlearn "
            f"diagnose {path} judges them together"
        )
    if not paths and not path.exists():
        raise RunError(f"{path} does not exist, expected the folder or the .zip of a run{advice(str(path))}")
    return open_run(path)
