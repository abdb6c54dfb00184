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
    """Write an HTML page about recorded runs, with the verdict and its evidence.

    The page is self-contained and can be shared as a single file.

    For example:

        featlearn report runs/a
        featlearn report runs/a runs/b --out both.html
        featlearn report runs/a --figures figures

    Args:
        runs: Folders or .zip files, drawn in common figures. A folder of seeds means all its runs.
        out: Path of the page; by default report.html in the folder of the first run.
        title: Title of the page; by default the names of the runs.
        figures: Folder for the figures as PDF and PNG, with numbers as CSV.
        no_kernels: Omit pictures of kernels.
        no_bands: Draw runs that differ only in their seed as separate lines, without bands.
        json: Print one JSON document instead.
        debug: Show where an error comes from.
    """
    if not runs:
        raise UsageError("no run is passed, expected at least one folder or .zip; featlearn runs ls lists runs")
    from featlearn.diagnosis.verdict import findings_of
    from featlearn.reporting.figures import save_figures
    from featlearn.reporting.page import report as page

    first = runs[0]
    path = out or (first.with_suffix(".html") if first.suffix == ".zip" else first / "report.html")
    findings = findings_of([open_recorded_run(path) for run in runs for path in recorded_runs(run) or [run]])
    page_path = page(findings, path, title=title, kernels=not no_kernels, bands=not no_bands)
    drawn = [] if figures is None else save_figures(findings, figures, bands=not no_bands)
    lines = [f"report:  {page_path}", *([f"figures: {figures}, {len(drawn)} files"] if drawn else [])]
    return Answer(data={"report": page_path, "figures": drawn}, text="\n".join(lines))
