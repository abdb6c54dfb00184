"""The slider over the steps of training, one for the whole page."""

from collections.abc import Iterable

from featlearn.reporting.content_blocks import Chart, ContentBlock, MatrixSequence
from featlearn.reporting.document import static
from featlearn.reporting.markup import Html, tag


def step_slider(back: str) -> Html:
    """Return the slider, hidden until there are two steps. `back` labels the button that returns to the last one."""
    return tag(
        "div",
        tag("button", "Play", type="button", id="play"),
        tag("label", "Step of training", for_="step", class_="unseen"),
        tag("input", type="range", id="step", min=0, max=0, step=1, value=0),
        tag("output", id="step-shown", for_="step"),
        tag("button", back, type="button", id="step-back", hidden=True),
        id="steps",
        class_="steps",
        role="group",
        aria_label="Step of training, for all charts and pictures",
        hidden=True,
    )


def has_moving_blocks(blocks: Iterable[ContentBlock]) -> bool:
    """Return True if a spectrum or a matrix was recorded at several steps, so that a slider moves something."""
    return any(
        (isinstance(block, Chart) and any(len(line.frames) > 1 for line in block.lines))
        or (isinstance(block, MatrixSequence) and any(len(pictures) > 1 for _, pictures in block.sequences))
        for block in blocks
    )


def drawing_scripts() -> list[str]:
    """Return the scripts that draw charts and matrices."""
    return [static(name) for name in ("uPlot.iife.min.js", "steps.js", "copying.js", "charts.js", "matrices.js")]
