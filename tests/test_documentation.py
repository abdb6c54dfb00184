"""The documentation does what it says: blocks run and print what stands below them, links lead somewhere."""

import importlib
import inspect
import re
from pathlib import Path

import matplotlib
import pytest
import torch

from docs.draw import IMAGES, PICTURE, blocks, run
from docs.extensions.public_names import public_names, returned_by
from featlearn.ops import registry

TOP = Path(__file__).parents[1]
README = TOP / "README.md"
PAGES = sorted([*TOP.glob("*.md"), *TOP.glob("docs/**/*.md")])

COMMAND = re.compile(r"<!-- command: (?P<name>\w+) -->\s*```sh\n(?P<line>[^\n]+)\n```")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
ANCHOR = re.compile(r"\]\(#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w])")
DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?![\w])")


def test_the_readme_has_a_block_that_runs():
    assert any(not block.skipped for block in blocks(README.read_text()))


def pages(having=lambda text: True):
    """Parameters: every page whose text is as asked for."""
    return pytest.mark.parametrize(
        "page", [pytest.param(p, id=str(p.relative_to(TOP))) for p in PAGES if having(p.read_text())]
    )


def prose(text: str) -> str:
    return CODE.sub("", FENCED.sub("", text))


def outputs(text: str) -> list[str]:
    """What a page says that its blocks print."""
    return [block.output for block in blocks(text) if block.output is not None]


def same_but_for_rounding(said: str, expected: str) -> bool:
    """Equal words, and numbers within one unit of their last digit or one percent: other machines round otherwise."""
    if NUMBER.sub("#", said) != NUMBER.sub("#", expected):
        return False
    for one, other in zip(NUMBER.findall(said), NUMBER.findall(expected), strict=True):
        digits, _, exponent = other.partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
        if abs(float(one) - float(other)) > 1.001 * max(unit, 0.01 * abs(float(other))):
            return False
    return True


@pages(having=blocks)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))  # pages register rules, which others must not meet
    text = page.read_text()
    with torch.random.fork_rng(), matplotlib.rc_context():
        torch.manual_seed(0)
        done = run(page, text)
    assert done.namespace
    for block, printed in zip(blocks(text), done.printed, strict=True):
        if block.output is not None and not block.skipped:
            assert same_but_for_rounding(printed, block.output), f"line {block.line} prints\n{printed}"
    assert {Path(name).name for name in PICTURE.findall(text)} == {path.name for path in tmp_path.glob("*.png")}


@pages(having=outputs)
def test_decimals_in_the_prose_are_printed_by_the_page(page: Path):
    text = page.read_text()
    printed = {number.lstrip("-") for output in outputs(text) for number in NUMBER.findall(output)}
    assert [number for number in DECIMAL.findall(prose(text)) if number not in printed] == []


def test_every_picture_is_linked_and_small():
    linked = {name for page in PAGES for name in PICTURE.findall(page.read_text())}
    pictures = [path for path in IMAGES.rglob("*") if path.is_file()]
    assert {path.relative_to(IMAGES).as_posix() for path in pictures} == linked
    assert [path.name for path in pictures if path.stat().st_size >= 80_000] == []


@pytest.mark.parametrize("name", ["metrics", "dynamics", "theory.infinite_width"])
def test_every_function_has_a_documented_example(name: str):
    module = importlib.import_module(f"featlearn.{name}")
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    own = [key for key, f in public.items() if inspect.isfunction(f) and f.__module__.startswith(module.__name__)]
    code = "".join(block.code for page in PAGES for block in blocks(page.read_text()) if not block.skipped)
    assert own
    assert [function for function in own if not re.search(rf"\bfl\.{name}\.{function}\b", code)] == []


REFERENCE = sorted(TOP.glob("docs/reference/**/*.md"))


def reference_code() -> str:
    return "".join(block.code for page in REFERENCE for block in blocks(page.read_text()))


def shown_names(code: str) -> set[str]:
    """Public names that code uses, `fl.ntk` or `ofe.solve`, and classes that such a function returns."""
    names = public_names()
    shown = {name for name in names if re.search(rf"\b{re.escape('.'.join(f'fl.{name}'.split('.')[-2:]))}\b", code)}
    returned = set().union(*(returned_by(names[name]) for name in shown))
    return shown | {name for name, value in names.items() if inspect.isclass(value) and value in returned}


