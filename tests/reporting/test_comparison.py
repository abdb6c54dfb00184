"""Several runs: the table, colors, curves by run, layers by block, and what would steer each."""

import re
from pathlib import Path

import numpy
import pytest

import featlearn as fl
from featlearn.diagnosis.advice import next_step
from featlearn.diagnosis.evidence import GAP
from featlearn.record import Run
from featlearn.reporting.comparison import comparison_headline, counted_regimes, settings_that_differ
from featlearn.reporting.gauges import with_error
from featlearn.reporting.groups import groups
from featlearn.reporting.page import report
from tests.reporting.runs import by_hand, watched
from tests.reporting.test_page import Page


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("comparison")
    return [watched(folder / "lazy", gamma=0.05), watched(folder / "rich", gamma=8.0)]


@pytest.fixture(scope="module")
def page(runs: list[Run]) -> Page:
    return Page(report(runs, runs[0].path.parent / "page.html"))


def rows(page: Page) -> list[list[str]]:
    """Cells of the table of runs, as text."""
    found = re.search(r'<div class="scroll compared".*?<tbody>(.*?)</tbody>', page.source, re.DOTALL)
    assert found
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", found[1])]
    return [[" ".join(re.sub("<[^>]*>", " ", cell).split()) for cell in row] for row in cells]


def test_the_table_comes_first_then_tabs_in_order(page: Page):
    order = [page.source.index(part) for part in ('class="scroll compared"', 'id="curves"', 'id="layers"', 'id="runs"')]
    assert order == sorted(order)
    cards = page.having("details", **{"class": "run r0"}) + page.having("details", **{"class": "run r1"})
    assert len(cards) == 2
    assert all("open" not in card for card in page.having("details"))


def test_the_table_has_regimes_and_numbers_with_errors(runs: list[Run], page: Page):
    found = rows(page)
    assert [row[0] for row in found] == ["lazy", "rich"]
    for row, run in zip(found, runs, strict=True):
        told = fl.diagnose(run)
        assert told.regime in row
        for name in ("gap", "turning", "growth"):
            found_number = told.numbers[name]
            number, _, error = with_error(float(found_number), float(found_number.stderr)).partition(" ± ")
            assert f"{number} ± {error}" in row


def test_settings_are_those_that_differ(tmp_path: Path):
    def made(name: str, lr: float, **settings: object) -> Run:
        optimizer = {"class": "SGD", "groups": [{"lr": lr, "momentum": 0.9}]}
        return by_hand(tmp_path / name, {"probe/loss": [1.0, 0.5]}, [0, 1], settings=settings, optimizer=optimizer)

    runs = [made("a", 0.1, depth=2, text="x" * 90, same=1), made("b", 0.2, depth=None, text="y", same=1)]
    found = settings_that_differ(groups(runs, points=10))
    assert found == {"depth": ["2", "null"], "text": ["x" * 39 + "…", "y"], "lr": ["0.1", "0.2"]}


def test_a_broken_run_is_named(tmp_path: Path):
    scalars = {"probe/loss": [1.0, 0.5, 0.4]}
    runs = [
        by_hand(tmp_path / "a", scalars, [0, 1, 2], lr=1),
        by_hand(tmp_path / "b", {"probe/loss": [1.0, 0.9, float("nan")]}, [0, 1, 2], lr=2),
    ]
    assert counted_regimes(groups(runs, points=10)) == "2 cannot tell (a, b). Training broke down in b."
    assert "broke down" in Page(report(runs, tmp_path / "page.html")).text("th")


def test_a_color_is_a_run_in_every_chart(page: Page):
    charts = [block for block in page.blocks.values() if block["kind"] == "chart"]
    assert len(charts) > 10
    for chart in charts:
        for line in chart["lines"]:
            assert line["color"] == line.get("group", 8), (chart["key"], line["label"])
    swatches = re.findall(r'class="c(\d) swatch"><line[^>]*></line></svg>(lazy|rich)', page.source)
    assert set(swatches) == {("0", "lazy"), ("1", "rich")}
    assert len(swatches) > 20


