"""Papers are cited by author and year; the codes 000 to 004 stay in ids of figures and in the tables that map them."""

import re
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]

BARE_CODE = re.compile(
    r"""(?<![\w.,])00[0-4][ ](?:Eq|Sec|App|Fig|Table|Prop|Theorem|Cor|p\.)  # 002 Eq. 91
    | \b[Pp]apers?[ ]00[0-4]\b                                             # paper 003
    | (?<![\w.,/"'`*-])00[0-4](?![\w/"'`*-]|[.,]\d)                        # (004), but no number, id or key
    """,
    re.VERBOSE,
)

MAPS = (
    "src/featlearn/citations.py",
    "src/featlearn/cli/cite.py",
    "docs/gallery/papers.md",
    "docs/contributing-a-figure.md",
)
"""Files that say which code is which paper, or take codes as arguments."""


def names() -> list[str]:
    paths = [TOP / "README.md", *TOP.glob("src/**/*.py"), *TOP.glob("docs/**/*.md"), *TOP.glob("examples/**/*.py")]
    found = sorted(str(path.relative_to(TOP)) for path in paths)
    return [name for name in found if name not in MAPS]


def test_prose_cites_by_author_and_year():
    bare = [
        f"{name}:{number}: {line.strip()}"
        for name in names()
        for number, line in enumerate((TOP / name).read_text().splitlines(), 1)
        if BARE_CODE.search(line)
    ]
    assert bare == []
    assert len(names()) > 400


@pytest.mark.parametrize("name", [name for name in MAPS if name.endswith(".md")])
def test_a_map_of_codes_does_not_cite_by_them(name: str):
    text = (TOP / name).read_text()
    assert re.findall(r"(?<![\w.,])00[0-4] (?:Eq|Sec|App|Fig|Table|Prop)\b.*", text) == []


@pytest.mark.parametrize("text", ["(002 Eq. 91)", '"""003 Fig. 4: speeds', "of paper 004", "as in 000", "see (001)."])
def test_bare_codes_are_found(text: str):
    assert BARE_CODE.search(text)


@pytest.mark.parametrize(
    "text", ['id="002/fig1"', "paper_003.fig4", "0.002 of", "2,000 Eq", "300,001", '("000", "001")', '"001-eq5"']
)
def test_ids_keys_and_numbers_are_no_bare_codes(text: str):
    assert not BARE_CODE.search(text)
