"""The explorer as one self-contained HTML file."""

import os
from importlib.resources import files
from pathlib import Path

from featlearn.explorer.modules import bundle, module_order
from featlearn.reporting.document import html_page, static, write_page
from featlearn.reporting.markup import Html, tag

TITLE = "How do networks learn features?"


def explore(path: str | os.PathLike[str]) -> Path:
    """Write the explorer: lazy and rich neurons in a plane, and six theories with networks that train beside them.

    The page is one HTML file that opens from disk and loads nothing else. Returns its path.
    """
    return write_page(explorer_page(), Path(path), "page")


def explorer_page() -> Html:
    """Return the page, which is the same at every call."""
    shared = module_order("networks/index.mjs", source)
    shared += module_order("mathematics/index.mjs", source, shared)
    interface = module_order("interface/page.mjs", source, shared)
    scripts = [static("uPlot.iife.min.js"), bundle(shared, source), bundle(interface, source)]
    worker = bundle(["networks/worker.mjs"], source)
    return html_page(
        "explore",
        TITLE,
        tag("main", id="topic", tabindex=-1),
        skip=("Skip to the picture", "topic"),
        header=[tag("nav", id="topics", aria_label="Questions")],
        styles=[static("uPlot.min.css"), static("report.css"), source("explorer.css")],
        scripts=scripts,
        script_tags=[
            f"<script>{scripts[0]}</script>",
            f'<script id="shared">{scripts[1]}</script>',
            f'<script type="text/plain" id="worker">{worker}</script>',
            f"<script>{scripts[2]}</script>",
        ],
        noscript="The explorer is drawn and trained by JavaScript in this file; please allow it.",
        extra_policy="worker-src blob:; ",  # workers whose script is in the page
    )


def source(path: str) -> str:
    """Return the text of a file in `static`."""
    return (files("featlearn.explorer") / "static" / path).read_text(encoding="utf-8")