def test_lines_of_several_runs_have_a_button_for_each_run_and_each_style(page: Page):
    figure = re.search(r'<figure id="figure-gap">.*?</figure>', page.source, re.DOTALL)[0]
    groups_found = re.findall(r'data-group="(\d)"', figure)
    kinds = re.findall(r'data-kind="([^"]+)"', figure)
    assert groups_found == ["0", "1"]
    assert kinds == ["on the probe", "on test points"]
    assert len(page.blocks["gap"]["lines"]) == 4


def test_the_gap_is_drawn_with_its_thresholds(runs: list[Run], tmp_path: Path):
    page = Page(report(runs[1], tmp_path / "page.html"))
    gap = page.blocks["gap"]
    assert [level["at"] for level in gap["levels"]] == [GAP.low, GAP.high]
    assert gap["least"] == [0.0, 1.0]
    assert gap["lines"][0]["y"] == pytest.approx(fl.diagnose(runs[1]).gap.values, rel=1e-4)


@pytest.mark.parametrize("which", [0, 1])
def test_the_page_says_one_thing_to_do_next(runs: list[Run], tmp_path: Path, which: int):
    page = Page(report(runs[which], tmp_path / "page.html"))
    words, _, command = next_step(fl.diagnose(runs[which])).partition("`")
    assert words.rstrip(": ") in page.text("p")
    assert [one["data-copy"] for one in page.having("button") if "data-copy" in one] == [command.partition("`")[0]]
    assert command.partition("`")[0] in page.text("code")


def test_second_opinions_are_a_table(runs: list[Run], tmp_path: Path):
    page = Page(report(runs[1], tmp_path / "page.html"))
    found = fl.diagnose(runs[1]).opinions
    assert found
    for name, one in found.items():
        assert name in page.text("th")
        assert one.about in page.text("small")


def test_specialization_maps_name_their_axes(page: Page):
    figure = re.search(r'<figure id="figure-specialization">.*?</figure>', page.source, re.DOTALL)[0]
    assert figure.count('<span class="name">kernel of output</span>') == 4
    assert figure.count('<span class="name">target of output</span>') == 4
    assert figure.count('<div class="indices"><span>0</span><span>1</span><span>2</span></div>') == 8


def deep(path: Path, factor: float = 1.0, **config: object) -> Run:
    """Twelve layers in three blocks, layer k of block b at distance b + k / 10 times the factor in the end."""
    scalars = {f"weights/blocks.{b}.part{k}/distance": [0.0, factor * (b + k / 10)] for b in range(3) for k in range(4)}
    return by_hand(path, scalars | {"probe/loss": [1.0, 0.5]}, [0, 9], **config)


def test_layers_of_deep_networks_are_shown_by_block(tmp_path: Path):
    page = Page(report(deep(tmp_path / "deep"), tmp_path / "page.html"))
    lines = page.blocks["weights"]["lines"]
    assert [line["label"] for line in lines] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [line["y"][-1] for line in lines] == pytest.approx([0.15, 1.15, 2.15])
    assert [(line["low"][-1], line["high"][-1]) for line in lines] == [(0.0, 0.3), (1.0, 1.3), (2.0, 2.3)]
    table = re.search(r'id="grid-layer-learning">.*', page.source, re.DOTALL)[0]
    assert re.search(r'<th scope="row">blocks.1 \(4 layers\)</th><td data-value="1.15[^"]*">1.15</td>', table)
    assert re.search(r'<th scope="row">blocks.1.part3</th><td data-value="1.3">1.3</td>', table)
    folded = re.search(r"<details><summary>blocks.1 \(4 layers\)</summary>.*?</details>", table, re.DOTALL)[0]
    assert "blocks.1.part3" in folded
    assert "blocks.2.part0" not in folded


