"""`featlearn sweep`: a grid of settings from a TOML file, in parallel."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from featlearn.cli.answer import DONE, FAILED, Answer, UsageError, table
from featlearn.cli.engine import chosen_executor, one_engine
from featlearn.cli.seeds import seeds_in
from featlearn.cli.sweep_file import SweepFile, read_sweep_file, setting_name

if TYPE_CHECKING:
    from featlearn.sweeps.process_pool import ProcessPool
    from featlearn.sweeps.results import Sweep

FOLDER = Path("sweeps")
"""Where sweeps go by default."""


def sweep(
    grid: Path,
    /,
    *,
    out: Path | None = None,
    seeds: str | None = None,
    jobs: int | None = None,
    dask: str | None = None,
    slurm: str | None = None,
    x: str | None = None,
    y: str | None = None,
    value: str | None = None,
    retry: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    json: bool = False,
    debug: bool = False,
) -> Answer:
    """Train and diagnose at every point of a grid, and map the verdicts over two settings.

    The grid is a TOML file with options of featlearn diagnose:

        seeds = 3
        [fixed]
        steps = 1000
        [grid]
        output-scale = [0.01, 0.1, 1, 10]
        width = [16, 64, 256]

    A list of points, [[points]], stands in place of [grid] where not all
    combinations are wanted. subject = "train.py:setup" diagnoses your own
    network; function = "train.py:train" calls a function of yours, with the grid
    as its arguments, that returns a run or numbers. [map] has x, y, value, where
    and perhaps boundary = "theory.py:curve".

    Killed at any time, the same command goes on where it was; points that are
    done are not run again. What fails is kept with its error, and the exit status
    is 1. Writes table.csv, map.png, map.pdf and sweep.html, whose cells open the
    reports of their points.

    For example:

        featlearn sweep grid.toml
        featlearn sweep grid.toml --jobs 4 --seeds 5
        featlearn sweep grid.toml --value gap --retry
        featlearn sweep grid.toml --dask tcp://host:8786
        featlearn sweep grid.toml --slurm partition=gpu,timeout_min=60

    Args:
        grid: The TOML file.
        out: Folder of the sweep; by default sweeps/NAME of the file.
        seeds: How many, from 0 on, or which, as in 101-103 or 3,5,8.
        jobs: Points that run at a time, each on one core; by default one a core.
        dask: In place of --jobs, a dask scheduler, as tcp://host:8786, or local.
        slurm: In place of --jobs, settings of Slurm jobs, as partition=gpu,timeout_min=60; all nodes must see the
            folder.
        x: Setting across the map; by default the first that differs.
        y: Setting up the map; by default the second.
        value: What is mapped; by default the regime, or the first number.
        retry: Run again what failed before.
        resume: Go on although the source of your function has changed.
        overwrite: Remove the sweep in the folder first.
        quiet: No progress on stderr.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}, expected at least 1")
    one_engine(jobs, dask, slurm)
    if resume and overwrite:
        raise UsageError("--resume and --overwrite are given, expected one of them")
    file = read_sweep_file(grid)
    chosen = seeds_in(seeds) if seeds is not None else file.seeds
    folder = out or FOLDER / grid.stem
    from featlearn.cli.swept_function import points_and_function
    from featlearn.sweeps.grid_run import run_sweep
    from featlearn.sweeps.process_pool import ProcessPool, available_cores

    points, function = points_and_function(file, chosen)
    given = {"x": x, "y": y, "value": value}
    view = {**file.map, **{name: word for name, word in given.items() if word is not None}}
    _check_view(view, file, {name for point in points for name in point.settings})
    logs = folder.with_name(f"{folder.name}.jobs")
    # Workers start with their first job: where jobs run elsewhere, these write the reports.
    with (
        chosen_executor(dask, slurm, logs) as executor,
        ProcessPool(jobs or min(available_cores(), len(points) * len(chosen))) as pool,
    ):
        found = run_sweep(
            function,
            points,
            chosen,
            folder,
            executor=executor or pool,
            on_error="keep",
            retry=retry,
            resume=resume,
            overwrite=overwrite,
            quiet=quiet,
        )
        return _answer(found, view, file, pool)


