"""Gauges: where values, thresholds and error bars are drawn, and what they say in words."""

import math
import re
from pathlib import Path

import pytest

from featlearn.diagnosis import diagnose
from featlearn.diagnosis.evidence import GAP, TURNED
from featlearn.reporting.gauges import Gauge, Marker, Scale, gauge, gauges, unknown_numbers, with_error
from tests.reporting.runs import by_hand

UNIT = Scale(0.0, 1.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
DECADES = Scale(1e-3, 1.0, (1e-3, 1e-2, 1.0), True)


def made(value: float, error: float = math.nan) -> Gauge:
    return Gauge("Gap", "what it is", UNIT, [Marker("", value, error)], GAP, ("lazy", "between", "rich"))


def places(html: str, kind: str) -> list[float]:
    """Horizontal places of the lines of a class, as shares of the scale."""
    found = re.findall(rf'<line x1="([\d.]+)%" x2="([\d.]+)%" [^>]*class="{kind}"', html)
    return [(float(end) - 4) / 92 for pair in found for end in pair]


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (0.70298, 0.00642, "0.7030 ± 0.0064"),
        (0.0977, 0.0110, "0.098 ± 0.011"),
        (3.7269, 0.0514, "3.727 ± 0.051"),
        (123.4, 19.6, "123 ± 20"),
        (0.5, math.nan, "0.5"),
        (0.25, 0.0, "0.25"),
        (math.nan, 0.1, "–"),
    ],
)
def test_values_are_written_to_the_digits_that_their_error_leaves(value: float, error: float, words: str):
    assert with_error(value, error) == words


def test_scales_are_linear_or_logarithmic_and_end():
    assert [UNIT.share(v) for v in (-1.0, 0.25, 2.0)] == [0.0, 0.25, 1.0]
    assert [DECADES.share(v) for v in (1e-3, 1e-2, 0.1, 7.0)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [DECADES.outside(v) for v in (1e-4, 0.5, 1.1)] == [-1, 0, 1]
    assert DECADES.share(0.0) == 0.0


@pytest.mark.parametrize(
    ("value", "error", "zone"),
    [
        (0.1, 0.01, "lazy"),
        (0.1, 0.06, "between"),
        (0.5, 0.04, "rich"),
        (0.5, 0.13, "between"),
        (0.5, math.nan, "rich"),
        (0.2, 0.001, "between"),
    ],
)
def test_a_zone_is_told_only_where_the_whole_bar_lies_in_it(value: float, error: float, zone: str):
    assert made(value, error).verdict == zone


def test_two_zones_know_no_between():
    one = Gauge("Growth", "", DECADES, [Marker("", 0.11, 0.05)], TURNED._replace(low=0.1), ("kept", "grew"))
    assert one.verdict == "cannot tell"


def test_the_drawing_has_thresholds_ticks_and_two_standard_errors():
    html = gauge(made(0.7, 0.05))
    assert places(html, "limit") == pytest.approx([GAP.low, GAP.low, GAP.high, GAP.high], abs=1e-3)
    assert places(html, "error") == pytest.approx([0.6, 0.8, 0.6, 0.6, 0.8, 0.8], abs=1e-3)
    labels = re.findall(r'<text [^>]*class="(\w+)">([^<]+)', html)
    assert {text for kind, text in labels if kind == "limit"} == {"0.15", "0.25"}
    assert {text for kind, text in labels if kind == "tick"} == {"0", "0.4", "0.6", "0.8", "1"}
    assert "0.700 ± 0.050" in html
    assert "(rich)" not in html  # brackets are of the style
    assert "lazy below 0.15, rich above 0.25" in html


def test_a_value_without_error_has_no_bar_and_one_outside_an_arrow():
    inside, outside = gauge(made(0.7)), gauge(made(1.7, 0.01))
    assert places(inside, "error") == []
    needle = re.compile(r'<path d="([^"]+)" class="needle"')
    assert needle.search(inside)[1] != needle.search(outside)[1]
    assert re.search(r'<svg x="96.00%"', outside)


def test_several_values_are_told_apart_by_shape():
    markers = [Marker("last", 0.2, 0.01), Marker("first", 0.3, shape="ring"), Marker("net", 0.1, shape="diamond")]
    html = gauge(Gauge("Test error", "share", UNIT, markers))
    for shape in ("needle", "ring", "diamond"):
        assert len(re.findall(f'class="{shape}"', html)) == 2  # in the drawing and in its key
    assert "last 0.200 ± 0.010" in html
    assert places(html, "limit") == []


def test_gauges_use_the_words_of_the_evidence(tmp_path: Path):
    """A kernel that rotated is not called rich: settling BatchNorm averages rotate one, too."""
    run = by_hand(
        tmp_path / "run", {"probe/loss": [1.0, 0.5, 0.2], "ntk/centered_distance": [0.0, 0.1, 0.5]}, [0, 5, 9]
    )
    found = diagnose(run)
    said = next(item for item in found.evidence if "rotated by" in item.says)
    shown = next(one for one in gauges(found) if one.title == "Rotation of the kernel")
    assert said.verdict == shown.zones[-1] == "rotated"
    assert any(found.gap.reason in line for line in unknown_numbers(found))
