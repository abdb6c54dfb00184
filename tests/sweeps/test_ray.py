"""The adapter of the page on many runs, against Ray's own local mode."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import featlearn as fl

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

POINT = """
def point(a, seed):
    if a == 3 and seed == 1:
        raise ValueError("broken point")
    return {"value": a * 10.0 + seed}
"""


class RayExecutor:
    def submit(self, function: Any, *args: Any) -> Any:
        return ray.remote(function).remote(*args).future()


def test_a_sweep_runs_on_ray_and_keeps_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "points_for_ray.py"
    file.write_text(POINT)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    path = ":".join([str(tmp_path), *filter(None, sys.path)])
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    try:
        sweep = fl.sweep(module.point, {"a": [1, 2, 3]}, out=tmp_path / "sweep", seeds=2, executor=RayExecutor())
    finally:
        ray.shutdown()
    assert [row["value"] for row in sweep.rows] == [10.0, 11.0, 20.0, 21.0, 30.0, None]
    assert "broken point" in sweep.rows[-1]["error"]
