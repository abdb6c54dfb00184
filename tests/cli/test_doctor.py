"""What `featlearn doctor` finds, and what it says is missing."""

import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import featlearn as fl
from featlearn.cli.app import main
from featlearn.cli.doctor import EXTRAS, FILES, NEEDED, absent_files
from tests.cli.test_runs import answer


def touch(*places: str) -> None:
    """Empty files below data."""
    for place in places:
        path = Path("data", place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_doctor_finds_versions_and_data(capsys: pytest.CaptureFixture[str]):
    touch(
        "mnist/train-images-idx3-ubyte.gz",
        "mnist/train-labels-idx1-ubyte",
        "MNIST/raw/t10k-images-idx3-ubyte",
        "t10k-labels.idx1-ubyte",
    )
    found = answer(["doctor", "--data-root", "data"], capsys)
    assert found["versions"]["torch"] == torch.__version__
    assert found["missing"] == []
    assert found["data"]["mnist"] is True
    assert found["data"]["cifar10"] is False
    assert found["data_missing"]["mnist"] == []
    assert any(device.startswith("cpu") for device in found["devices"])


def test_doctor_says_what_is_missing_and_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("featlearn.cli.doctor._version", lambda name: None)
    monkeypatch.delenv("FEATLEARN_DATA", raising=False)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "missing: pip install torch" in said
    assert "pip install 'featlearn[xarray]'" in said
    (accelerate,) = [line for line in said.splitlines() if line.startswith("accelerate")]
    assert "pip install 'featlearn[transformers]', for the Trainer" in accelerate
    assert "FEATLEARN_DATA" in said


def test_data_with_missing_files_are_not_found(capsys: pytest.CaptureFixture[str]):
    touch(*(f"cifar-10-batches-bin/data_batch_{n}.bin" for n in (1, 2, 4)))
    assert main(["doctor", "--data-root", "data"]) == 0
    said = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines() if line}
    assert said["cifar10"] == "incomplete: no data_batch_3, data_batch_5, test_batch"
    assert said["mnist"] == "not found"
    found = answer(["doctor", "--data-root", "data"], capsys)
    assert found["data"]["cifar10"] is False
    assert found["data_missing"]["cifar10"] == ["data_batch_3", "data_batch_5", "test_batch"]


LOADERS: dict[str, Callable[..., object]] = {name: getattr(fl.data, name) for name in FILES}


@pytest.mark.parametrize("name", FILES)
def test_a_file_counts_as_found_just_where_its_loader_looks(name: str):
    usual = {file: places[0] for file, places in FILES[name].items()}
    for file, places in FILES[name].items():
        for place in places:
            shutil.rmtree("data", ignore_errors=True)
            touch(*(usual | {file: place}).values())
            assert absent_files(Path("data"), name) == []
            for split in ("train", "test"):
                with pytest.raises(fl.FeatlearnError) as caught:  # the files are empty
                    LOADERS[name]("data", split=split)
                assert "there is no" not in str(caught.value)
            Path("data", place).unlink()
            assert absent_files(Path("data"), name) == [file]


def test_all_packages_of_the_project_are_looked_for():
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    assert {named(line) for line in project["dependencies"]} == {*NEEDED}
    extras = {
        extra: lines
        for extra, lines in project["optional-dependencies"].items()
        if extra not in ("all", "test", "dev", "docs", "release")
    }
    assert {(named(line), extra) for extra, lines in extras.items() for line in lines} == {
        (package, extra) for package, (extra, _) in EXTRAS.items()
    }


def named(requirement: str) -> str:
    return requirement.partition(">")[0].partition("=")[0].strip()
