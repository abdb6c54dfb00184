"""The comparison with the peers runs, and all kernels agree; peers that are not installed are named."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def printed(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--small", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kernels_of_two_libraries_agree():
    shown = printed("--workloads", "W1-each", "--methods", "featlearn", "torch_func", "neural_tangents_1")
    assert shown.count("equal") == 2
    assert "neural_tangents_1  not run: --jax-python names no interpreter" in shown


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--repeats", "0"], "expected at least 1"),
        (["--python", "/no/such/python"], "/no/such/python is no interpreter"),
        (["--workloads", "W9"], "unknown workloads W9"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], word: str):
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_every_workload_agrees_with_every_peer_that_is_installed():
    shown = printed()
    assert shown.count("featlearn ") >= 8
    assert "DIFFERS" not in shown
