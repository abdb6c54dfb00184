"""A run is replaced by a new one, and nothing else ever is."""

import os
from pathlib import Path

import pytest

from featlearn.errors import RunError
from featlearn.record import RunWriter, open_run
from featlearn.record.replacement import refuse_unless_run, replaced


def recorded(path: Path, name: str = "old") -> Path:
    writer = RunWriter(path, {"name": name})
    writer.array("kernel/part", 3, mean=[1.0, 2.0])
    writer.scalars(3, {"loss": 1.0})
    writer.event("started", 0)
    writer.close()
    return path


def everything(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


def test_a_run_is_replaced(tmp_path: Path):
    path = recorded(tmp_path / "run")
    (path / "report.html").write_text("ours")
    (path / "tensorboard").mkdir()
    (path / "tensorboard" / "events.out.tfevents.1.host").write_text("ours")
    (path / "arrays" / "kernel" / "000000000004.npz.part").write_text("cut off")
    with replaced(path):
        RunWriter(path, {"name": "new"})
    assert open_run(path).name == "new"
    assert sorted(everything(tmp_path)) == ["run/run.json"], "the old one is gone, also beside"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_whose_successor_cannot_begin_is_put_back(tmp_path: Path, error: type[BaseException]):
    path = recorded(tmp_path / "run")
    before = everything(tmp_path)

    def begin() -> None:
        with replaced(path):
            RunWriter(path, {"name": "new"})
            raise error

    with pytest.raises(error):
        begin()
    assert everything(tmp_path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_nothing_and_an_empty_directory_are_fine(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "run.json.part").write_text("{")
    for name in ("none", "empty", "killed"):
        with replaced(tmp_path / name):
            RunWriter(tmp_path / name, {"name": "new"})
        assert open_run(tmp_path / name).name == "new"


@pytest.mark.parametrize("place", ["mine.txt", "arrays/kernel/mine.npz", "weights/step1.pt", "tensorboard/mine.txt"])
def test_a_run_with_other_files_in_it_is_refused(tmp_path: Path, place: str):
    path = recorded(tmp_path / "run")
    (path / place).parent.mkdir(parents=True, exist_ok=True)
    (path / place).write_text("precious")
    before = everything(tmp_path)
    with pytest.raises(RunError, match=rf"'{place.rpartition('/')[0] if 'weights' in place else place}'"):
        refuse_unless_run(path)
    assert everything(tmp_path) == before


def test_what_is_no_run_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("precious")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"name": "another program wrote this"}')
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    for name in ("file", "folder", "other", "dangling"):
        with pytest.raises(RunError, match=r"expected a run"):
            refuse_unless_run(tmp_path / name)


def test_links_in_a_run_are_refused(tmp_path: Path):
    path = recorded(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", path / "tensorboard")
    with pytest.raises(RunError, match="'tensorboard'"):
        refuse_unless_run(path)


def test_a_run_behind_a_link_is_replaced_where_it_lies(tmp_path: Path):
    recorded(tmp_path / "run")
    os.symlink(tmp_path / "run", tmp_path / "link")
    with replaced(tmp_path / "link"):
        RunWriter(tmp_path / "link", {"name": "new"})
    assert open_run(tmp_path / "run").name == "new"
    assert (tmp_path / "link").is_symlink()
