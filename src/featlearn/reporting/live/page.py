"""The frame of the live page. Its content is sent by the server."""

from featlearn.reporting.document import html_page, static
from featlearn.reporting.markup import Html, tag
from featlearn.reporting.step_slider import drawing_scripts, step_slider


def live_page(title: str) -> Html:
    """Return the page without any run."""
    return html_page(
        "live",
        title,
        Html(step_slider("Follow") + tag("main", id="report")),
        skip=("Skip to the report", "report"),
        header=[
            tag("p", "Connecting ...", id="state", role="status", class_="note"),
            tag("ul", id="runs"),
            tag("ul", id="errors", class_="missing", hidden=True),
        ],
        styles=[static("uPlot.min.css"), static("report.css")],
        scripts=[*drawing_scripts(), static("report.js"), static("live.js", "featlearn.reporting.live")],
        body_class="single",
        footer="Served by featlearn from this machine. Charts are drawn with uPlot (MIT).",
        noscript="JavaScript draws this page; please allow it.",
        extra_policy="connect-src 'self'; ",
    )
