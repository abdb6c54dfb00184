"""What is written is what is read, from a directory and from an archive, and in what is exported."""

import contextlib
import csv
import io
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featlearn.errors import FeatlearnError, InputTypeError, InputValueError, RunError
from featlearn.record import Run, RunWriter, layout, open_run

CONFIG = {
    "name": "Größe λ 学習",
    "lr": 0.1,
    "path": Path("a/b"),
    "lost": "\udcff",
    "nested": {"seeds": [1, 2], "none": None},
}
ARRAYS = {
    "kernel": numpy.random.default_rng(0).normal(size=(37, 41)).astype("f4"),
    "scalar": numpy.array(-math.inf),
    "empty": numpy.zeros((0, 3), dtype="i2"),
    "truth": numpy.array([True, False]),
    "complex": numpy.array([1 + 2j, complex(math.nan, 1)]),
    "half": numpy.linspace(-1, 1, 5).astype("f2"),
    "fortran": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    "strided": numpy.arange(20)[::3],
    "large": numpy.arange(700_001, dtype="u8"),
}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    run = RunWriter(tmp_path / "a.b", CONFIG)
    run.scalars(0, {"loss": 0.1, "ntk/alignment": math.nan}, seconds=0.25)
    run.scalars(7, {"loss": math.inf, "features/layers.0/uncentered": -1e-310})
    run.array("kernel/train", 0, **ARRAYS)
    run.array("kernel/train", 7, kernel=numpy.eye(3))
    run.array("spectrum", 7, name=[1, 2], step=3.5, self=numpy.float32(1), file=[0])
    run.event("diverged", 7, values=numpy.array([1.5, math.nan]), count=numpy.int64(3), where={1})
    run.event("end")
    run.describe(seconds=12.5)
    run.close()
    return tmp_path / "a.b"


def assert_as_recorded(run: Run) -> None:
    assert {key: run.config[key] for key in ("name", "lr", "lost", "nested", "seconds", "path", "schema")} == {
        **CONFIG,
        "path": str(Path("a/b")),
        "seconds": 12.5,
        "schema": 1,
    }
    assert run.name == CONFIG["name"]
    assert run.names == ["features/layers.0/uncentered", "loss", "ntk/alignment"]
    steps, values = run.scalar("loss")
    assert steps.tolist() == [0, 7]
    assert values.tolist() == [0.1, math.inf]
    assert math.isnan(run.scalar("ntk/alignment")[1][0])
    assert run.curves()["features/layers.0/uncentered"] == ([7.0], [-1e-310])
    assert [line["seconds"] for line in run.lines] == [0.25, None]
    assert run.arrays == {"kernel/train": [0, 7], "spectrum": [7]}
    found = run.array("kernel/train", 0)
    assert list(found) == list(ARRAYS)
    for key, array in ARRAYS.items():
        assert found[key].dtype == array.dtype
        assert found[key].flags.writeable
        numpy.testing.assert_array_equal(found[key], array, strict=True)
    small = run.array("spectrum", 7)
    assert {key: small[key].tolist() for key in small} == {"name": [1, 2], "step": 3.5, "self": 1.0, "file": [0]}
    diverged, end = run.events
    assert (diverged["kind"], diverged["step"], diverged["count"], diverged["where"]) == ("diverged", 7, 3, "{1}")
    assert diverged["values"][0] == 1.5
    assert (end["kind"], end["step"]) == ("end", None)
    assert "a.b" in repr(run)


def test_a_directory_reads_as_written(recorded: Path):
    assert_as_recorded(open_run(recorded))


def test_an_archive_reads_as_the_directory(recorded: Path):
    packed = open_run(recorded).pack()
    assert packed == recorded.with_name("a.b.zip")
    assert_as_recorded(open_run(packed))
    for part in ("config", "lines", "events", "arrays"):
        assert repr(getattr(open_run(packed), part)) == repr(getattr(open_run(recorded), part))  # nan is not itself
    assert sorted(p.name for p in recorded.parent.iterdir()) == ["a.b", "a.b.zip"]


