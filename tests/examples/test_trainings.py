"""The trainings of examples/ in their short form, each as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import featlearn as fl

FOLDER = Path(__file__).parents[2] / "examples" / "trainings"
ALONE = ("resnet_cifar10", "gpt_shakespeare", "grokking", "gpt2")


def start(script: str, folder: Path, *options: str) -> str:
    command = [sys.executable, str(FOLDER / f"{script}.py"), "--smoke", "--out", str(folder / script), *options]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def judged(folder: Path, script: str, said: str) -> None:
    run = fl.open_run(folder / script)
    found = fl.diagnose(run)
    assert said.count(f"{script}: ") == 1  # the verdict, under the name of the run
    assert found.regime in ("rich", "lazy", "mixed", "lazy then rich", "cannot tell")
    assert len(run.scalar("gap/probe")[0]) >= 2
    assert (folder / script / "report.html").stat().st_size > 50_000


@pytest.mark.parametrize("script", ALONE)
def test_a_training_runs_and_is_judged(script: str, tmp_path: Path) -> None:
    if script == "gpt2":
        pytest.importorskip("transformers")
    judged(tmp_path, script, start(script, tmp_path))


def test_low_rank_updates_start_from_the_transformer_that_was_trained(tmp_path: Path) -> None:
    judged(tmp_path, "vit_cifar10", start("vit_cifar10", tmp_path))
    said = start("lora_svhn", tmp_path, "--weights", str(tmp_path / "vit_cifar10.pt"))
    judged(tmp_path, "lora_svhn", said)
    # 2 blocks x 4 layers x rank 8 x (16 + 16) and a readout of 16 x 10 + 10
    assert "2,218 of " in said


def test_every_training_is_tested() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py") if "= arguments(__doc__" in path.read_text()}
    assert scripts == {*ALONE, "vit_cifar10", "lora_svhn"}