def test_every_public_name_has_an_example_in_the_reference():
    assert sorted(set(public_names()) - shown_names(reference_code())) == []


def test_a_name_is_shown_by_its_use_or_as_what_a_function_returns():
    assert shown_names("fl.metrics.spectrum(K)") == {"metrics.spectrum", "metrics.Spectrum"}
    assert shown_names("spectrum(K), fl.metrics.spectrums") == set()


def test_the_readme_is_one_screen():
    assert len(README.read_text().splitlines()) <= 120


def test_errata_name_tests_and_figures_that_are_there():
    text = (TOP / "docs" / "concepts" / "errata.md").read_text()
    tests = set(re.findall(r"`(tests/[\w/]+\.py)`", text))
    figures = set(re.findall(r"`(00\d/[\w-]+)`", text))
    assert len(tests) > 10
    assert len(figures) > 15
    assert [name for name in tests if not (TOP / name).is_file()] == []
    assert [name for name in figures if not (TOP / "papers/src/featlearn_papers/results" / name).is_dir()] == []


@pages()
def test_relative_links_lead_to_files(page: Path):
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not broken


@pages(having=ANCHOR.search)
def test_links_within_a_page_lead_to_headings(page: Path):
    text = page.read_text()
    headings = {
        re.sub(r"[^\w -]", "", heading).replace(" ", "-").lower() for heading in HEADING.findall(FENCED.sub("", text))
    }
    assert set(ANCHOR.findall(text)) <= headings


def test_files_that_how_it_works_names_are_there():
    text = (TOP / "docs/concepts/how-it-works.md").read_text()
    named = re.findall(r"`((?:\w+/)*\w+\.py|\w+/)`", text)
    assert len(named) >= 10
    assert [name for name in named if not (TOP / "src/featlearn" / name).exists()] == []


def test_the_readme_gives_its_two_commands_in_one_line_each():
    assert [match["name"] for match in COMMAND.finditer(README.read_text())] == ["main", "test"]


def test_the_readme_says_how_long_its_commands_take():
    text = README.read_text()
    before = [text[: match.start()].rstrip().rpartition("\n")[2] for match in COMMAND.finditer(text)]
    assert all(
        re.search(r"takes (about \w+|\d+ to \d+) (seconds|minutes?) on (one|two) cores?", line) for line in before
    )


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
    namespace = run(Path("page.md"), PAGE).namespace
    assert (namespace["a"], namespace["b"], namespace["c"]) == (1, 3, 3)


PRINTING = """
```python
print("a 0.25")
```

```text
a 0.25
```
```text
no output
```
1. in a list

   ```python
   print("b")
   ```

   ```text
   c
   ```
"""


def test_the_text_right_below_a_block_is_what_it_prints():
    assert [block.output for block in blocks(PRINTING)] == ["a 0.25\n", "c\n"]
    assert run(Path("page.md"), PRINTING).printed == ["a 0.25\n", "b\n"]


@pytest.mark.parametrize(
    ("said", "expected", "same"),
    [
        ("loss 0.251 -> -3.0", "loss 0.250 -> -3.0", True),
        ("loss 0.255", "loss 0.250", False),
        ("loss 0.250", "rate 0.250", False),
        ("1000 of 2000", "1009 of 2000", True),
        ("1000 of 2000", "1020 of 2000", False),
        ("k^-1.20", "k^1.20", False),
        ("1.2e-07", "1.3e-07", True),
        ("1.2e-07", "1.4e-07", False),
        ("7", "8", True),
        ("7", "9", False),
    ],
)
def test_outputs_may_differ_by_rounding_only(said: str, expected: str, same: bool):
    assert same_but_for_rounding(said, expected) is same


def test_a_failing_block_names_its_line():
    with pytest.raises(ZeroDivisionError) as failure:
        run(Path("page.md"), "words\n\n```python\na = 1\na / 0\n```\n")
    assert failure.traceback[-1].lineno == 5 - 1  # pytest counts from zero
