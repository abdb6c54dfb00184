"""Runs that every test of the command line can look at."""

import contextlib
import io
import os
from pathlib import Path

import pytest

from featlearn.cli.app import main

SMALL = ["--samples", "24", "--test", "8", "--width", "8", "--steps", "12", "--quiet"]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two small runs, seed-0 and seed-1, and the report on both."""
    out = tmp_path_factory.mktemp("cli") / "two"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["diagnose", *SMALL, "--seeds", "2", "--out", str(out)]) == 0
    return out


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command writes by default goes to a folder of the test."""
    monkeypatch.chdir(tmp_path)
    for name in ("FEATLEARN_DEBUG", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert os.getcwd() == str(tmp_path)
