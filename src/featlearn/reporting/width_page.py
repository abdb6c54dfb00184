"""The page of a width or scale check: what is wrong, the text to paste, panels with fitted powers, and the numbers."""

import base64
import io
import os
from pathlib import Path
from typing import Any

from featlearn.reporting.document import html_page, static, write_page
from featlearn.reporting.markup import Html, tag, text


def width_page(check: Any, path: str | os.PathLike[str], *, title: str = "Width check") -> Path:
    """Write a check of `fl.width_check` or `fl.scale_check` as one self-contained HTML file, and return its path.

    The page leads with what is wrong and what to paste, then draws a panel for each layer: sizes over the width on
    logarithmic axes, with fitted powers. Titles of layers that scale wrongly are red.
    """
    problems = list(check.problems)
    count = f"{len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "No problems"
    main = tag(
        "main",
        tag("h1", text(f"{count}: {check.scheme}, {check.phase!s}"), id="verdict"),
        *map(_problem, problems),
        tag("h2", "Sizes over the width"),
        tag("div", _panels(check), class_="panels"),
        tag("h2", "All numbers"),
        tag("pre", text(str(check)), tabindex=0),
    )
    scripts = [static("copying.js"), _COPY]
    content = html_page(
        "widths",
        title,
        main,
        skip=("Skip to the verdict", "verdict"),
        banner=tag("p", text(title), class_="kicker"),
        styles=[static("report.css"), _STYLE],
        scripts=scripts,
        footer="Written by featlearn.",
    )
    return write_page(content, Path(path), "page")


def _problem(problem: Any) -> Html:
    patch = getattr(problem, "patch", "") or problem.advice
    button = tag("button", "Copy", type="button", data_copy=patch)
    return tag(
        "div",
        tag("p", text(str(problem))),
        tag("div", tag("pre", text(patch)), button, class_="command"),
        class_="next",
    )


def _panels(check: Any) -> Html:
    import matplotlib.pyplot as plt

    figure, buffer = check.plot(), io.BytesIO()
    figure.savefig(buffer, format="svg")
    plt.close(figure)
    source = f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    return tag("img", src=source, alt="Sizes over the width, a panel for each layer; the numbers are below")


_COPY = """"use strict";
addEventListener("click", async ({ target }) => {
  const text = target.closest?.("[data-copy]")?.dataset.copy;
  if (text !== undefined) target.textContent = (await copying.copy(text)) ? "Copied" : "Could not copy";
});
"""
_STYLE = """.panels { background: #fff; border: 1px solid var(--rule); padding: .5rem; overflow-x: auto; }
.panels img { display: block; width: 100%; max-width: 56rem; min-width: 36rem; height: auto; }
h1 { font-size: 2rem; } h2 { margin-top: 1.5rem; } main pre { white-space: pre; }
.command pre { margin: 0; flex: 1; min-width: 0; white-space: pre-wrap; }
"""
