"""The mathematics of the page equals the Python theory: at least 200 vectors, to 1e-6, in node."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from featlearn.theory import deep_linear
from tests.explorer.vectors import random_numbers, table_1, typical_start, vectors, whitened_task

NODE = shutil.which("node")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vectors") / "vectors.json"
    normals = [{"seed": seed, "numbers": random_numbers(seed, 40)} for seed in (0, 1, 17)]
    path.write_text(json.dumps({"vectors": vectors(), "table": table_1(), "normals": normals}, allow_nan=False))
    return path


def test_there_are_vectors_for_every_theory(written: Path):
    found = json.loads(written.read_text())["vectors"]
    assert len(found) >= 200
    assert {one["call"][0] for one in found} == {"deepLinear", "latent", "ofe", "transfer", "early", "relu"}


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_no_place_of_the_sliders_breaks_a_topic():
    done = subprocess.run(
        [str(NODE), "--test", str(HERE / "topics.test.mjs")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_page_agrees_with_the_theory_in_node(written: Path):
    done = subprocess.run(
        [str(NODE), "--test", "--test-reporter=tap", str(HERE / "theory.test.mjs")],
        env={"VECTORS": str(written), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, "\n".join(
        line for line in done.stdout.splitlines() if "not ok" in line or "is " in line
    )
    assert int(re.search(r"^# pass (\d+)$", done.stdout, re.MULTILINE)[1]) > 200


@pytest.mark.parametrize("s", [[1.0], [1.0, 0.5]])
def test_the_typical_start_is_the_limit_of_small_weights_of_the_flow(s: list[float]):
    """`typicalPath` for several modes has no function of its own in Python: here it is, against the integrated flow."""
    D, N, sigma = 6, 14, 1e-3
    X, Y = whitened_task(D, s)
    eye = torch.eye(N, dtype=torch.float64)
    W0, A0 = sigma * (N / D) ** 0.5 * eye[:, :D], sigma * eye[D : D + len(s)]
    times = torch.linspace(0, 20, 21, dtype=torch.float64)
    flow = deep_linear.flow([W0, A0], X, Y, times=times, rate=1 / D)
    q0 = deep_linear.initial_statistics(sigma, D, N).mean_q0
    q, r = deep_linear.two_layer(times[:, None], q0, 0.0, torch.tensor(s))
    across = sigma**2 * N / D + sigma**2 + (q - q0).sum(1) / len(s)
    inside = across[:, None] + q - q0
    norm = D * (inside.square().sum(1) + (D - len(s)) * across.square()).sqrt()
    torch.testing.assert_close(flow.strength, r, rtol=0, atol=1e-5)
    torch.testing.assert_close(flow.kernel_norm, norm, rtol=1e-4, atol=0)
    if len(s) == 1:
        path = typical_start(sigma, D, N, times)
        torch.testing.assert_close(path.kernel_norm, norm, rtol=1e-9, atol=0)
