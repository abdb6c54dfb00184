"""The frame that every HTML page shares: a content policy without foreign sources, and an atomic write."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from featlearn.errors import RunError
from featlearn.record.atomic import put
from featlearn.reporting.markup import Html, join_parts, tag, text


def html_page(
    kind: str,
    heading: str,
    main: Html,
    *,
    skip: tuple[str, str],
    banner: Html | None = None,
    header: Sequence[str] = (),
    sections: Sequence[tuple[str, str]] = (),
    styles: Sequence[str],
    scripts: Sequence[str] = (),
    script_tags: Sequence[str] | None = None,
    body_class: str | None = None,
    footer: str = "Written by featlearn. Charts are drawn with uPlot (MIT), which is in this file.",
    noscript: str = "",
    extra_policy: str = "",
) -> Html:
    """Return a complete page that accesses no network and runs only the given scripts.

    Args:
        kind: Command that made the page, shown above the heading.
        heading: Heading, and the first part of the title.
        main: The main element.
        skip: Text and anchor of the link that skips the header.
        banner: What stands in place of the command and the heading.
        header: Elements below the heading.
        sections: Anchor and title of each section, for the navigation.
        styles: Style sheets, allowed by their hash.
        scripts: Scripts, allowed by their hash.
        script_tags: Elements that hold the scripts, if a plain script element for each is not enough.
        body_class: Class of the body.
        footer: Text of the footer.
        noscript: Text for browsers without JavaScript.
        extra_policy: Further directives of the content policy.
    """
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:; "
        f"{extra_policy}base-uri 'none'; form-action 'none'"
    )
    links = [tag("li", tag("a", text(title), href=f"#{key}")) for key, title in sections]
    return join_parts(
        "<!doctype html>",
        '<html lang="en">',
        tag(
            "head",
            tag("meta", charset="utf-8"),
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("link", rel="icon", href="data:,"),
            tag("title", text(f"{heading}: featlearn {kind}")),
            *(f"<style>{style}</style>" for style in styles),
        ),
        f'<body class="{body_class}">' if body_class else "<body>",
        tag("a", text(skip[0]), href=f"#{skip[1]}", class_="skip"),
        tag(
            "header",
            banner or tag("p", f"featlearn {kind}", class_="kicker") + tag("h1", text(heading)),
            *header,
            tag("nav", tag("ul", *links), aria_label="Sections") if links else "",
        ),
        main,
        tag("footer", tag("p", text(footer))),
        tag("noscript", tag("p", text(noscript))) if noscript else "",
        *(script_tags if script_tags is not None else [f"<script>{script}</script>" for script in scripts]),
        "</body>",
        "</html>\n",
    )


def static(name: str, package: str = "featlearn.reporting") -> str:
    """Return the text of a static file of a page."""
    return (files(package) / "static" / name).read_text(encoding="utf-8")


def _hashes(parts: Sequence[str]) -> str:
    return (
        " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(p.encode()).digest()).decode()}'" for p in parts)
        or "'none'"
    )


def write_page(content: str, path: Path, name: str = "report") -> Path:
    """Write a page atomically and return its path. Errors call the page by `name`."""
    if not path.parent.is_dir():
        raise RunError(f"the {name} cannot be written to {path}: there is no folder {path.parent}; make it first")
    try:
        put(path, content.encode())
    except OSError as error:
        # the error itself names a temporary file
        raise RunError(f"the {name} cannot be written to {path}: {error.strerror or error}") from error
    return path