def _check_view(view: dict[str, Any], file: SweepFile, settings: set[str]) -> None:
    """Refuse axes of a map that no point has, before anything runs."""
    known = sorted({*settings, "seed"})
    for name in [view[key] for key in ("x", "y") if key in view] + list(view.get("where", ())):
        if _setting(name, file) not in known:
            raise UsageError(f"{name!r} is no setting of {file.path}, expected {', '.join(known)}")


def _setting(name: str, file: SweepFile) -> str:
    return name if name == "seed" else setting_name(name, file)


def _answer(found: "Sweep", view: dict[str, Any], file: SweepFile, pool: "ProcessPool") -> Answer:
    view, drawn = _view(found, view, file)
    written = {"table": found.to_csv(found.path / "table.csv")}
    written |= _pictures(found, view) if drawn else {}
    boundary, value = view["boundary"], view["value"]
    page = {name: view[name] for name in ("x", "y")} | {"boundary": boundary}
    written["page"] = found.report(found.path / "sweep.html", **page, value=_values(found, value), executor=pool)
    failed = found.failed
    done = sum(row["status"] == "done" for row in found.rows)
    lines = [f"{found.path}: {len(found.points)} points, {done} of {len(found.rows)} done, {len(failed)} failed", ""]
    if drawn:
        lines += [_map_text(found, view), ""]
    for row in failed[:5]:
        where = ", ".join(f"{name}={row[name]}" for name in found.axes)
        lines.append(f"failed:  {where}, seed {row['seed']}: {row['error']}")
    if failed:
        lines += [f"         tracebacks are beside them, in {failed[0]['path']} for example; --retry runs them again"]
    lines += [f"{name + ':':<9}{path}" for name, path in written.items()]
    data = {"sweep": found.path, "done": done, "failed": len(failed), "rows": found.rows, **written}
    return Answer(data=data, text="\n".join(lines), code=FAILED if failed else DONE)


def _view(found: "Sweep", view: dict[str, Any], file: SweepFile) -> tuple[dict[str, Any], bool]:
    """What is mapped, and whether it can be: not where points differ in further settings, or nothing is done."""
    axes = list(found.axes)
    x, y = (_setting(view[name], file) if name in view else None for name in ("x", "y"))
    x = x or next((name for name in axes if name != y), None)
    y = y or next((name for name in axes if name != x), None)
    where = {_setting(name, file): value for name, value in view.get("where", {}).items()}
    value = view.get("value", "regime" if "regime" in found.columns else next(iter(found.columns), None))
    boundary = view.get("boundary")
    if boundary is not None:
        from featlearn.cli.user_task import load_function

        boundary = load_function(boundary)
    hidden = [name for name in axes if name not in (x, y, *where)]
    shown = {"x": x, "y": y, "value": value, "where": where, "boundary": boundary}
    return shown, x is not None and value is not None and not hidden


def _values(found: "Sweep", value: str | None) -> list[str] | None:
    """What the page maps: the chosen value first, then the usual ones."""
    from featlearn.sweeps.sweep_page import default_values

    return None if value is None else list(dict.fromkeys([value, *default_values(found)]))


def _pictures(found: "Sweep", view: dict[str, Any]) -> dict[str, Path]:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure = found.map(**view).get_figure()
    for kind in ("pdf", "png"):
        figure.savefig(found.path / f"map.{kind}")
    plt.close(figure)
    return {"map": found.path / "map.png"}


def _map_text(found: "Sweep", view: dict[str, Any]) -> str:
    """The map as a table of words."""
    cells = found.cells(view["x"], view["y"], view["value"], view["where"])
    rows = []
    for number in reversed(range(len(cells.values))):
        label = "" if cells.y is None else cells.y.labels[number]
        told = [
            value if isinstance(value, str) else f"{value:.3g}" if count else "failed" if failed else "-"
            for value, count, failed in zip(
                cells.values[number], cells.count[number], cells.failed[number], strict=True
            )
        ]
        rows.append([label, *told])
    over = view["x"] if cells.y is None else f"{view['x']} (across) and {view['y']} (up)"
    return f"{cells.name} over {over}\n{table(['', *cells.x.labels], rows)}"
