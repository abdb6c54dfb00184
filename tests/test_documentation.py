"""The documentation does what it says: its Python blocks run, its links lead somewhere."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

TOP = Path(__file__).parents[1]
README = TOP / "README.md"
PAGES = sorted([*TOP.glob("*.md"), *TOP.glob("docs/**/*.md")])

BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^\n]*\S[^\n]* -->\s*\n)?"
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"<!-- command: (?P<name>\w+) -->\s*```sh\n(?P<line>[^\n]+)\n```")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


class Block(NamedTuple):
    line: int
    code: str
    skipped: bool


def blocks(text: str) -> list[Block]:
    return [
        Block(
            line=text.count("\n", 0, match.start("code")) + 1,
            code=re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE),
            skipped=match["skip"] is not None,
        )
        for match in BLOCK.finditer(text)
    ]


def run(page: Path, text: str) -> dict[str, object]:
    """Run the blocks of one page in order in one namespace; a traceback names the line of the page."""
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks(text):
        if not block.skipped:
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)
    return namespace


def test_the_readme_has_a_block_that_runs():
    assert any(not block.skipped for block in blocks(README.read_text()))


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(TOP))) for p in PAGES if blocks(p.read_text())])
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert run(page, page.read_text())


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(TOP))) for p in PAGES])
def test_relative_links_lead_to_files(page: Path):
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not broken


def test_the_readme_gives_its_two_commands_in_one_line_each():
    assert [match["name"] for match in COMMAND.finditer(README.read_text())] == ["main", "test"]


PAGE = """
```python
a = 1
```
<!-- not run: needs a device -->

```python
a = 2
```
<!-- not run: -->
```python
b = a + 2
```
1. in a list

   ```python
   if b == 3:
       c = b
   ```
```sh
exit 1
```
"""


def test_blocks_share_a_namespace_and_skip_only_for_a_reason():
    namespace = run(Path("page.md"), PAGE)
    assert (namespace["a"], namespace["b"], namespace["c"]) == (1, 3, 3)


def test_a_failing_block_names_its_line():
    with pytest.raises(ZeroDivisionError) as failure:
        run(Path("page.md"), "words\n\n```python\na = 1\na / 0\n```\n")
    assert failure.traceback[-1].lineno == 5 - 1  # pytest counts from zero
