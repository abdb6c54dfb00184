"""Seeds on disk and in memory."""

import ast
import importlib
import sys
from pathlib import Path

import numpy
import pytest
import torch

import featlearn_papers
from featlearn.errors import FeatlearnError, InputTypeError, InputValueError
from featlearn_papers.frame.registry import load
from featlearn_papers.frame.runs import Runs, key, save, saved
from featlearn_papers.frame.seed_source import FORMER_CODE, _FormerCode, _text, source_text
from papers.tests import made_up


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


@pytest.mark.parametrize(
    ("numbers", "error", "words"),
    [
        ({"_a": 1.0}, InputValueError, "'_a' is float64, expected numbers"),
        ({"a": "word"}, InputValueError, "'a' is .*, expected numbers"),
        ({"a": [None]}, InputValueError, "'a' is object, expected numbers"),
        ({"a": [[1], [1, 2]]}, InputTypeError, "'a' cannot be made an array, .* equally long"),
        ({"a": [torch.ones(1, requires_grad=True)]}, InputTypeError, "'a' cannot be made an array"),
        ([1.0], InputTypeError, "measure returned list, expected a dictionary"),
        (None, InputTypeError, "measure returned NoneType"),
    ],
)
def test_only_numbers_are_saved(tmp_path, numbers, error, words):
    with pytest.raises(error, match=words):
        save(tmp_path / "seed-0.npz", numbers, 0.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), numpy.float32(1), torch.ones(2), {1, 2}, Path("here")])
def test_a_set_up_that_json_cannot_hold_is_refused(value):
    with pytest.raises(InputTypeError, match=r"count in the set-up of 000/fig1 is .*JSON"):
        key("000/fig1", made_up.Setup(count=value), made_up.measure)


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


FILES = {
    "figure": "from featlearn_papers.paper_900.near import half\n\ndef measure(setup, context):\n    return half(1)\n",
    "near": '"""Words."""\nfrom featlearn_papers.paper_900 import far\n\ndef half(x):\n    return far.other(x)\n',
    "far": "def other(x):\n    from .late import SIZE\n    return x / SIZE\n",
    "late": "import featlearn_papers.paper_900.near\nimport featlearn_papers.paper_900.last as last\nSIZE = 2\n",
    "last": "ONE = 1\n",
    "apart": "TWO = 2\n",
}


@pytest.mark.parametrize(
    ("name", "old", "new", "same"),
    [
        ("near", "far.other(x)", "far.other(2 * x)", False),
        ("near", "Words.", "Other words.", True),
        ("near", "return far", "# a remark\n    return far", True),
        ("far", "x / SIZE", "x", False),
        ("late", "SIZE = 2", "SIZE = 3", False),
        ("last", "ONE = 1", "ONE = 2", False),
        ("apart", "TWO = 2", "TWO = 3", True),
        ("figure", "near import half", "near import other as half", False),
    ],
)
def test_the_key_knows_what_shared_modules_import(tmp_path, monkeypatch, name, old, new, same):
    """As a name, as a submodule, inside a function, relative, in a circle."""
    folder = tmp_path / "paper_900"
    folder.mkdir()
    for one, text in {"__init__": "", **FILES}.items():
        (folder / f"{one}.py").write_text(text)
    monkeypatch.setattr(featlearn_papers, "__path__", [*featlearn_papers.__path__, str(tmp_path)])
    try:
        measure = importlib.import_module("featlearn_papers.paper_900.figure").measure
        first = key("900/fig1", made_up.Setup(), measure)
        (folder / f"{name}.py").write_text(FILES[name].replace(old, new))
        assert FILES[name].replace(old, new) != FILES[name]
        assert (key("900/fig1", made_up.Setup(), measure) == first) is same
    finally:
        for one in [one for one in sys.modules if one.startswith("featlearn_papers.paper_900")]:
            del sys.modules[one]
        vars(featlearn_papers).pop("paper_900", None)


def test_a_figure_depends_on_modules_that_it_reaches_through_others():
    """Measuring 002/figJ2 takes `residual` from whitened.py, and that `two_classes` from silence.py."""
    (experiment,) = load("002/figJ2").experiments.values()
    found = source_text(experiment.measure)
    assert "alias(name='first')" not in found.partition("Module(")[0]  # what only the claims take from silence.py
    assert "FunctionDef(name='two_classes'" in found


def test_runs_stack_over_seeds():
    runs = Runs([0, 1], [{"a": numpy.zeros(3), "b": numpy.zeros(1)}, {"a": numpy.ones(3), "b": numpy.zeros(2)}])
    assert runs["a"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert [b.shape for b in runs.each("b")] == [(1,), (2,)]
    with pytest.raises(FeatlearnError, match="each"):
        runs["b"]
    with pytest.raises(FeatlearnError, match="expected one of a, b"):
        runs["c"]


def former(source: str) -> str:
    tree = _FormerCode(FORMER_CODE).visit(ast.parse(source))
    return _text(tree)


def test_data_sets_that_moved_to_the_papers_keep_their_former_names():
    assert former("from featlearn_papers.data.svhn import svhn") == former("from featlearn.data.svhn import svhn")
    moved = 'from featlearn_papers import data\ndef f(text: "data.Text"):\n    return data.shakespeare(text)'
    assert former(moved) == former('def f(text: "fl.data.Text"):\n    return fl.data.shakespeare(text)')
    assert former("from featlearn_papers import novelty") != former("")
