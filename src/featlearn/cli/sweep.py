"""`featlearn sweep`: a grid of settings from a TOML file, in parallel."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from featlearn.cli.answer import DONE, FAILED, Answer, UsageError, table
from featlearn.cli.engine import check_engine, open_executor
from featlearn.cli.seeds import seeds_in
from featlearn.cli.sweep_file import SweepFile, read_sweep_file, setting_name
from featlearn.errors import RunError

if TYPE_CHECKING:
    from featlearn.sweeps.process_pool import ProcessPool
    from featlearn.sweeps.results import Sweep

FOLDER = Path("sweeps")
"""Default folder of sweeps."""


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
    reports: bool = False,
    detach: bool = False,
    collect: bool = False,
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
    is 1. Writes table.csv, map.png, map.pdf and sweep.html; with --reports, its
    cells open the reports of their points.

    For example:

        featlearn sweep grid.toml
        featlearn sweep grid.toml --jobs 4 --seeds 5
        featlearn sweep grid.toml --value gap --retry
        featlearn sweep grid.toml --dask tcp://host:8786
        featlearn sweep grid.toml --slurm partition=gpu,timeout_min=60 --detach
        featlearn sweep grid.toml --collect

    Args:
        grid: The TOML file.
        out: Folder of the sweep; by default sweeps/NAME of the file.
        seeds: Number of seeds, counted from 0, or seeds such as 101-103 or 3,5,8.
        jobs: Number of concurrent points, each on a core; by default all cores.
        dask: In place of --jobs, a dask scheduler such as tcp://host:8786, or local.
        slurm: In place of --jobs, settings of Slurm jobs such as partition=gpu,timeout_min=60; all nodes must see the
            folder.
        x: Horizontal axis of the map; by default the first setting that varies.
        y: Vertical axis of the map; by default the second setting that varies.
        value: Value to map; by default the regime, or the first number.
        retry: Run failed seeds again.
        resume: Continue although the source of your function has changed.
        overwrite: Remove the sweep in the folder first.
        reports: Write the report of every point as well; featlearn report writes a single one.
        detach: With --slurm, submit the jobs as one array and return at once; --collect shows what is done.
        collect: Run nothing; write table, maps and page of what is done.
        quiet: No progress on stderr.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}, expected at least 1")
    check_engine(jobs, dask, slurm)
    if resume and overwrite:
        raise UsageError("--resume and --overwrite are passed, expected at most one of them")
    if detach and (slurm is None or collect):
        raise UsageError("--detach needs --slurm, and excludes --collect: jobs of this process end with it")
    file = read_sweep_file(grid)
    seed_list = seeds_in(seeds) if seeds is not None else file.seeds
    folder = out or FOLDER / grid.stem
    from featlearn.cli.swept_function import points_and_function
    from featlearn.sweeps.grid_run import run_sweep
    from featlearn.sweeps.process_pool import ProcessPool, available_cores
    from featlearn.sweeps.results import open_sweep

    points, function = points_and_function(file, seed_list)
    options = {"x": x, "y": y, "value": value}
    view = {**file.map, **{name: word for name, word in options.items() if word is not None}}
    _check_view(view, file, {name for point in points for name in point.settings})
    logs = folder.with_name(f"{folder.name}.jobs")
    # Workers start with their first job; if jobs run elsewhere, the pool writes the reports.
    with ProcessPool(jobs or min(available_cores(), len(points) * len(seed_list))) as pool:
        if collect:
            results = open_sweep(folder)
        else:
            with open_executor(dask, slurm, logs) as executor:
                results = run_sweep(
                    function,
                    points,
                    seed_list,
                    folder,
                    executor=executor or pool,
                    on_error="keep",
                    retry=retry,
                    resume=resume,
                    overwrite=overwrite,
                    wait=not detach,
                    quiet=quiet,
                )
        if detach:
            return _submitted(results, grid)
        return _answer(results, view, file, pool if reports else None, quiet=quiet)


def _submitted(swept: "Sweep", grid: Path) -> Answer:
    missing = sum(row["status"] == "missing" for row in swept.rows)
    text = f"{swept.path}: {missing} of {len(swept.rows)} jobs submitted\nnext:    featlearn sweep {grid} --collect"
    return Answer(data={"sweep": swept.path, "submitted": missing}, text=text, code=DONE)


def _write_reports(swept: "Sweep", pool: "ProcessPool", *, quiet: bool) -> str:
    """Write the reports of all points; return what failed."""
    try:
        swept.write_reports(executor=pool, quiet=quiet)
    except RunError as error:
        return str(error)
    return ""


def _check_view(view: dict[str, Any], file: SweepFile, settings: set[str]) -> None:
    """Raise if no point has the axes of the map, before anything runs."""
    names = sorted({*settings, "seed"})
    for name in [view[key] for key in ("x", "y") if key in view] + list(view.get("where", ())):
        if _setting(name, file) not in names:
            raise UsageError(f"{name!r} is not a setting of {file.path}, expected {', '.join(names)}")


def _setting(name: str, file: SweepFile) -> str:
    return name if name == "seed" else setting_name(name, file)


def _answer(
    swept: "Sweep", view: dict[str, Any], file: SweepFile, pool: "ProcessPool | None", *, quiet: bool
) -> Answer:
    """Write table, maps and page, with reports if a pool is passed."""
    view, has_map = _view(swept, view, file)
    outputs = {"table": swept.to_csv(swept.path / "table.csv")}
    outputs |= _pictures(swept, view) if has_map else {}
    boundary, value = view["boundary"], view["value"]
    page = {name: view[name] for name in ("x", "y")} | {"boundary": boundary}
    unwritten = "" if pool is None else _write_reports(swept, pool, quiet=quiet)
    outputs["page"] = swept.report(swept.path / "sweep.html", **page, value=_values(swept, value))
    failed = swept.failed
    done = sum(row["status"] == "done" for row in swept.rows)
    lines = [f"{swept.path}: {len(swept.points)} points, {done} of {len(swept.rows)} done, {len(failed)} failed", ""]
    if has_map:
        lines += [_map_text(swept, view), ""]
    for row in failed[:5]:
        point_text = ", ".join(f"{name}={row[name]}" for name in swept.axes)
        lines.append(f"failed:  {point_text}, seed {row['seed']}: {row['error']}")
    if failed:
        lines += [f"         tracebacks are in their folders, such as {failed[0]['path']}; --retry runs them again"]
    lines += [f"failed:  {unwritten}"] if unwritten else []
    lines += [f"{name + ':':<9}{path}" for name, path in outputs.items()]
    data = {"sweep": swept.path, "done": done, "failed": len(failed), "rows": swept.rows, **outputs}
    return Answer(data=data, text="\n".join(lines), code=FAILED if failed or unwritten else DONE)


def _view(results: "Sweep", view: dict[str, Any], file: SweepFile) -> tuple[dict[str, Any], bool]:
    """Return the view of the map, and whether it can be drawn: not if other settings vary, or nothing is done."""
    axes = list(results.axes)
    x, y = (_setting(view[name], file) if name in view else None for name in ("x", "y"))
    x = x or next((name for name in axes if name != y), None)
    y = y or next((name for name in axes if name != x), None)
    where = {_setting(name, file): value for name, value in view.get("where", {}).items()}
    value = view.get("value", "regime" if "regime" in results.columns else next(iter(results.columns), None))
    boundary = view.get("boundary")
    if boundary is not None:
        from featlearn.cli.user_task import load_function

        boundary = load_function(boundary)
    hidden = [name for name in axes if name not in (x, y, *where)]
    shown = {"x": x, "y": y, "value": value, "where": where, "boundary": boundary}
    return shown, x is not None and value is not None and not hidden


def _values(results: "Sweep", value: str | None) -> list[str] | None:
    """Return the values that the page maps: the selected value, then the default values."""
    from featlearn.sweeps.sweep_page import default_values

    return None if value is None else list(dict.fromkeys([value, *default_values(results)]))


def _pictures(results: "Sweep", view: dict[str, Any]) -> dict[str, Path]:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure = results.map(**view).get_figure()
    for kind in ("pdf", "png"):
        figure.savefig(results.path / f"map.{kind}")
    plt.close(figure)
    return {"map": results.path / "map.png"}


def _map_text(swept: "Sweep", view: dict[str, Any]) -> str:
    """Format the map as a text table."""
    cells = swept.cells(view["x"], view["y"], view["value"], view["where"])
    rows = []
    for number in reversed(range(len(cells.values))):
        label = "" if cells.y is None else cells.y.labels[number]
        row_cells = [
            value if isinstance(value, str) else f"{value:.3g}" if count else "failed" if failed else "-"
            for value, count, failed in zip(
                cells.values[number], cells.count[number], cells.failed[number], strict=True
            )
        ]
        rows.append([label, *row_cells])
    axes = view["x"] if cells.y is None else f"{view['x']} (across) and {view['y']} (up)"
    return f"{cells.name} over {axes}\n{table(['', *cells.x.labels], rows)}"
