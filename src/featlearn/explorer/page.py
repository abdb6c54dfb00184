"""The explorer as one self-contained HTML file."""

import os
from importlib.resources import files
from pathlib import Path

from featlearn.explorer.modules import bundled, ordered
from featlearn.reporting.document import head, static, written
from featlearn.reporting.markup import Html, joined, tag

TITLE = "How do networks learn features?"


def explore(path: str | os.PathLike[str]) -> Path:
    """Write the explorer: six theories of feature learning with their sliders, and networks that train beside them.

    One HTML file that opens from disk and asks for nothing else. Returns its path.
    """
    return written(page(), Path(path), "page")


def page() -> Html:
    """The page; the same at every call."""
    shared = ordered("networks/index.mjs", source)
    shared += ordered("mathematics/index.mjs", source, shared)
    own = ordered("interface/page.mjs", source, shared)
    scripts = [static("uPlot.iife.min.js"), bundled(shared, source), bundled(own, source)]
    styles = [static("uPlot.min.css"), static("report.css"), source("explorer.css")]
    worker = bundled(["networks/worker.mjs"], source)
    return joined(
        "<!doctype html>",
        '<html lang="en">',
        head(f"{TITLE} featlearn explore", scripts, styles, workers=True),
        "<body>",
        tag("a", "Skip to the picture", href="#topic", class_="skip"),
        tag(
            "header",
            tag("p", "featlearn explore", class_="kicker"),
            tag("h1", TITLE),
            tag("nav", id="topics", aria_label="Questions"),
        ),
        tag("main", id="topic", tabindex=-1),
        tag("footer", tag("p", "Written by featlearn. Charts are drawn with uPlot (MIT), which is in this file.")),
        tag("noscript", tag("p", "The explorer is drawn and trained by JavaScript in this file; please allow it.")),
        f"<script>{scripts[0]}</script>",
        f'<script id="shared">{scripts[1]}</script>',
        f'<script type="text/plain" id="worker">{worker}</script>',
        f"<script>{scripts[2]}</script>",
        "</body>",
        "</html>\n",
    )


def source(path: str) -> str:
    """The text of a file in `static`."""
    return (files("featlearn.explorer") / "static" / path).read_text(encoding="utf-8")
