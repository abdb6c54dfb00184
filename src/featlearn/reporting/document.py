"""What every HTML page of ours shares: a head that allows nothing foreign, and a file written whole."""

import base64
import hashlib
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from featlearn.errors import RunError
from featlearn.reporting.markup import Html, tag, text


def head(
    title: str, scripts: Sequence[str], styles: Sequence[str], *, workers: bool = False, server: bool = False
) -> Html:
    """The head, with a policy that allows only our own scripts and styles, by hash, and no network access.

    `workers` also allows workers whose script the page itself has made, `server` requests to where the page came from.
    """
    extra = ("worker-src blob:; " if workers else "") + ("connect-src 'self'; " if server else "")
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:; "
        f"{extra}base-uri 'none'; form-action 'none'"
    )
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"),
        tag("title", text(title)),
        *(f"<style>{style}</style>" for style in styles),
    )


def static(name: str, package: str = "featlearn.reporting") -> str:
    """The text of a static file of a page."""
    return (files(package) / "static" / name).read_text(encoding="utf-8")


def _hashes(parts: Sequence[str]) -> str:
    return (
        " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(p.encode()).digest()).decode()}'" for p in parts)
        or "'none'"
    )


def written(content: str, path: Path, name: str = "report") -> Path:
    """Write a page, whole or not at all; returns its path. Errors call it by `name`."""
    if not path.parent.is_dir():
        raise RunError(f"the {name} cannot be written to {path}: there is no folder {path.parent}; make it first")
    part = None
    try:
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(content)
        os.chmod(part, 0o644)  # mkstemp creates private files; a report is to be shared
        os.replace(part, path)
    except OSError as error:
        # the error itself names a temporary file
        raise RunError(f"the {name} cannot be written to {path}: {error.strerror or error}") from error
    finally:
        if part is not None:
            with suppress(OSError):
                Path(part).unlink(missing_ok=True)
    return path
