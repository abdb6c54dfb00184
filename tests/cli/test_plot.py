"""Curves in a terminal."""

import math

from featlearn.cli.plot import Panel, plot


def bars(text: str, column: int) -> list[str]:
    """One column of a plot, from the top."""
    return [line.ljust(80)[column] for line in text.splitlines()]


def test_a_rising_curve_rises_and_a_falling_one_falls():
    steps = [0, 1, 10, 100, 1000]
    text = plot([Panel("up", [(steps, [0, 0, 1, 2, 3])]), Panel("down", [(steps, [3, 3, 2, 1, 0])])], blocks=True)
    lines = text.splitlines()
    assert lines[2].startswith("up")
    assert lines[2].endswith("0 to 3")
    assert lines[6].endswith("3 to 0")
    assert bars(text, 6)[:3] == [" ", " ", "▁"]
    assert bars(text, 6 + 55)[:3] == ["█", "█", "█"]
    assert bars(text, 6)[4:7] == ["█", "█", "█"]


def test_powers_of_ten_stand_below_their_columns():
    text = plot([Panel("a", [([1, 1000], [0.0, 1.0])])], width=61, blocks=False)
    axis = text.splitlines()[-1]
    assert [axis.index(label) - 3 for label in ("step 1", "10 ", "100 ", "1000")] == [0, 20, 40, 60]


def test_values_stand_where_the_logarithm_of_the_step_puts_them():
    # 0, then 8 from step 100 on: halfway in the logarithm it is at half its height
    text = plot([Panel("a", [([1, 100], [0.0, 7.0])])], width=3, height=1, blocks=True)
    assert text.splitlines()[0][3:6] == "▁▄█" or text.splitlines()[0][3:6] == "▁▅█"


def test_what_hardly_changes_looks_like_it():
    flat = plot([Panel("a", [([1, 10], [0.0, 1e-6])], least=0.1)], blocks=True)
    assert "█" not in flat
    assert "█" in plot([Panel("a", [([1, 10], [0.0, 1e-6])])], blocks=True)


def test_several_runs_are_averaged_with_their_spread():
    text = plot([Panel("a", [([1, 2], [0.0, 1.0]), ([1, 2], [0.0, 3.0])])], blocks=False)
    assert "0 ± 0 to 2 ± 1.4" in text
    assert text.isascii() is False  # the sign ± alone
    assert text.replace("±", "+").isascii()


def test_numbers_that_are_not_finite_are_left_out():
    text = plot([Panel("a", [([1, 2, 3], [1.0, math.nan, 2.0])]), Panel("b", [([1, 2], [math.inf, math.nan])])])
    assert "1 to 2" in text
    assert "b" not in text
    assert plot([]) == "(nothing to plot)"


def test_one_measurement_is_a_plot():
    assert "5 to 5" in plot([Panel("a", [([0], [5.0])])])
