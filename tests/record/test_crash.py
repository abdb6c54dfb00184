"""Processes that are killed, disks that fill up, folders that cannot be written: what was recorded stays."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy
import pytest

from featlearn.errors import InputValueError, RunError
from featlearn.record import RunWriter, open_run

# Started once, for an interpreter takes longer to start than the writer lives. Each child goes on with the run until it
# is killed, and says through a pipe which measurement it has finished.
KILLED = """
import os, random, select, signal, sys, time
import numpy
from featlearn.record import RunWriter, open_run

def values(step):
    return {f"layer.{i}/x": step + i / 7 for i in range(step % 50)} | {"loss": 1 / (step + 1)}

def kernel(step):
    return numpy.random.default_rng(step).normal(size=(60 + step % 3, 61))

def write(path, pipe):
    run = RunWriter(path, {"seed": 3}, resume=True)
    for step in range(run.last_step + 1, 10**6):
        run.array("kernel", step, K=kernel(step))
        run.scalars(step, values(step), seconds=step / 3)
        run.event("measured", step, note="x" * (step % 5000))
        run.describe(last=step)
        os.write(pipe, b"%d\\n" % step)

def check(path, finished, before):
    run = open_run(path)
    assert run.config["seed"] == 3, run.config
    done = [line["step"] for line in run.lines]
    last = max([before, *finished])
    assert done == list(range(len(done))) and len(done) - 1 in (last, last + 1), (done[-3:], last)
    for line in run.lines:
        assert line["values"] == values(line["step"]) and line["seconds"] == line["step"] / 3, line
    noted = {event["step"]: event["note"] for event in run.events}
    assert finished <= noted.keys() <= set(done), finished ^ noted.keys()
    assert all(note == "x" * (step % 5000) for step, note in noted.items())
    assert run.config.get("last", -1) >= max(finished, default=-1)
    for step in run.arrays.get("kernel", []):
        numpy.testing.assert_array_equal(run.array("kernel", step)["K"], kernel(step), strict=True)
    assert set(done) <= set(run.arrays.get("kernel", [])) <= {*done, len(done)}
    return len(done) - 1

