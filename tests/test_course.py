"""The lessons of the course have the same parts, and become notebooks that run."""

import json
import re
from pathlib import Path

import pytest

from docs.draw import blocks
from docs.notebooks import FOLDED, LESSONS, main, notebook

INDEX = (LESSONS[0].parent / "index.md").read_text()

lessons = pytest.mark.parametrize("page", LESSONS, ids=[page.stem for page in LESSONS])

PAGE = """# 1. Title

```python
a = 1
print(a)
```

```text
1
```

![Picture](../images/course/a.png)

Words.

```python
b = a + 1
```

<details>
<summary>Answer</summary>

```python
c = b
```

</details>

End.
"""


def test_there_are_eight_lessons_and_the_index_lists_them_in_order():
    assert [page.stem[:2] for page in LESSONS] == [f"{number}-" for number in range(1, 9)]
    assert re.findall(r"\]\((\d-[\w-]+\.md)\)", INDEX) == [page.name for page in LESSONS]
    tree = INDEX.partition(":hidden:")[2].partition("```")[0].split()
    assert tree == [page.stem for page in LESSONS]


@lessons
def test_a_lesson_has_its_parts(page: Path):
    text = page.read_text()
    headings = re.findall(r"^## (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    begins = rf"# {page.stem[0]}\. [^\n]+\n\n\*[^\n]+\?[^\n]*\*\n"  # a title with its number, and a question
    assert re.match(begins, text)
    assert headings[0] == "Theory"
    assert "Against the expectation" in headings
    assert headings[-1] == "Questions"
    assert 1 <= len(re.findall(r"^!\[", text, re.MULTILINE)) <= 2


@lessons
def test_a_lesson_ends_in_three_questions_with_folded_answers_that_are_checked(page: Path):
    before, _, questions = page.read_text().partition("\n## Questions\n")
    answers = FOLDED.findall(questions)
    assert re.findall(r"^\*\*(\d)\.\*\*", questions, re.MULTILINE) == ["1", "2", "3"]
    assert len(answers) == 3
    assert all(block.output for answer in answers for block in blocks(answer))
    assert all(blocks(answer) for answer in answers)
    assert not blocks(FOLDED.sub("", questions)), "code behind the answers would miss what they define"
    assert not FOLDED.search(before)


def test_a_notebook_has_a_cell_for_each_block_with_its_output_and_folds_answers():
    made = notebook(PAGE)
    cells = made["cells"]
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 4)
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "markdown", "code", "markdown"]
    assert [cell["source"] for cell in cells[:4]] == ["# 1. Title", "a = 1\nprint(a)", "Words.", "b = a + 1"]
    assert cells[1]["outputs"] == [{"output_type": "stream", "name": "stdout", "text": "1\n"}]
    assert cells[3]["outputs"] == []
    assert cells[4]["source"].startswith("<details>")
    assert "c = b" in cells[4]["source"]
    assert cells[4]["source"].endswith("End.")


def test_notebooks_are_written_beside_their_pages(tmp_path: Path):
    page = tmp_path / "1-title.md"
    page.write_text(PAGE)
    main([page])
    assert json.loads((tmp_path / "1-title.ipynb").read_text()) == notebook(PAGE)


@lessons
def test_a_notebook_has_all_code_of_its_lesson_but_the_answers(page: Path):
    text = page.read_text()
    code = [cell["source"] for cell in notebook(text)["cells"] if cell["cell_type"] == "code"]
    assert code == [block.code.rstrip("\n") for block in blocks(FOLDED.sub("", text))]
