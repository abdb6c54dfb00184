"""The page that is fed by the server, in the look of the report."""

from featlearn.reporting.document import head, static
from featlearn.reporting.markup import Html, joined, tag, text
from featlearn.reporting.step_slider import drawing_scripts, step_slider


def page(title: str) -> Html:
    """The page, still empty."""
    scripts = [*drawing_scripts(), static("live.js", "featlearn.live")]
    styles = [static("uPlot.min.css"), static("report.css"), static("live.css", "featlearn.live")]
    return joined(
        "<!doctype html>",
        '<html lang="en">',
        head(f"{title}: featlearn live", scripts, styles, server=True),
        '<body class="single">',
        tag("a", "Skip to the verdict", href="#verdict", class_="skip"),
        tag(
            "header",
            tag("p", "featlearn live", class_="kicker"),
            tag("h1", text(title)),
            tag("p", "Connecting ...", id="state", role="status", class_="note"),
        ),
        tag(
            "main",
            tag(
                "section",
                tag("h2", "Verdict so far", id="verdict-title"),
                tag("div", id="runs"),
                id="verdict",
                aria_labelledby="verdict-title",
                tabindex=-1,
            ),
            step_slider("Follow"),
            tag(
                "section",
                tag("h2", "Curves", id="curves-title"),
                tag("div", id="first", class_="blocks"),
                tag(
                    "details",
                    tag("summary", tag("h2", "All other numbers")),
                    tag("div", id="others", class_="blocks"),
                    id="rest",
                    class_="fold",
                    hidden=True,
                ),
                id="curves",
                aria_labelledby="curves-title",
            ),
            tag("div", id="pictures"),
        ),
        tag("footer", tag("p", "Served by featlearn from this machine. Charts are drawn with uPlot (MIT).")),
        tag("noscript", tag("p", "This page is drawn by JavaScript from the same server; please allow it.")),
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>\n",
    )
