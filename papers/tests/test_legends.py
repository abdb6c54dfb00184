"""Legends find a free place, name bands, and are large enough to be read."""

import matplotlib
import numpy
import pytest

from featlearn.errors import InputValueError
from featlearn_papers.frame.drawing import STYLE, curve, panels, save, seed_curves
from featlearn_papers.frame.legends import arrange_legends, check_text, crossing_legends

TIME = numpy.linspace(0, 1, 50)


@pytest.fixture(autouse=True)
def _style():
    with matplotlib.rc_context(STYLE):
        yield


def texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_a_legend_over_a_curve_is_moved_to_a_free_corner():
    figure, (ax,) = panels(1, 1, titles=("A",))
    curve(ax, TIME, TIME, "rising")
    ax.legend(loc="upper right")
    limits = ax.get_ylim()
    assert crossing_legends(figure) == ["A"]
    arrange_legends(figure)
    assert crossing_legends(figure) == []
    assert ax.get_ylim() == limits


def test_room_is_made_above_curves_that_fill_the_panel():
    figure, (ax,) = panels(1, 1)
    curve(ax, TIME, numpy.cos(numpy.pi * numpy.arange(50)), "swinging")
    ax.legend()
    arrange_legends(figure)
    assert crossing_legends(figure) == []
    assert ax.get_ylim()[1] > 1.2


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_legend_that_fits_nowhere_goes_below_its_panel(scale):
    figure, axes = panels(2, 2, height=2.5)
    for ax in axes:
        for i in range(4):
            ax.axvline(i / 3, label=f"line {i}")
            ax.axvline(i / 3 + 1 / 6, label=f"_line {i}, and a half")
        ax.set(yscale=scale, ylim=(1, 10), xlabel="time")
        ax.legend()
    arrange_legends(figure)
    assert crossing_legends(figure) == []
    assert axes[0].get_ylim() == pytest.approx((1, 10))
    figure.draw_without_rendering()
    assert axes[0].get_legend().get_window_extent().y1 < axes[0].bbox.y0
    assert axes[0].get_legend().get_window_extent().y0 > axes[2].bbox.y1


def test_points_and_axes_laid_over_each_other_count():
    figure, (ax,) = panels(1, 1)
    ax.scatter([0.0, 1.0, 0.9], [0.0, 1.0, 0.95], label="points")
    over = ax.twinx()
    over.plot([0, 0.3], [1, 0.7])
    ax.legend(loc="upper right")
    assert crossing_legends(figure) == ["0"]
    ax.get_legend().set_loc("upper left")
    assert crossing_legends(figure) == ["0"]
    arrange_legends(figure)
    assert crossing_legends(figure) == []


def test_what_bands_show_is_said_once_below_the_panels():
    values = numpy.stack([TIME, 2 * TIME, 6 * TIME])
    figure, (left, right) = panels(1, 2)
    curve(left, TIME, values, "a")
    curve(right, TIME, values, "b")
    curve(right, TIME, -values, "c", spread="standard error")
    curve(right, TIME, values[0], "theory")
    arrange_legends(figure)
    assert texts(figure) == ["band: range of 3 seeds", "band: standard error of 3 seeds"]


@pytest.mark.parametrize(("spread", "count"), [("standard deviation", 1), ("standard error", 3)])
def test_bands_are_one_deviation_to_each_side(spread, count):
    values = numpy.array([[1.0, 2.0], [2.0, 4.0], [6.0, 3.0]])
    figure, (ax,) = panels(1, 1)
    curve(ax, [0, 1], values, "a", spread=spread)
    mean, low, high = (line.get_ydata() for line in ax.lines)
    deviation = values.std(0, ddof=1) / count**0.5
    assert mean == pytest.approx(values.mean(0))
    assert low == pytest.approx(values.mean(0) - deviation)
    assert high == pytest.approx(values.mean(0) + deviation)
    assert figure.axes == [ax]


def test_seeds_are_drawn_singly_with_one_entry_in_the_legend():
    figure, (ax,) = panels(1, 1)
    seed_curves(ax, TIME, numpy.stack([TIME, 2 * TIME, 6 * TIME]), "a")
    assert [line.get_label() for line in ax.lines] == ["a", "_a: seed 1", "_a: seed 2"]
    assert len(figure.axes[0].get_legend_handles_labels()[1]) == 1


def test_text_that_is_too_small_is_refused(tmp_path):
    figure, (ax,) = panels(1, 1)
    curve(ax, TIME, TIME, "small")
    ax.legend(fontsize=6)
    with pytest.raises(InputValueError, match="'small' is drawn at 6 pt, expected at least 7"):
        save(figure, tmp_path)
    ax.legend(fontsize=7)
    check_text(figure)