def test_arrays_are_what_numpy_loads(recorded: Path):
    with numpy.load(recorded / "arrays/kernel/train/000000000000.npz", allow_pickle=False) as found:
        assert sorted(found) == sorted(ARRAYS)
        numpy.testing.assert_array_equal(found["large"], ARRAYS["large"], strict=True)


def test_lines_are_json_and_hold_no_foreign_letters(recorded: Path):
    content = b"".join((recorded / name).read_bytes() for name in ("run.json", "scalars.jsonl", "events.jsonl"))
    assert content.isascii()
    assert json.loads((recorded / "scalars.jsonl").read_bytes().splitlines()[1])["step"] == 7


@settings(max_examples=50, deadline=None)
@given(st.floats() | st.floats(width=32), st.integers(0, layout.LAST_STEP))
def test_every_number_comes_back_bit_for_bit(value: float, step: int):
    with tempfile.TemporaryDirectory() as folder:
        RunWriter(f"{folder}/a", {}).scalars(step, {"x": value}, seconds=value)
        (line,) = open_run(f"{folder}/a").lines
    assert repr(line) == repr({"step": step, "seconds": value, "values": {"x": value}})


def test_big_endian_numbers_become_native(recorded: Path):
    with contextlib.closing(RunWriter(recorded, {}, resume=True)) as run:
        run.array("foreign", 1, x=numpy.array([1.5, -2.0], dtype=">f8"))
    found = open_run(recorded).array("foreign", 1)["x"]
    assert found.dtype.isnative
    assert found.tolist() == [1.5, -2.0]


def test_a_compressed_npz_is_read_too(recorded: Path):
    numpy.savez_compressed(recorded / "arrays/spectrum/000000000009.npz", values=numpy.zeros(10_000))
    assert open_run(recorded).array("spectrum", 9)["values"].shape == (10_000,)


def test_a_run_without_a_line_is_a_run(tmp_path: Path):
    RunWriter(tmp_path / "a", {}).close()
    for run in (open_run(tmp_path / "a"), open_run(open_run(tmp_path / "a").pack())):
        assert (run.lines, run.names, run.events, run.arrays, run.curves(), run.name) == ([], [], [], {}, {}, "a")


def test_what_is_not_there_is_named(recorded: Path):
    run = open_run(recorded)
    with pytest.raises(InputValueError, match=r"'accuracy'.*loss, ntk/alignment"):
        run.scalar("accuracy")
    with pytest.raises(InputValueError, match=r"expected steps \[0, 7\]"):
        run.array("kernel/train", 3)
    with pytest.raises(InputValueError, match="expected kernel/train, spectrum"):
        run.array("kernel", 0)
    with pytest.raises(InputValueError, match=r"did you mean 'spectrum'\?$"):
        run.array("spectrun", 7)
    with pytest.raises(RunError, match="does not exist"):
        open_run(recorded / "nowhere")
    with pytest.raises(RunError, match=r"run\.json"):
        open_run(recorded / "arrays")


def test_a_packed_run_is_not_overwritten_nor_packed_again(recorded: Path):
    packed = open_run(recorded).pack(recorded.parent / "b.zip")
    with pytest.raises(RunError, match="exists already"):
        open_run(recorded).pack(packed)
    with pytest.raises(RunError, match="packed already"):
        open_run(packed).pack()


