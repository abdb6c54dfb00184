"""The page of a width check: problems first, text to paste, panels, numbers; hostile names are text."""

import base64
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from featlearn.reporting.width_page import width_page
from tests.reporting.runs import HOSTILE
from tests.reporting.test_page import Page


class Problem(SimpleNamespace):
    def __str__(self) -> str:
        return f"{self.parameter}: learning rate is too large"


class Check(SimpleNamespace):
    def __str__(self) -> str:
        return f"scheme: {self.scheme}\nnumbers of {HOSTILE}"

    def plot(self):
        from matplotlib.figure import Figure

        figure = Figure()
        figure.subplots().plot([1, 2], [3, 4])
        return figure


def check(*problems: Problem) -> Check:
    return Check(scheme="mup", phase="unstable", problems=problems)


def test_problems_lead_with_the_text_to_paste(tmp_path: Path):
    problems = [Problem(parameter=HOSTILE, patch=f"lr *= 1 # {HOSTILE}"), Problem(parameter="b", advice="multiply it")]
    page = Page(width_page(check(*problems), tmp_path / "page.html", title=HOSTILE))
    assert page.text("h1") == "2 problems: mup, unstable"
    assert page.source.count("<script>") == 2
    assert [button["data-copy"] for button in page.having("button")] == [f"lr *= 1 # {HOSTILE}", "multiply it"]
    assert HOSTILE in page.text("pre")
    (image,) = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)"', page.source)
    assert b"<svg" in base64.b64decode(image)


def test_a_check_without_problems_still_names_its_phase(tmp_path: Path):
    page = Page(width_page(check(), tmp_path / "page.html"))
    assert page.text("h1") == "No problems: mup, unstable"


@pytest.mark.parametrize("name", ["missing/page.html"])
def test_a_missing_folder_is_an_error(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="there is no folder"):
        width_page(check(), tmp_path / name)
