"""The page of a sweep without a browser: what it holds, where its cells lead, and that nothing breaks out of it."""

import base64
import hashlib
import os
import re
from urllib.parse import unquote

import pytest

import featlearn as fl
from featlearn import sweeps
from featlearn.errors import RunError
from tests.reporting.runs import HOSTILE
from tests.reporting.test_page import Page
from tests.sweeps import functions

SERIAL = sweeps.Serial()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "a sweep"
    grid = {"gamma": [0.01, 0.3, 10.0], "width": [8, 32]}
    return fl.sweep(functions.recorded, grid, out=out, seeds=2, executor=SERIAL, quiet=True)


@pytest.fixture(scope="module")
def page(recorded):
    recorded.write_reports(quiet=True)
    return Page(recorded.report(recorded.path / "sweep.html"))


def cells(page):
    """Links of the cells of the first map, with their titles."""
    return [a for tag, a in page.elements if tag == "a" and a.get("title")]


def test_every_cell_opens_the_report_of_its_point(recorded, page):
    own = [a for a in cells(page) if ": regime" in a["title"]]
    assert [a["title"] for a in own] == [
        f"gamma {gamma:g}, width {width}: regime {regime}"
        for width in (32, 8)
        for gamma, regime in ((0.01, "lazy"), (0.3, "mixed"), (10.0, "rich"))
    ]
    for a in own:
        target = recorded.path / unquote(a["href"])
        assert target.is_file()
        gamma, width = re.match(r"gamma (\S+), width (\S+):", a["title"]).groups()
        assert f"gamma={float(gamma)}, width={width}" in Page(target).text("h1", "title")
    assert len({a["href"] for a in own}) == 6


def test_reports_are_written_again_only_where_results_are_newer(recorded, page, tmp_path):
    reports = {path: path.stat().st_mtime_ns for path in recorded.path.glob("*/report.html")}
    assert len(reports) == 6
    elsewhere = Page(recorded.report(tmp_path / "elsewhere.html"))
    assert {path: path.stat().st_mtime_ns for path in recorded.path.glob("*/report.html")} == reports
    assert (tmp_path / unquote(cells(elsewhere)[0]["href"])).is_file()
    first = next(iter(reports))
    os.utime(first.parent / "seed-0.json")
    assert f"#p-{first.parent.name}" in {a["href"] for a in cells(Page(recorded.report(tmp_path / "again.html")))}
    assert set(recorded.write_reports(quiet=True)) == set(reports)
    assert first.stat().st_mtime_ns > reports[first]


def test_it_holds_all_points_and_values(page):
    rows = page.having("tr")
    assert sum("id" in a for a in rows) == 6
    said = page.text()
    for words in (
        "6 points with 2 seeds: 12 of 12 done.",
        "Map of regime",
        "Map of gap",
        "Map of loss_left",
        "tests.sweeps.functions:recorded",
    ):
        assert words in said


def test_nothing_foreign_is_allowed(page):
    (policy,) = [a["content"] for a in page.having("meta") if a.get("http-equiv")]
    assert "default-src 'none'; script-src 'none';" in policy
    for style in re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL):
        assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in policy
    assert not page.having("script")
    assert not any("style" in a for _, a in page.elements)
    assert not re.search(r'(?:href|src)="(?:https?:)?//', page.source)


def test_numbers_failures_and_missing_points_without_runs(tmp_path):
    def f(a, b, seed):
        if a == 3:
            raise ValueError(HOSTILE)
        return {HOSTILE[:30]: a + 0.5 * seed, "word": HOSTILE}

    sweep = fl.sweep(
        f,
        [{"a": a, "b": HOSTILE * b} for a, b in ((1, 1), (2, 1), (3, 2))],
        out=tmp_path / "s",
        seeds=2,
        executor=SERIAL,
        quiet=True,
    )
    page = Page(sweep.report(tmp_path / "s.html", title=HOSTILE))
    assert page.text("h1") == HOSTILE
    assert not page.having("script")
    assert not page.having("img")
    assert "3 points with 2 seeds: 4 of 6 done, 2 failed." in page.text()
    assert HOSTILE[:30] in page.text("th")
    assert "Traceback" in page.text("pre")
    anchors = {a["href"] for a in cells(page)}
    assert anchors == {f"#p-{point.id}" for point, _ in sweep.points}
    assert {f"#{a['id']}" for a in page.having("tr") if "id" in a} == anchors


