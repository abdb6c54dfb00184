"""`featlearn report`: a page about recorded runs."""

from pathlib import Path

from featlearn.cli.answer import Answer, UsageError
from featlearn.cli.recorded_runs import open_recorded_run, recorded_runs


def report(
    *runs: Path,
    out: Path | None = None,
    title: str | None = None,
    figures: Path | None = None,
    no_kernels: bool = False,
    no_bands: bool = False,
    json: bool = False,
    debug: bool = False,
) -> Answer:
    """Write one HTML page about recorded runs: the verdict, and what led to it.

    The page needs no network, and can be sent to others as it is.

    For example:

        featlearn report runs/a
        featlearn report runs/a runs/b --out both.html
        featlearn report runs/a --figures figures

    Args:
        runs: Folders or .zip files; several are laid over each other. A folder of seeds stands for all of them.
        out: The page; by default report.html in the folder of the first run.
        title: Of the page; by default the names of the runs.
        figures: Folder for the same as PDF and PNG, with the numbers as CSV.
        no_kernels: Leave the pictures of kernels out.
        no_bands: Draw runs that differ in their seed alone one by one.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    if not runs:
        raise UsageError("no run is given, expected one folder or .zip at least; featlearn runs ls lists them")
    from featlearn.reporting.figures import save_figures
    from featlearn.reporting.page import report as page

    first = runs[0]
    path = out or (first.with_suffix(".html") if first.suffix == ".zip" else first / "report.html")
    opened = [open_recorded_run(path) for run in runs for path in recorded_runs(run) or [run]]
    written = page(opened, path, title=title, kernels=not no_kernels, bands=not no_bands)
    drawn = [] if figures is None else save_figures(opened, figures, bands=not no_bands)
    lines = [f"report:  {written}", *([f"figures: {figures}, {len(drawn)} files"] if drawn else [])]
    return Answer(data={"report": written, "figures": drawn}, text="\n".join(lines))
