"""Reports on runs of which some diverged: the others can still be read."""

import math
from pathlib import Path

import pytest

from featlearn.record import Run
from featlearn.reporting import figures
from featlearn.reporting.content_blocks import BEYOND, CUT, Chart, ChartLine
from featlearn.reporting.curve_sections import LARGEST_GAP
from featlearn.reporting.markup import written
from featlearn.reporting.page import report
from tests.reporting.runs import by_hand
from tests.reporting.test_page import Page

STEPS = [0, 10, 20, 30, 40]


def sound(path: Path, **config: object) -> Run:
    scalars = {
        "probe/loss": [1.0, 0.8, 0.5, 0.4, 0.3],
        "ntk/norm": [2.0, 3.0, 5.0, 7.0, 8.0],
        "weights/0/distance": [0.0, 0.1, 0.2, 0.3, 0.4],
        "weights/0/norm": [1.0, 1.1, 1.2, 1.3, 1.4],
    }
    return by_hand(path, scalars, STEPS, **config)


def diverged(path: Path, **config: object) -> Run:
    scalars = {
        "probe/loss": [1.0, 0.9, 0.7, math.inf, math.nan],
        "ntk/norm": [2.0, 4.0, 6.0, 1e12, 1e30],
        "weights/0/distance": [0.0, 0.2, 0.6, 1e6, 1e9],
        "weights/0/norm": [1.0, 1.1, 1.5, 1e6, 1e9],
    }
    return by_hand(path, scalars, STEPS, **config)


def test_values_after_a_divergence_do_not_stretch_an_axis(tmp_path: Path):
    runs = [sound(tmp_path / "a"), diverged(tmp_path / "b")]
    page = Page(report(runs, tmp_path / "both.html"))
    low, high = page.blocks["weights"]["yLimits"]
    assert (low, high) == (pytest.approx(-0.03), pytest.approx(0.63))  # 0 to 0.6, and a twentieth on both sides
    low, high = page.blocks["ntk-norm"]["yLimits"]
    assert (low, high) == (pytest.approx(2 / 4**0.05, rel=1e-4), pytest.approx(8 * 4**0.05, rel=1e-4))
    assert page.text().count(CUT) == 3
    assert written(1e9) in page.text("td"), "the table has it"
    ax = figures.draw(runs, "weight_distance")
    assert ax.get_ylim() == pytest.approx((-0.03, 0.63))


def test_a_gap_far_above_one_does_not_hide_those_of_other_runs(tmp_path: Path):
    gaps = {"a": [math.nan, 0.1, 0.2, 0.3, 0.4], "b": [math.nan, 0.2, 3.0, 25.0, 25.0]}
    runs = [
        by_hand(tmp_path / name, {"probe/loss": [1.0, 0.8, 0.5, 0.4, 0.3], "gap/probe": gap}, STEPS)
        for name, gap in gaps.items()
    ]
    page = Page(report(runs, tmp_path / "both.html"))
    assert page.blocks["gap"]["yLimits"] == [0.0, LARGEST_GAP]
    assert BEYOND.format(LARGEST_GAP) in page.text()
    assert CUT not in page.text()
    assert written(25.0) in page.text("td"), "the table has it"
    assert figures.draw(runs, "gap").get_ylim() == (0.0, LARGEST_GAP)
    page = Page(report(runs[:1], tmp_path / "one.html"))
    assert "yLimits" not in page.blocks["gap"]


def test_sound_runs_are_shown_whole(tmp_path: Path):
    page = Page(report([sound(tmp_path / "a"), sound(tmp_path / "c")], tmp_path / "both.html"))
    assert all("yLimits" not in block for block in page.blocks.values())
    assert CUT not in page.text()


def test_a_diverged_seed_is_left_out_of_the_means(tmp_path: Path):
    runs = [sound(tmp_path / "a", seed=0), sound(tmp_path / "b", seed=1), diverged(tmp_path / "c", seed=2)]
    page = Page(report(runs, tmp_path / "all.html"))
    (line,) = page.blocks["ntk-norm"]["lines"]
    assert line["y"] == line["high"] == [2.0, 3.0, 5.0, 7.0, 8.0]
    assert "yLimits" not in page.blocks["ntk-norm"]
    assert "c in the means of a, as it diverged at step 30." in page.text()


def chart(*lines: ChartLine, axis: str = "linear") -> Chart:
    return Chart("key", "title", lines, "y", y_axis=axis)


def test_limits_hold_all_that_was_measured_before():
    known = ChartLine("known", [0, 1], [1.0, 5.0], 0, low=[0.5, 4.0], high=[2.0, 9.0])
    broken = ChartLine("broken", [0, 1, 2], [-1.0, 2.0, 1e9], 1, until=1)
    low, high = chart(known, broken).limits
    assert (low, high) == (pytest.approx(-1.5), pytest.approx(9.5))
    assert chart(known).limits is None
    assert chart(known, ChartLine("inside", [0, 5], [1.0, 3.0], 1, until=1)).limits is None
    assert chart(ChartLine("at once", [3], [1e9], 1, until=0)).limits is None, "nothing else could be shown"
    constant = chart(ChartLine("constant", [0, 1], [2.0, 1e9], 1, until=0)).limits
    assert constant == (pytest.approx(1.9), pytest.approx(2.1))


def test_an_axis_does_not_end_below_all_values():
    mixed, beyond = (
        Chart("gap", "Gap", [ChartLine("a", [0, 5], y, 0)], "y", most=1.5) for y in ([1.0, 9.0], [8.0, 9.0])
    )
    assert (mixed.limits, mixed.remark) == ((1.0, 1.5), BEYOND.format(1.5))
    assert (beyond.limits, beyond.remark) == (None, "")


def test_limits_of_a_logarithmic_axis_are_positive():
    lines = ChartLine("zero", [0, 1], [0.0, 10.0], 0), ChartLine("broken", [0, 1], [1000.0, 1e30], 1, until=0)
    low, high = chart(*lines, axis="log").limits
    assert (low, high) == (pytest.approx(10 / 100**0.05), pytest.approx(1000 * 100**0.05))
