"""Run the pages of the documentation: draw their pictures afresh and write down what their blocks print.

    python docs/draw.py [PAGE...]

A page is one namespace; its Python blocks run in order, in a folder of their own. A `text` block right below a Python
block holds what that block prints. Pictures that a block saves go to docs/images, or to the folder in there that the
page links. The tests run the pages with `run`.
"""

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"

BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^\n]*\S[^\n]* -->\s*\n)?"
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```"
    r"(?:\s*\n(?P=indent)```text\n(?P<output>.*?)^(?P=indent)```)?",
    re.MULTILINE | re.DOTALL,
)
PICTURE = re.compile(r"!\[[^\]]*\]\((?:\.\./)*images/([^)\s]+)\)")


class Block(NamedTuple):
    """One Python block of a page."""

    line: int
    indent: str
    code: str
    skipped: bool
    output: str | None
    """What the page says it prints; None where the page does not say."""
    place: tuple[int, int] | None
    """Where in the page that stands."""


class Run(NamedTuple):
    """What the blocks of a page left behind."""

    namespace: dict[str, object]
    printed: list[str]
    """What each block printed, in the order of `blocks`; empty for those that are not run."""


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page, in order."""
    return [
        Block(
            line=text.count("\n", 0, match.start("code")) + 1,
            indent=match["indent"],
            code=_outdented(match["code"], match["indent"]),
            skipped=match["skip"] is not None,
            output=None if match["output"] is None else _outdented(match["output"], match["indent"]),
            place=None if match["output"] is None else match.span("output"),
        )
        for match in BLOCK.finditer(text)
    ]


def _outdented(text: str, indent: str) -> str:
    return re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


def run(page: Path, text: str) -> Run:
    """Run the blocks of one page in order in one namespace; a traceback names the line of the page."""
    namespace: dict[str, object] = {"__name__": page.stem}
    printed = []
    for block in blocks(text):
        said = io.StringIO()
        if not block.skipped:
            with contextlib.redirect_stdout(said):
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)
        printed.append(said.getvalue())
    pyplot.close("all")
    return Run(namespace, printed)


def refresh(page: Path) -> None:
    """Run a page, write down what its blocks print, and keep the pictures it links."""
    text = page.read_text()
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            done = run(page, text)
        finally:
            os.chdir(before)
        for name in PICTURE.findall(text):
            (IMAGES / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder) / Path(name).name, IMAGES / name)
    # from the end, so that places before stay where they are
    for block, said in reversed(list(zip(blocks(text), done.printed, strict=True))):
        if block.place is not None and not block.skipped:
            text = text[: block.place[0]] + textwrap.indent(said, block.indent) + text[block.place[1] :]
    page.write_text(text)


def main(pages: list[Path]) -> None:
    """Refresh these pages; without any, every page that has pictures or says what it prints."""
    for page in pages or sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        if PICTURE.search(text) or any(block.place for block in blocks(text)):
            print(page)
            refresh(page.resolve())


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
