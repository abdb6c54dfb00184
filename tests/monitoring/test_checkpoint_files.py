"""Which files are checkpoints, and of which step."""

import os
from pathlib import Path
from typing import Any

import pytest

from featlearn.errors import CheckpointError, FeatlearnError, InputTypeError, InputValueError
from featlearn.monitoring.checkpoint_files import Checkpoint, listed_checkpoints, step_in


def touched(folder: Path, *places: str) -> Path:
    for place in places:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step100.pt", 100),
        ("step_0100.pth", 100),
        ("100.bin", 100),
        ("model-7.safetensors", 7),
        ("epoch=3-step=1200.ckpt", 1200),
        ("resnet18_step10.pt", 10),
        ("step10_v2.pt", 10),
        ("global_step1000", 1000),
        ("checkpoint-500", 500),
        ("Ckpt 3", 3),
        ("iteration_12", 12),
        ("steps20", 20),
        ("epoch3.pt", 3),
        ("step5-seed5.pt", 5),
    ],
)
def test_steps_are_read_from_names(tmp_path: Path, name: str, step: int):
    if "." in name:
        touched(tmp_path, name)
    assert step_in(tmp_path / name) == step


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("final.pt", "no number"),
        ("gpt2-100.pt", "the numbers 2, 100"),
        ("2024-05-01.pt", "the numbers 1, 5, 2024"),
        ("step10k.pt", "no plain number"),
        ("step1e3.pt", "the numbers 1, 3"),
        ("step1.5.pt", "the numbers 1, 5"),
        ("step3-step4.pt", "the numbers 3, 4"),
    ],
)
def test_a_name_without_one_clear_step_is_refused_and_a_list_shown(tmp_path: Path, name: str, said: str):
    touched(tmp_path, name, "step0.pt")
    with pytest.raises(CheckpointError, match=said) as error:
        listed_checkpoints(tmp_path, own_format=False)
    assert name in str(error.value)
    assert '[(0, "first.pt"), (100, "later.pt")]' in str(error.value)


def steps(found: list[Checkpoint]) -> dict[int, str]:
    return {one.step: one.name for one in found}


def test_a_folder_of_files_is_sorted_by_step(tmp_path: Path):
    touched(tmp_path, "step10.pt", "step9.pth", "step0.safetensors", "log.txt", ".step3.pt", "config1.json", "logs/a1")
    assert list(steps(listed_checkpoints(str(tmp_path), own_format=False))) == [0, 9, 10]


def test_the_folder_of_a_hugging_face_trainer(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    touched(
        tmp_path,
        "step0.pt",
        "checkpoint-5/model.safetensors",
        "checkpoint-5/optimizer.pt",
        "checkpoint-10/pytorch_model.bin",
        "checkpoint-20/model.safetensors.index.json",
        "runs/events.1",
        "step30/pytorch_model.bin.index.json",
        "config.json",
        "training_args.bin",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
    )
    found = steps(listed_checkpoints(tmp_path, own_format=False))
    assert found == {0: "step0.pt", 5: "checkpoint-5", 10: "checkpoint-10", 20: "checkpoint-20", 30: "step30"}
    assert "left out" in (said := capfd.readouterr().err)
    assert "model.safetensors" in said


def test_a_folder_named_as_a_checkpoint_without_weights_is_refused(tmp_path: Path):
    touched(tmp_path, "checkpoint-0/model.safetensors", "checkpoint-5/optimizer.pt")
    with pytest.raises(CheckpointError, match=r"checkpoint-5 is named as a checkpoint and holds none of"):
        listed_checkpoints(tmp_path, own_format=False)


def test_with_a_function_of_ones_own_everything_with_a_number_counts(tmp_path: Path):
    touched(tmp_path, "step0.npz", "step7.npz", "notes.txt", "step9/data.bin")
    assert list(steps(listed_checkpoints(tmp_path, own_format=True))) == [0, 7, 9]


def test_a_list_says_its_steps(tmp_path: Path):
    touched(tmp_path, "a.pt", "b/model.safetensors")
    found = listed_checkpoints([(5, str(tmp_path / "b")), (0, tmp_path / "a.pt"), (7, {"w": 1})], own_format=False)
    assert steps(found) == {0: "a.pt", 5: "b", 7: "a state dict"}


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (3, InputTypeError, "checkpoints is int, expected a folder"),
        ({0: "a.pt"}, InputTypeError, "checkpoints is dict"),
        (["a.pt"], InputTypeError, r"expected pairs \(step, path\)"),
        ([(0, 3)], InputTypeError, "step 0 is int, expected a path or a state dict"),
        ([("a", "a.pt")], InputTypeError, "step is 'a'"),
        ([(-1, "a.pt")], InputValueError, "step is -1"),
        ([(0, "nowhere.pt")], CheckpointError, r"step 0 \(nowhere.pt\) is not there"),
        ([], InputValueError, "there is no checkpoint, expected one of step 0"),
        ([(0, {}), (0, {})], InputValueError, "are both of step 0"),
        ([(10, {}), (20, {})], InputValueError, "the first checkpoint is of step 10, expected one of step 0"),
        ("nowhere", CheckpointError, "nowhere is not a folder"),
    ],
)
def test_what_is_no_list_of_checkpoints_is_refused(given: Any, kind: type[Exception], said: str):
    with pytest.raises(kind, match=said):
        listed_checkpoints(given, own_format=False)


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path):
    touched(tmp_path, "log.txt")
    with pytest.raises(CheckpointError, match=r"holds no checkpoints, expected files \*.pt"):
        listed_checkpoints(tmp_path, own_format=False)
    with pytest.raises(FeatlearnError, match="is not a folder"):
        listed_checkpoints(tmp_path / "log.txt", own_format=False)


def test_two_files_of_one_step_are_refused(tmp_path: Path):
    touched(tmp_path, "step0.pt", "step1.pt", "step01.safetensors")
    with pytest.raises(InputValueError, match=r"step01.safetensors and step1.pt are both of step 1"):
        listed_checkpoints(tmp_path, own_format=False)


def test_a_mark_changes_with_the_weights_and_not_with_what_lies_beside(tmp_path: Path):
    touched(tmp_path, "checkpoint-1/model.safetensors", "checkpoint-1/optimizer.pt", "step1.pt")
    folder, file = Checkpoint(1, tmp_path / "checkpoint-1"), Checkpoint(1, str(tmp_path / "step1.pt"))
    before = folder.mark, file.mark
    (tmp_path / "checkpoint-1" / "optimizer.pt").unlink()
    os.rename(tmp_path / "step1.pt", tmp_path / "renamed1.pt")
    assert (folder.mark, Checkpoint(1, tmp_path / "renamed1.pt").mark) == before
    touched(tmp_path, "checkpoint-1/model.safetensors")
    os.utime(tmp_path / "renamed1.pt", (0, 0))
    assert folder.mark != before[0]
    assert Checkpoint(1, tmp_path / "renamed1.pt").mark != before[1]
    assert Checkpoint(1, "revision").mark is None
