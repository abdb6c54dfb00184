"""What the package writes itself: explorer, figures of the papers, help of the commands, index of equations.

Also links: pages of the repository outside of docs/ stand in the site under other names.
"""

import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from featlearn.citation_index import AUTHORS
from featlearn.citations import equations
from featlearn.cli.app import COMMANDS, KNOWN_DISTRIBUTIONS, RUNS, application
from featlearn.cli.explore import explore
from featlearn_papers.frame.command import reproduce

GENERATED = {"reference/command-line": "% help of the commands", "reference/equations": "% equations of the papers"}
OUTSIDE = {
    "README": "index",
    "CONTRIBUTING": "contributing",
    "CHANGELOG": "changelog",
    "benchmarks/RESULTS": "benchmarks",
}
OTHERS = re.compile(r"^% other pages of (\S+)$", re.MULTILINE)
FINISHED = re.compile(r"(?<!!)\[([^\]\n]*)\]\((?!https?:)([\w./-]+\.html)\)")
LINK = re.compile(rf"\]\((?:\.\./)+({'|'.join(OUTSIDE)})\.md(#[\w-]*)?\)")


def command_help() -> str:
    """The help of every command as Markdown, without the negative flags that the commands do not have."""
    text = application([*COMMANDS, *KNOWN_DISTRIBUTIONS, "runs", *RUNS]).generate_docs(
        output_format="markdown", heading_level=1
    )
    body = text[text.index("## featlearn diagnose") :]
    return re.sub(r", --no-[\w-]+`", "`", body)


def equation_tables() -> str:
    """A table for each paper: the places that public functions compute, in Markdown."""
    lines: list[str] = []
    for paper, author in AUTHORS.items():
        lines += [f"## {author}", "", f"`featlearn cite {paper}`", "", "| place | function |", "| --- | --- |"]
        for place, names in equations().functions.items():
            if place.paper == paper and place.kind != "Fig":
                shown = str(place).partition(", ")[2]
                lines.append(f"| {shown} | {', '.join(f'`fl.{name}`' for name in names)} |")
        lines.append("")
    return "\n".join(lines)


def page_list(env: BuildEnvironment) -> str:
    """All pages with their first sentence, in the form of llms.txt."""
    lines = [f"# {env.config.project}", "", f"> {_first_sentence(env, 'index')}", "", "## Pages", ""]
    for page in sorted(env.found_docs):
        sentence = _first_sentence(env, page)
        lines.append(f"- [{env.titles[page].astext()}]({page}.html)" + (f": {sentence}" if sentence else ""))
    return "\n".join([*lines, ""])


def _first_sentence(env: BuildEnvironment, page: str) -> str:
    paragraph = next(iter(env.get_doctree(page).findall(nodes.paragraph)), None)
    text = "" if paragraph is None else " ".join(paragraph.astext().split())
    return re.split(r"(?<=[.?!]) (?=[A-Z])", text)[0]


def _finished_pages(source: Path) -> list[Path]:
    """Reports and other pages that are kept as they are, beside the Markdown that links them."""
    return [page for page in source.rglob("*.html") if not page.is_relative_to(source / "_build")]


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = LINK.sub(lambda link: f"](/{OUTSIDE[link[1]]}.md{link[2] or ''})", source[0])
    source[0] = FINISHED.sub(r'<a href="\2">\1</a>', source[0])  # opened, where a link of Sphinx would download it
    source[0] = OTHERS.sub(lambda mark: "\n".join(_others(app, mark[1], source[0])), source[0])
    if docname in GENERATED:
        written = command_help() if docname == "reference/command-line" else equation_tables()
        source[0] = source[0].replace(GENERATED[docname], written)


def _others(app: Sphinx, folder: str, text: str) -> list[str]:
    """The pages of a folder that the text does not name, so that new ones are in the contents at once."""
    named = set(text.split("\n"))
    return sorted(page for page in app.env.found_docs if page.startswith(f"{folder}/") and page not in named)


def _write(app: Sphinx, error: Exception | None) -> None:
    """Finished pages, the explorer and the figures of the papers, each a page of its own beside the site's."""
    if error is None and app.builder.format == "html":
        for page in _finished_pages(Path(app.srcdir)):
            place = Path(app.outdir) / page.relative_to(app.srcdir)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, place)
        (Path(app.outdir) / "llms.txt").write_text(page_list(app.env))
        explore(out=Path(app.outdir) / "explorer.html")
        reproduce(gallery=True, out=Path(app.outdir) / "figures.html")


def setup(app: Sphinx) -> dict[str, bool]:
    """Replace what is read, and write pages at the end."""
    app.connect("source-read", _read)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
