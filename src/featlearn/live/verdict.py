"""The verdict so far and the pictures so far, as the report shows them."""

from typing import Any

from featlearn.record import Run

# Functions import what loads torch, which the page need not wait for. Arrays are read when they are needed; a damaged
# one raises then.


def verdict(run: Run) -> dict[str, Any]:
    """HTML of the verdict with its error bars, and the step it has seen."""
    from featlearn.diagnosis import diagnose
    from featlearn.diagnosis.findings import findings_of
    from featlearn.reporting.verdict import headline, numbers

    try:
        judged = diagnose(run)
        return {"html": headline(judged) + numbers(judged), "step": run.lines[-1]["step"] if run.lines else None}
    finally:
        findings_of.cache_clear()  # a growing run is never asked for again as it is now


def pictures(run: Run) -> dict[str, Any]:
    """HTML of spectra and kernels, and the blocks that the page draws in it; needs no diagnosis, which takes longer."""
    from featlearn.diagnosis.findings import Findings
    from featlearn.reporting import matrices
    from featlearn.reporting.content_blocks import POINTS
    from featlearn.reporting.groups import RunGroup
    from featlearn.reporting.rendering import numbers, section

    alone = [RunGroup(run.name, [Findings(run)], 0, POINTS, alone=True)]
    shown = [matrices.spectra(alone), matrices.kernels(alone, True)]
    blocks = [given for one in shown for block in one.blocks if (given := numbers(block)) is not None]
    return {"html": "".join(map(section, shown)), "blocks": blocks}