def test_blocks_of_several_runs_are_line_styles(tmp_path: Path):
    runs = [deep(tmp_path / "a", lr=1), deep(tmp_path / "b", 2.0, lr=2)]
    lines = Page(report(runs, tmp_path / "page.html")).blocks["weights"]["lines"]
    assert [(line["color"], line["dash"], line["kind"]) for line in lines] == [
        (run, block, f"blocks.{block}") for run in range(2) for block in range(3)
    ]
    assert lines[-1]["y"][-1] == pytest.approx(4.3)


def scored(path: Path, gap: float, wrong: int, tests: int = 400) -> Run:
    """A classifier of two classes with this linearization gap that is wrong on so many of its test points."""
    y = numpy.eye(2, dtype=numpy.float32)[numpy.arange(tests) % 2]
    f = numpy.where(numpy.arange(tests)[:, None] < wrong, 1 - y, y)
    scalars = {"probe/loss": [1.0, 0.1], "gap/probe": [0.0, gap], "gap/test": [0.0, gap]}
    arrays = {
        "test": [{"f": 0 * f, "y": y}, {"f": f, "y": y}],
        "targets": [{"y": y[:6]}],
        "outputs": [{"f": 0 * y[:6]}, {"f": y[:6]}],
    }
    return by_hand(path, scalars, [0, 9], arrays, loss_convention="mean", probe={"classification": True})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ((20, 160), "Richer tests better here (0.95, 0.60 from the richest on, each ± 0.0"),
        ((160, 20), "Richer tests worse here (0.60, 0.95"),
        ((40, 44), "Richer does not test better here (0.90, 0.89"),
    ],
)
def test_the_headline_says_whether_richer_tests_better(tmp_path: Path, wrong: tuple[int, int], says: str):
    runs = [scored(tmp_path / name, gap, n) for name, gap, n in zip("ab", (0.8, 0.05), wrong, strict=True)]
    run_groups = groups(runs, points=10)
    assert comparison_headline(run_groups).startswith(says)
    alike = [scored(tmp_path / name, 0.8, n) for name, n in zip("cd", wrong, strict=True)]
    assert comparison_headline(groups(alike, points=10)) == "All runs are about equally rich."
    source = report(runs, tmp_path / "page.html").read_text()
    points = re.findall(r'<a href="#(run-\d)" class="c(\d)" aria-label="([^"]+)"', source)
    assert [(place, color) for place, color, _ in points] == [("run-0", "0"), ("run-1", "1")]
    assert points[0][2].startswith(f"a: gap 0.80, test accuracy {1 - wrong[0] / 400:.2f} ± ")
    assert all(f'id="{place}"' in source for place, _, _ in points)


def test_runs_are_named_by_the_settings_that_differ(tmp_path: Path):
    runs = [
        by_hand(tmp_path / name, {"probe/loss": [1.0, 0.5]}, [0, 1], settings={"scale": scale, "depth": 2, "seed": 7})
        for name, scale in (("a", 0.03), ("b", 10.0))
    ]
    assert [group.label for group in groups(runs, points=10)] == ["scale 0.03", "scale 10"]
    other = by_hand(tmp_path / "c", {"probe/loss": [1.0, 0.5]}, [0, 1])
    assert [group.label for group in groups([*runs, other], points=10)] == ["a", "b", "c"]


def test_the_best_of_a_column_is_marked(tmp_path: Path):
    runs = [
        by_hand(tmp_path / name, {"probe/loss": [1.0, left], "test/accuracy": [0.1, accuracy]}, [0, 1], lr=left)
        for name, left, accuracy in (("a", 0.5, 0.8), ("b", 0.25, 0.7), ("c", 0.75, 0.8))
    ]
    source = report(runs, tmp_path / "page.html").read_text()
    best = re.findall(r'<td data-value="([^"]+)"[^>]* data-name="([^"]+)" class="best">', source)
    assert best == [("0.25", "loss left")]  # two share the best accuracy