def test_a_constant_run_that_shrinks_a_lot_can_be_packed_and_opened(tmp_path: Path):
    run = RunWriter(tmp_path / "a", {})
    run.array("kernel", 0, K=numpy.zeros((2000, 1500)))
    line = b'{"step": 5, "seconds": null, "values": {%s}}\n' % b", ".join(b'"q%d": NaN' % i for i in range(10_000))
    (tmp_path / "a/scalars.jsonl").write_bytes(line * 80)
    packed = open_run(open_run(tmp_path / "a").pack())
    assert len(packed.names) == 10_000
    assert not packed.array("kernel", 0)["K"].any()


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/../b",
        "/a",
        "a/",
        "a//b",
        ".hidden",
        "a.",
        "=1+1",
        "-1",
        "+1",
        "@x",
        "a b",
        "a\n",
        "a\\b",
        "é",
        "C:x",
        "a" * 201,
        None,
        3,
        "a,b",
        '"',
        "a\0",
    ],
)
def test_names_that_cannot_be_paths_everywhere_are_refused(tmp_path: Path, name: str):
    run = RunWriter(tmp_path / "a", {})
    with pytest.raises(InputValueError, match="cannot be recorded"):
        run.scalars(0, {name: 1.0})
    with pytest.raises(InputValueError, match="cannot be recorded"):
        run.array(name, 0, x=1)
    with pytest.raises(InputValueError, match="cannot be recorded"):
        run.array("x", 0, **{name if isinstance(name, str) else "": 1})
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    "name", ["a", "_", "0", "a" * 200, "ntk/alignment", "layers.0.mlp.fc-1=x@y+z", "x.npz", "x.npz.part", "1.part"]
)
def test_names_that_can_be_paths_are_kept(tmp_path: Path, name: str):
    run = RunWriter(tmp_path / "a", {})
    run.scalars(0, {name: 1.0})
    run.array(name, 0, **{name: 2})
    RunWriter(tmp_path / "a", {}, resume=True)
    found = open_run(tmp_path / "a")
    assert (found.names, found.array(name, 0)[name]) == ([name], 2)


@pytest.mark.parametrize("name", ["step", "seconds"])
def test_scalars_do_not_take_the_names_of_the_axes(tmp_path: Path, name: str):
    with pytest.raises(InputValueError, match="choose another name"):
        RunWriter(tmp_path / "a", {}).scalars(0, {name: 1.0})


@pytest.mark.parametrize("step", [-1, 10**12, True, 1.0, "1", None, 10**30])
def test_steps_that_are_no_steps_are_refused(tmp_path: Path, step: int):
    run = RunWriter(tmp_path / "a", {})
    with pytest.raises(FeatlearnError, match="step"):
        run.scalars(step, {"x": 1.0})
    with pytest.raises(FeatlearnError, match="step"):
        run.array("x", step, x=1)


def test_steps_of_numpy_are_steps(tmp_path: Path):
    run = RunWriter(tmp_path / "a", {})
    run.scalars(numpy.int64(3), {"x": numpy.float32(0.5)})
    run.array("x", numpy.int64(layout.LAST_STEP), x=1)
    assert open_run(tmp_path / "a").curves() == {"x": ([3.0], [0.5])}
    assert open_run(tmp_path / "a").arrays == {"x": [layout.LAST_STEP]}


@pytest.mark.parametrize("value", [None, "loss", 1j, [1.0, 2.0], 10**400, object()])
def test_what_is_no_number_is_refused(tmp_path: Path, value: float):
    run = RunWriter(tmp_path / "a", {})
    with pytest.raises(InputTypeError, match="loss is"):
        run.scalars(0, {"loss": value})
    assert open_run(tmp_path / "a").lines == []


@pytest.mark.parametrize(
    "array",
    [
        object(),
        [object()],
        ["text"],
        [b"text"],
        [[1], [1, 2]],
        numpy.array("2020", dtype="M8[Y]"),
        numpy.zeros(2, dtype="i4,f8"),
    ],
)
def test_arrays_of_other_things_are_refused(tmp_path: Path, array: object):
    with pytest.raises(InputTypeError, match="array 'x'"):
        RunWriter(tmp_path / "a", {}).array("k", 0, x=array)


def test_arrays_larger_than_the_reader_takes_are_not_written(tmp_path: Path):
    run = RunWriter(tmp_path / "a", {})
    with pytest.raises(InputValueError, match="under several names"):
        run.array("k", 0, K=numpy.broadcast_to(0.0, (2**15, 2**14)))  # takes no room
    with pytest.raises(InputValueError, match="10001 arrays"):
        run.array("k", 0, **{f"k{i}": 0 for i in range(layout.MOST_ARRAYS + 1)})
    assert open_run(tmp_path / "a").arrays == {}


