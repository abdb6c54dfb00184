"""The table of coverage, with few draws."""

import pytest

from benchmarks import sketch_coverage


def test_entries_are_held_and_the_mean_has_no_bias(capsys: pytest.CaptureFixture[str]):
    found = sketch_coverage.main(["--draws", "6", "--k", "64", "--repeats", "4"])
    assert len(found) == 8
    for held, diagonal, relative, bias in found:
        assert held > 0.85
        assert diagonal > 0.7
        assert 0.5 < relative < 2.5
        assert bias < 25  # of six draws, the largest of hundreds of entries
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 10
    assert said[2].startswith("| MLP, three outputs | 37 | float64 | 4 | ")
