"""Seeds on disk and in memory."""

import importlib
import sys

import numpy
import pytest
import torch

from featlearn.errors import FeatlearnError
from featlearn.papers.runs import Runs, key, save, saved
from tests.papers import made_up


def test_what_is_saved_comes_back(tmp_path):
    place = tmp_path / "deep" / "seed-0.npz"
    numbers = {
        "a/b": torch.eye(2, dtype=torch.float64),
        "c": [[1, 2], [3, 4]],
        "d": 0.25,
        "e": torch.ones(1).requires_grad_(),
    }
    save(place, numbers, 1.5)
    found = saved(place)
    assert Runs([0], [found]).seconds == [1.5]
    assert (found["a/b"] == numpy.eye(2)).all()
    assert found["c"].tolist() == numbers["c"]
    assert found["d"] == 0.25
    assert [path.name for path in place.parent.iterdir()] == [place.name]


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_damaged_file_counts_as_none(tmp_path, keep):
    place = tmp_path / "seed-0.npz"
    save(place, {"a": numpy.arange(100.0)}, 0.0)
    place.write_bytes(place.read_bytes()[:keep])
    assert saved(place) is None
    assert saved(tmp_path / "nothing.npz") is None


@pytest.mark.parametrize("numbers", [{"_a": 1.0}, {"a": "word"}, {"a": [None]}, {"a": [[1], [1, 2]]}])
def test_only_numbers_are_saved(tmp_path, numbers):
    with pytest.raises(ValueError, match=r"expected numbers|inhomogeneous"):
        save(tmp_path / "seed-0.npz", numbers, 0.0)
    assert list(tmp_path.iterdir()) == []


def test_the_key_knows_set_up_and_surroundings():
    keys = [
        key("000/fig1", setup, made_up.measure, device=device)
        for setup in (made_up.Setup(), made_up.Setup(count=6))
        for device in ("cpu", "cuda")
    ]
    assert len({*keys, key("000/fig2", made_up.Setup(), made_up.measure, device="cpu")}) == 5
    assert keys[0] == key("000/fig1", made_up.Setup(), made_up.measure, device="cpu")


FIGURE = """
SIZE = 2

def half(x):
    "Words."
    return x / SIZE

def measure(setup, context):
    return {"a": half(1)}  # a remark

def plot(setup, runs):
    return runs
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("a remark", "another", True),
        ("Words.", "Other words.", True),
        ("return runs", "return 2", True),
        ("SIZE = 2", "SIZE = 3", False),
        ("x / SIZE", "x / 2 / SIZE", False),
        ("half(1)", "half(2)", False),
    ],
)
def test_the_key_knows_the_source_behind_the_numbers(tmp_path, monkeypatch, old, new, same):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "one_figure", raising=False)
    file = tmp_path / "one_figure.py"
    file.write_text(FIGURE)
    measure = importlib.import_module("one_figure").measure
    first = key("000/fig1", made_up.Setup(), measure)
    file.write_text(FIGURE.replace(old, new))
    assert (key("000/fig1", made_up.Setup(), measure) == first) is same


def test_runs_stack_over_seeds():
    runs = Runs([0, 1], [{"a": numpy.zeros(3), "b": numpy.zeros(1)}, {"a": numpy.ones(3), "b": numpy.zeros(2)}])
    assert runs["a"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert [b.shape for b in runs.each("b")] == [(1,), (2,)]
    with pytest.raises(FeatlearnError, match="each"):
        runs["b"]
    with pytest.raises(FeatlearnError, match="expected one of a, b"):
        runs["c"]