@pytest.mark.parametrize("entry", [{("a", 1): 2}, {"schema": 3}])
def test_a_configuration_that_cannot_be_kept_is_refused(tmp_path: Path, entry: dict[str, object]):
    circle: list[object] = []
    circle.append(circle)
    for config in (entry, {"circle": circle}):
        with pytest.raises(InputValueError):
            RunWriter(tmp_path / "a", config)
    RunWriter(tmp_path / "a", {"kind": "fine"})  # nothing is left in the way


def test_a_later_description_keeps_the_earlier(tmp_path: Path):
    run = RunWriter(tmp_path / "a", {"lr": 0.1, "created": "once"})
    run.describe(lr=0.2, self="x")
    RunWriter(tmp_path / "a", {"ignored": 1}, resume=True).describe(seed=3)
    assert open_run(tmp_path / "a").config == {"lr": 0.2, "created": "once", "self": "x", "seed": 3, "schema": 1}
    with pytest.raises(InputValueError, match="schema"):
        run.describe(schema=2)


def test_a_name_that_would_disturb_a_terminal_is_not_shown(tmp_path: Path):
    for name in ("\x1b[2J", "", 3, "x" * 1000, "\ud800"):
        RunWriter(tmp_path / "a", {}, resume=True).describe(name=name)
        assert open_run(tmp_path / "a").name == "a"


def test_the_table_holds_every_number(recorded: Path):
    with contextlib.closing(RunWriter(recorded, {}, resume=True)) as run:
        run.scalars(9, {"a.b=c@d+e": -0.1}, seconds=3)
    rows = list(csv.reader(io.StringIO(open_run(recorded).to_csv(recorded.parent / "a.csv").read_text())))
    assert rows == [
        ["step", "seconds", "a.b=c@d+e", "features/layers.0/uncentered", "loss", "ntk/alignment"],
        ["0", "0.25", "", "", "0.1", "nan"],
        ["7", "", "", "-1e-310", "inf", ""],
        ["9", "3.0", "-0.1", "", "", ""],
    ]
    with pytest.raises(RunError, match="table cannot be written"):
        open_run(recorded).to_csv(recorded)


def test_the_dataset_holds_every_number(recorded: Path):
    pytest.importorskip("xarray", reason="xarray is an optional extra")
    found = open_run(recorded).to_xarray()
    assert dict(found.sizes) == {"step": 2}
    assert float(found["loss"].sel(step=0)) == 0.1
    assert math.isinf(float(found["loss"].sel(step=7)))
    assert math.isnan(float(found["ntk/alignment"].sel(step=7)))
    assert float(found["seconds"].sel(step=0)) == 0.25
    RunWriter(recorded.parent / "empty", {})
    assert dict(open_run(recorded.parent / "empty").to_xarray().sizes) == {"step": 0}


def test_a_missing_xarray_is_named(recorded: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(FeatlearnError, match=r"pip install 'featlearn\[xarray\]'"):
        open_run(recorded).to_xarray()


def test_reading_a_run_loads_no_torch(recorded: Path):
    code = "import sys, featlearn.record as r; r.open_run(sys.argv[1]).lines; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(recorded)]).returncode == 0


@pytest.mark.parametrize(
    ("config", "samples"),
    [
        ({"probe": {"samples": 130}}, (130, 130)),
        ({"probe": {"samples": 130, "measured": 33}}, (130, 33)),
        ({"probe": {"samples": 128, "measured": 200}}, (128, 128)),
        ({"probe": {"samples": "many"}}, None),
        ({"probe": None}, None),
        ({"probe": {"samples": 5, "measured": -2}}, (5, 5)),
        ({}, None),
    ],
)
def test_a_run_says_how_many_samples_the_probe_had_and_how_many_are_measured(
    config: dict[str, Any], samples: tuple[int, int] | None, tmp_path: Path
):
    RunWriter(tmp_path / "run", config).close()
    assert open_run(tmp_path / "run").probe_samples == samples