path, kills = sys.argv[1], int(sys.argv[2])
finished, before = set(), -1
for kill in range(kills):
    reader, pipe = os.pipe()
    child = os.fork()
    if not child:
        try:
            write(path, pipe)
        finally:
            os._exit(1)
    os.close(pipe)
    if kill < 3:
        time.sleep(random.uniform(0, 0.004))  # while it begins
    else:
        select.select([reader], [], [], 60)
        time.sleep(random.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    with open(reader, "rb") as said:
        finished |= set(map(int, said.read().split()))
    if os.path.exists(os.path.join(path, "run.json")):
        before = check(path, finished, before)
assert RunWriter(path, {}, resume=True).last_step == before
check(path, finished, before)
parts = [name for _, _, names in os.walk(path) for name in names if name.endswith(".npz.part")]
assert not parts, parts
print(len(finished))
"""

# A limit on the size of files does what a full disk does: part of a line is written, then nothing more.
FULL = """
import resource, sys
from featlearn.errors import RunError
from featlearn.record import RunWriter, open_run

path, limit = sys.argv[1], int(sys.argv[2])
run = RunWriter(path, {"seed": 3})
run.scalars(0, {"loss": 0.5})
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
written, refused = 0, 0
for step in range(1, 40):
    try:
        run.scalars(step, {"loss": step})
        written = step
    except RunError as error:
        assert "cannot be written" in str(error), error
        refused += 1
    assert [line["step"] for line in open_run(path).lines] == list(range(written + 1))
try:
    run.array("kernel", 0, K=[0.0] * 1000)
except RunError:
    refused += 100
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
run.scalars(50, {"loss": 50})  # room again
run.close()
assert [line["step"] for line in open_run(path).lines] == [*range(written + 1), 50]
assert open_run(path).arrays == {}
print(written, refused)
"""


def script(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_twenty_kills_lose_at_most_the_measurement_in_progress(tmp_path: Path):
    assert int(script(KILLED, tmp_path / "a", 20)) >= 16


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on files")
@pytest.mark.parametrize("limit", [100, 137, 500])
def test_a_disk_that_fills_up_and_empties_again(tmp_path: Path, limit: int):
    written, refused = map(int, script(FULL, tmp_path / "a", limit).split())
    assert refused == 100 + 39 - written
    assert written < 39


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    run = RunWriter(tmp_path / "a", {"seed": 3})
    for step in (0, 5):
        run.scalars(step, {"loss": step / 3})
        run.event("measured", step)
    run.array("kernel", 5, K=numpy.eye(2))
    return tmp_path / "a"


@pytest.mark.parametrize("name", ["scalars.jsonl", "events.jsonl"])
def test_a_line_may_be_cut_off_anywhere(begun: Path, name: str):
    whole = (begun / name).read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(len(whole) + 1):
        (begun / name).write_bytes(whole[:cut])
        kept = (cut >= first) + (cut == len(whole))
        read = open_run(begun)
        assert len({"scalars.jsonl": read.lines, "events.jsonl": read.events}[name]) == kept
        run = RunWriter(begun, {}, resume=True)
        if name == "scalars.jsonl":
            assert run.last_step == (-1, 0, 5)[kept]
            run.scalars(7, {"loss": 1.0})
            assert [line["step"] for line in open_run(begun).lines] == [*[0, 5][:kept], 7]
        else:
            run.event("resumed", 7)
            assert [event["step"] for event in open_run(begun).events] == [*[0, 5][:kept], 7]


@pytest.mark.parametrize("packed", [False, True])
def test_a_finished_run_that_lost_lines_is_refused(begun: Path, packed: bool):
    whole = (begun / "scalars.jsonl").read_bytes()

    def lines(cut: int) -> list[int]:
        (begun / "scalars.jsonl").write_bytes(whole[:cut])
        if not packed:
            return [line["step"] for line in open_run(begun).lines]
        target = open_run(begun).pack()
        try:
            return [line["step"] for line in open_run(target).lines]
        finally:
            target.unlink()

    run = RunWriter(begun, {}, resume=True)
    run.describe(finished=True, steps=5, measurements=2)
    assert lines(len(whole)) == [0, 5]
    for cut in range(len(whole)):
        with pytest.raises(RunError, match=r"scalars\.jsonl is damaged: the run is finished, but it"):
            lines(cut)
    run.describe(finished=False)
    assert lines(len(whole) - 1) == [0]
    run.describe(finished=True)
    run.event("not_written", 5)  # the run says so itself
    assert lines(len(whole) - 1) == [0]


def test_a_finished_run_that_does_not_say_what_it_holds_is_read(begun: Path):
    """As older runs, and those that others write."""
    run = RunWriter(begun, {}, resume=True)
    for count in (None, "many", True, -3):
        run.describe(finished=True, measurements=count)
        assert len(open_run(begun).lines) == 2
    run.event("finished", 9, last_line="far")
    assert len(open_run(begun).lines) == 2
    run.event("finished", 9, last_line=9)
    with pytest.raises(RunError, match="end at step 5, expected step 9"):
        _ = open_run(begun).lines


def test_files_that_were_not_whole_do_not_count(begun: Path):
    folder = begun / "arrays/kernel"
    (folder / "000000000006.npz.part").write_bytes(b"half")
    (begun / "run.json.part").write_bytes(b"{")
    (folder / "x.npz.part").mkdir()  # a name, not a part
    assert open_run(begun).arrays == {"kernel": [5]}
    run = RunWriter(begun, {}, resume=True)
    assert sorted(p.name for p in folder.iterdir()) == ["000000000005.npz", "x.npz.part"]
    run.describe(x=1)
    assert not (begun / "run.json.part").exists()


def test_a_run_killed_as_it_began_can_be_resumed_and_begun_anew(tmp_path: Path):
    for resume in (False, True):
        path = tmp_path / str(resume)
        path.mkdir()
        (path / "run.json.part").write_bytes(b'{"sch')
        assert RunWriter(path, {"seed": 4}, resume=resume).last_step == -1
        assert open_run(path).config["seed"] == 4


def test_of_repeated_steps_the_last_counts_quantity_by_quantity(begun: Path):
    run = RunWriter(begun, {"seed": 9}, resume=True)
    assert run.last_step == 5
    run.scalars(3, {"loss": 7.0}, seconds=1.0)
    run.scalars(5, {"accuracy": 0.5}, seconds=2.0)
    run.scalars(5, {"loss": 8.0}, seconds=3.0)
    run.array("kernel", 5, K=numpy.zeros(1))
    found = open_run(begun)
    assert found.config["seed"] == 3
    assert found.lines == [
        {"step": 0, "seconds": None, "values": {"loss": 0.0}},
        {"step": 3, "seconds": 1.0, "values": {"loss": 7.0}},
        {"step": 5, "seconds": 3.0, "values": {"loss": 8.0, "accuracy": 0.5}},
    ]
    assert found.array("kernel", 5)["K"].tolist() == [0.0]


def test_an_existing_run_is_refused_untouched(begun: Path):
    before = {p: p.read_bytes() for p in begun.rglob("*") if p.is_file()}
    with pytest.raises(RunError, match="resume=True"):
        RunWriter(begun, {})
    assert {p: p.read_bytes() for p in begun.rglob("*") if p.is_file()} == before


def test_other_folders_and_files_are_refused(tmp_path: Path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes").write_text("precious")
    for resume in (False, True):
        for path in (tmp_path / "file", tmp_path / "file/inside"):
            with pytest.raises(RunError, match="cannot be written"):
                RunWriter(path, {}, resume=resume)
        with pytest.raises(RunError, match="other files"):
            RunWriter(tmp_path / "folder", {}, resume=resume)
        with pytest.raises(InputValueError, match=r"without \.zip"):
            RunWriter(tmp_path / "a.zip", {}, resume=resume)
    assert [p.read_text() for p in (tmp_path / "file", tmp_path / "folder/notes")] == ["precious", "precious"]


def test_a_damaged_run_is_not_resumed(begun: Path):
    with (begun / "scalars.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "val\n{"step": 7, "values": {}}\n')
    with pytest.raises(RunError, match=r"scalars\.jsonl, line 3"):
        RunWriter(begun, {}, resume=True)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(begun: Path):
    run = RunWriter(begun, {}, resume=True)
    folders = (begun / "arrays/kernel", begun / "arrays", begun)
    for folder in folders:
        folder.chmod(0o555)
    try:
        for attempt in (
            lambda: run.describe(x=1),
            lambda: run.array("kernel", 9, x=1),
            lambda: run.array("new/name", 1, x=1),
            lambda: RunWriter(begun / "inside", {}),
        ):
            with pytest.raises(RunError, match="cannot be written"):
                attempt()
    finally:
        for folder in folders:
            folder.chmod(0o755)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_file_that_cannot_be_put_in_place_leaves_the_run_as_it_was(
    begun: Path, code: int, monkeypatch: pytest.MonkeyPatch
):
    run = RunWriter(begun, {}, resume=True)

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        for attempt in (lambda: run.array("kernel", 5, K=[1]), lambda: run.describe(seed=4)):
            with pytest.raises(RunError, match=os.strerror(code)):
                attempt()
        with pytest.raises(RunError, match=os.strerror(code)):
            RunWriter(begun.parent / "b", {})
        with pytest.raises(RunError, match=os.strerror(code)):
            open_run(begun).pack()
    assert not [*begun.parent.rglob("*.part"), *begun.parent.glob("*.zip")]
    assert open_run(begun).array("kernel", 5)["K"].tolist() == [[1, 0], [0, 1]]
    assert open_run(begun).config["seed"] == 3
    run.describe(lr=0.1)
    assert (open_run(begun).config["seed"], open_run(begun).config["lr"]) == (3, 0.1)
    RunWriter(begun.parent / "b", {})


def test_a_directory_that_goes_away_is_an_error(begun: Path):
    run = RunWriter(begun, {}, resume=True)
    opened = open_run(begun)
    assert opened.arrays == {"kernel": [5]}
    shutil.rmtree(begun)
    for attempt in (lambda: run.scalars(9, {"loss": 1}), lambda: run.event("x"), lambda: run.array("kernel", 9, K=1)):
        with pytest.raises(RunError, match="cannot be written"):
            attempt()
    with pytest.raises(RunError, match="was removed"):
        opened.array("kernel", 5)
    run.close()


def test_a_file_of_lines_does_not_outgrow_the_reader(begun: Path, monkeypatch: pytest.MonkeyPatch):
    from featlearn.record import reader, writer

    for module in (reader, writer):
        monkeypatch.setattr(module, "LARGEST_TEXT", 400)
    run = RunWriter(begun, {}, resume=True)
    written = 5
    with suppress(RunError):
        for step in range(10, 50):
            run.scalars(step, {"loss": 1.0})
            written = step
    assert 5 < written < 49
    with pytest.raises(RunError, match="larger than 400"):
        run.scalars(60, {"loss": 1.0})
    assert open_run(begun).lines[-1]["step"] == written


def test_reading_while_it_is_written(begun: Path):
    stop = threading.Event()

    def write() -> None:
        run = RunWriter(begun, {}, resume=True)
        for step in range(6, 100_000):
            run.array("kernel", step, K=numpy.full(1000, step))
            run.scalars(step, {f"x{i}": step for i in range(400)})
            run.event("measured", step)
            run.describe(last=step)
            if stop.is_set():
                return

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = 0
        while seen < 60:
            run = open_run(begun)
            steps = [line["step"] for line in run.lines]
            assert steps == [0, *range(5, steps[-1] + 1)]
            assert all(len(line["values"]) == 400 for line in run.lines[2:])
            assert len(run.events) >= len(steps) - 1
            assert run.array("kernel", steps[-1])["K"][-1].max() in (1, steps[-1])
            assert steps[-1] >= seen
            seen = steps[-1]
        packed = open_run(open_run(begun).pack())
        assert packed.lines[-1]["step"] >= seen
    finally:
        stop.set()
        thread.join()