def test_a_page_where_everything_failed(tmp_path):
    def f(a):
        raise ValueError("no")

    sweep = fl.sweep(f, {"a": [1, 2]}, out=tmp_path, executor=SERIAL, quiet=True)
    page = Page(sweep.report(tmp_path / "sweep.html"))
    assert "Map of status" in page.text()
    assert len(cells(page)) == 2


def test_further_settings_make_further_maps(tmp_path):
    grid = {"a": [1, 2], "b": [3, 4, 5], "c": ["x", "y"]}
    sweep = fl.sweep(lambda a, b, c: a * b, grid, out=tmp_path, executor=SERIAL, quiet=True)
    page = Page(sweep.report(tmp_path / "sweep.html", x="b", y="c"))
    assert page.text("h3").split("a = ")[1:] == ["1 ", "2"]
    assert len(cells(page)) == 12


def test_one_setting_or_none_is_a_page_too(tmp_path):
    one = fl.sweep(lambda a: a, {"a": [1, 2]}, out=tmp_path / "one", executor=SERIAL, quiet=True)
    assert len(cells(Page(one.report(tmp_path / "one.html")))) == 2
    none = fl.sweep(lambda: 1, {}, out=tmp_path / "none", executor=SERIAL, quiet=True)
    assert "differ in no setting" in Page(none.report(tmp_path / "none.html")).text()


def test_a_boundary_is_drawn_on_the_page(recorded, tmp_path):
    page = Page(recorded.report(tmp_path / "b.html", value="gap", boundary={"theory": lambda gamma: 10 / gamma}))
    (picture,) = page.having("img")
    assert picture["src"].startswith("data:image/png;base64,")
    assert "boundary" in picture["alt"]


def test_a_run_without_its_file_is_reported_after_the_others_are_written(tmp_path):
    sweep = fl.sweep(functions.recorded, {"gamma": [1.0, 2.0], "width": [8]}, out=tmp_path, executor=SERIAL, quiet=True)
    (tmp_path / sweep.points[0][0].id / "seed-0" / "run.json").unlink()
    with pytest.raises(RunError, match=r"1 of 2 reports cannot be written; the first, of gamma=1.0, width=8: "):
        sweep.write_reports(quiet=True)
    page = Page(sweep.report(tmp_path / "sweep.html"))
    hrefs = {a["href"] for a in cells(page)}
    assert f"#p-{sweep.points[0][0].id}" in hrefs
    assert f"{sweep.points[1][0].id}/report.html" in hrefs


def scored(scale, width, seed=0):
    return {"gap": 1 / (1 + scale), "test/accuracy": 0.9 - 0.1 * abs(scale - 1) + 0.001 * width + 0.01 * seed}


def test_it_says_which_way_is_lazier_and_rings_the_best_point(tmp_path):
    grid = {"scale": [0.25, 1, 4], "width": [8, 32]}
    sweep = fl.sweep(scored, grid, out=tmp_path / "s", seeds=2, executor=SERIAL, quiet=True)
    page = Page(sweep.report(tmp_path / "sweep.html"))
    (words,) = [data for tag, data in page.texts if tag == "p" and "lazier" in data]
    assert "Runs are lazier as scale grows (gap 0.80 at 0.25, 0.20 at 4)." in words
    assert "width grows" not in words
    assert "Best test accuracy: 0.937 at scale=1, width=32." in words
    assert page.text("div").count("scale: lazier →") == 2
    (best,) = [a["title"] for a in cells(page) if a["title"].endswith(", the best")]
    assert best.startswith("scale 1, width 32: test/accuracy 0.937")
    assert page.source.count('best"><a') == 1
    radios = page.having("input", type="radio")
    assert [radio["id"] for radio in radios] == ["quantity-0", "quantity-1"]
    assert [("checked" in radio) for radio in radios] == [True, False]


def test_a_tie_or_one_point_has_no_best(tmp_path):
    sweep = fl.sweep(lambda a: {"test/accuracy": 0.5}, {"a": [1, 2]}, out=tmp_path, executor=SERIAL, quiet=True)
    page = Page(sweep.report(tmp_path / "sweep.html"))
    assert "Best" not in page.text("p")
    assert "the best" not in page.source
