"""The code that the page offers draws what the page draws: it is run, for several states of every topic."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy
import pytest

NODE = shutil.which("node")
HERE = Path(__file__).parent

STATES: dict[str, list[dict[str, Any]]] = {
    "rich": [{}, {"share": 3.0, "flips": 5}, {"share": 0.02, "flips": 12}],
    "silent": [
        {},
        {"modes": 3, "gap": 0.7, "sigma": 0.2},
        {"layers": 3, "sigma": 0.1},
        {"layers": 4, "modes": 2, "sigma": 0.5},
        {"sigma": 1.0},
        {"start": "balanced", "modes": 2},
    ],
    "mechanism": [{}, {"zeta": 0.99, "normU": 15.0, "target": -1.5, "rateW": 0.02}, {"zeta": 1.0, "steps": 300}],
    "growth": [{}, {"samples": 6, "size": 0.2, "ratio": 3.0, "perClass": 2, "noise": 0.7}],
    "features": [
        {},
        {"hidden": "1", "activation": "quadratic", "width": 10, "decay": 2.3},
        {"activation": "quadratic"},
        {"hidden": "1", "decay": 0.0},
    ],
    "transfer": [{}, {"noise": 0.3, "ridge": 0.0, "overlap": 0.2}, {"dimension": 20, "spike": 0.0, "samples": 40}],
}


def drawn() -> list[dict[str, Any]]:
    if NODE is None:
        return []
    asked = [{"topic": topic, "set": each} for topic, states in STATES.items() for each in states]
    done = subprocess.run(
        [NODE, str(HERE / "curves.mjs")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.fixture(autouse=True)
def _without_windows() -> Iterator[None]:
    with matplotlib.rc_context({"backend": "agg"}):
        yield
        plt.close("all")


def difference(curves: dict[str, Any], given: dict[str, Any]) -> float:
    """Largest difference of two sets of curves, relative to the largest value of each; the same names are needed."""
    assert set(curves) == set(given)
    worst = 0.0
    for name, (x, y) in curves.items():
        for ours, theirs in ((x, given[name]["x"]), (y, given[name]["y"])):
            left = numpy.array([float(v) for v in ours])
            right = numpy.array([numpy.inf if v is None else v for v in theirs])
            assert left.shape == right.shape, name
            finite = numpy.isfinite(left)
            assert (finite == numpy.isfinite(right)).all(), name
            worst = max(worst, float(abs(left[finite] - right[finite]).max() / abs(left[finite]).max()))
    return worst


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("page", [pytest.param(one, id=f"{one['topic']}-{i}") for i, one in enumerate(drawn())])
def test_the_code_draws_what_the_page_draws(page: dict[str, Any]):
    plt.close("all")
    namespace: dict[str, Any] = {}
    exec(compile(page["python"], f"{page['topic']}.py", "exec"), namespace)
    assert difference(namespace["curves"], page["curves"]) < 1e-6
    assert len(plt.get_fignums()) == len(page["curves"])


def test_other_curves_are_noticed():
    curves, given = {"a": ([0.0, 1.0], [1.0, 2.0])}, {"a": {"x": [0, 1], "y": [1, 2.001]}}
    assert difference(curves, given) > 1e-4
    with pytest.raises(AssertionError):
        difference(curves, given | {"b": given["a"]})
