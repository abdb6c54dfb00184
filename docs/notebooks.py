"""Turn the lessons of the course into Jupyter notebooks, beside their pages.

    python -m docs.notebooks [PAGE...]

A cell for each Python block, with the output that the page has for it, and a cell of Markdown for what is between.
Folded answers are Markdown as a whole: as cells their code would stand open. Pictures are left out, since the cells
draw them.
"""

import json
import re
import sys
from pathlib import Path

from docs.draw import BLOCK, DOCS, PICTURE

FOLDED = re.compile(r"^<details>.*?^</details>", re.MULTILINE | re.DOTALL)
LESSONS = sorted(path for path in (DOCS / "course").glob("*.md") if path.name != "index.md")


def notebook(text: str) -> dict[str, object]:
    """The notebook of a page, in nbformat 4.4."""
    folded = [match.span() for match in FOLDED.finditer(text)]
    cells, done = [], 0
    for match in BLOCK.finditer(text):
        if match["skip"] or any(start < match.start() < end for start, end in folded):
            continue
        cells += _markdown(text[done : match.start()])
        cells.append(_code(match["code"], match["output"]))
        done = match.end()
    cells += _markdown(text[done:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}


def _markdown(text: str) -> list[dict[str, object]]:
    words = PICTURE.sub("", text).strip()
    return [{"cell_type": "markdown", "metadata": {}, "source": words}] if words else []


def _code(code: str, output: str | None) -> dict[str, object]:
    said = [] if output is None else [{"output_type": "stream", "name": "stdout", "text": output}]
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": said, "source": code.rstrip("\n")}


def main(pages: list[Path]) -> None:
    """Write the notebooks of these pages, by default of all lessons."""
    for page in pages or LESSONS:
        target = page.with_suffix(".ipynb")
        target.write_text(json.dumps(notebook(page.read_text()), ensure_ascii=False, indent=1) + "\n")
        print(target)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
