"""The verdict so far, as the report shows it."""

from typing import Any

from featlearn.record import Run


def verdict(run: Run, *, pictures: bool) -> dict[str, Any]:
    """HTML of the verdict with its error bars; `pictures` adds spectra and kernels, and the blocks to draw them."""
    from featlearn.diagnosis.findings import findings_of  # these load torch, which the page need not wait for
    from featlearn.reporting import matrices
    from featlearn.reporting.content_blocks import POINTS
    from featlearn.reporting.groups import groups
    from featlearn.reporting.rendering import numbers, section
    from featlearn.reporting.verdict import headline
    from featlearn.reporting.verdict import numbers as gauges

    try:
        found = groups(run, points=POINTS)
        shown = [matrices.spectra(found), matrices.kernels(found, True)] if pictures else []
        judged = found[0].diagnosis
        blocks = [given for one in shown for block in one.blocks if (given := numbers(block)) is not None]
        return {
            "html": headline(judged) + gauges(judged), "pictures": "".join(map(section, shown)), "blocks": blocks,
            "step": run.lines[-1]["step"] if run.lines else None,
        }  # fmt: skip
    finally:
        findings_of.cache_clear()  # a growing run is never asked for again as it is now
