"""Runs from strangers: damaged or malicious ones give a `RunError`, quickly, and nothing in them is executed."""

import io
import json
import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featlearn.errors import RunError
from featlearn.record import RunWriter, files, layout, open_run

GOOD = b'{"step": 3, "seconds": 1.5, "values": {"loss": 0.5}}\n'
STEP = "000000000003.npz"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    written = RunWriter(tmp_path / "a", {"seed": 3})
    written.scalars(3, {"loss": 0.5}, seconds=1.5)
    written.event("end", 3)
    written.array("kernel", 3, K=numpy.eye(3))
    return tmp_path / "a"


def everything(path: Path) -> None:
    """All that can be read of a run."""
    found = open_run(path)
    assert isinstance(found.name, str)
    found.to_csv(path.parent / "a.csv")
    found.curves()
    assert isinstance(found.events, list)
    for name, steps in found.arrays.items():
        for step in steps:
            found.array(name, step)


@contextmanager
def refused(match: str | None = None, most: int = 2**25, seconds: float = 10.0) -> Iterator[None]:
    """A RunError, after little time and memory."""
    tracemalloc.start()
    begun = time.perf_counter()
    try:
        with pytest.raises(RunError, match=match):
            yield
        assert time.perf_counter() - begun < seconds
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def archive_of(run: Path, target: Path, **replaced: bytes) -> Path:
    """The run as an archive, with other contents by place (dots as __)."""
    places = {"run.json": b'{"schema": 1}', "scalars.jsonl": GOOD}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for place, content in {**places, **{p.replace("__", "."): c for p, c in replaced.items()}}.items():
            archive.writestr(place, content)
    return target


# Text


NOT_JSON = {
    "empty line": b"\n",
    "garbage": bytes(range(256)) + b"\n",
    "zeros": b"\0" * 100_000 + b"\n",
    "not UTF-8": b'{"step": 3, "values": {"\xff": 1}}\n',
    "UTF-16": GOOD.decode().encode("utf-16"),
    "UTF-8 with a mark": b"\xef\xbb\xbf" + GOOD,
    "lists in lists": b"[" * 1_000_000 + b"\n",
    "objects in objects": b'{"a":' * 1_000_000 + b"\n",
    "lists in lists, closed": b'{"step": 3, "values": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "a number without end": b'{"step": ' + b"9" * 1_000_000 + b', "values": {}}\n',
    "code": b'__import__("os").system("false")\n',
    "a list": b"[1, 2]\n",
    "a number": b"3\n",
    "two on a line": GOOD.strip() + GOOD,
}
NO_MEASUREMENT = {
    "nothing": {},
    "no values": {"step": 3},
    "no step": {"values": {}},
    "step of text": {"step": "3", "values": {}},
    "step with a fraction": {"step": 3.0, "values": {}},
    "step that is true": {"step": True, "values": {}},
    "negative step": {"step": -1, "values": {}},
    "huge step": {"step": 10**12, "values": {}},
    "giant step": {"step": 10**4000, "values": {}},
    "step nan": {"step": float("nan"), "values": {}},
    "values in a list": {"step": 3, "values": [1.0]},
    "value of text": {"step": 3, "values": {"x": "0.5"}},
    "value that is true": {"step": 3, "values": {"x": True}},
    "value null": {"step": 3, "values": {"x": None}},
    "value nested": {"step": 3, "values": {"x": {"y": 1}}},
    "giant value": {"step": 3, "values": {"x": 10**400}},
    "formula": {"step": 3, "values": {"=HYPERLINK(0)": 1}},
    "name with a tab": {"step": 3, "values": {"\tx": 1}},
    "name with markup": {"step": 3, "values": {"<script>": 1}},
    "name that climbs": {"step": 3, "values": {"../x": 1}},
    "name without end": {"step": 3, "values": {"x" * 100_000: 1}},
    "name of an axis": {"step": 3, "values": {"seconds": 1}},
    "formula for seconds": {"step": 3, "seconds": "=1+1", "values": {}},
}


@pytest.mark.parametrize("line", NOT_JSON.values(), ids=NOT_JSON)
@pytest.mark.parametrize("name", ["run.json", "scalars.jsonl", "events.jsonl"])
def test_what_is_no_object_is_refused(run: Path, name: str, line: bytes):
    (run / name).write_bytes(line)
    with refused(name.replace(".", r"\.")):
        everything(run)


@pytest.mark.parametrize("entry", NO_MEASUREMENT.values(), ids=NO_MEASUREMENT)
def test_what_is_no_measurement_is_refused(run: Path, entry: dict[str, object]):
    (run / "scalars.jsonl").write_bytes(GOOD + json.dumps(entry).encode() + b"\n")
    with refused("scalars"):
        everything(run)
    with pytest.raises(RunError):
        RunWriter(run, {}, resume=True)


@pytest.mark.parametrize(
    "entry", [{}, {"kind": 3}, {"kind": "x", "step": "1"}, {"kind": "x", "step": 10**30}, {"kind": "x", "step": -1}]
)
def test_what_is_no_event_is_refused(run: Path, entry: dict[str, object]):
    (run / "events.jsonl").write_bytes(json.dumps(entry).encode() + b"\n")
    with refused("events"):
        everything(run)


def test_of_a_key_given_twice_the_last_counts_and_infinity_is_a_number(run: Path):
    (run / "scalars.jsonl").write_bytes(b'{"step": 1, "step": 2, "values": {"x": 1, "x": -Infinity, "y": 1e999}}\n')
    assert open_run(run).lines == [
        {"step": 2, "seconds": None, "values": {"x": float("-inf"), "y": float("inf")}},
    ]


# Arrays


def npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    text = header.encode("latin1") + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


def npz(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


def header(descr: str = "'<f8'", shape: str = "(3,)", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}"


class _Malice:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (os.environ["FEATLEARN_TEST_TRAP"],)


EIGHT = b"\0" * 8
NO_ARRAY = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 10,
    "huge shape": npy(header(shape="(1000000, 1000000, 1000)")),
    "shape that wraps around": npy(header(shape="(4294967296, 4294967296)")),
    "shape of giant numbers": npy(header(shape=f"({'9' * 4000},)")),
    "negative shape": npy(header(shape="(-1, -1)"), EIGHT),
    "unknown length": npy(header(shape="(-1,)"), EIGHT),
    "shape of text": npy(header(shape="'abc'")),
    "too many axes": npy(header(shape=f"({'1, ' * 100})"), EIGHT),
    "empty and huge": npy(header(shape="(0, 9223372036854775808)")),
    "too short": npy(header(shape="(3,)"), EIGHT),
    "too long": npy(header(shape="(1,)"), EIGHT * 2),
    "objects": npy(header("'|O'", "(1,)"), EIGHT),
    "objects in a record": npy(header("[('a', '|O')]", "(1,)"), EIGHT),
    "records": npy(header("[('a', '<f8')]", "(1,)"), EIGHT),
    "text": npy(header("'<U2'", "(1,)"), EIGHT),
    "text without width": npy(header("'<U0'", "(1000000000000,)")),
    "nothing, often": npy(header("'|V0'", "(1000000000000,)")),
    "dates": npy(header("'<M8[s]'", "(1,)"), EIGHT),
    "unknown numbers": npy(header("'<f7'", "(1,)"), EIGHT),
    "width without end": npy(header(f"'<U{10**9}'", "(1,)"), EIGHT),
    "code in the header": npy("__import__('os').system('false')"),
    "code in the type": npy(header("__import__('os')")),
    "brackets": npy("(" * 9000),
    "minus signs": npy("-" * 9000 + "1"),
    "long header": npy(header() + " " * 60_000, EIGHT * 3),
    "long header, version 2": npy(header() + " " * 1_000_000, EIGHT * 3, version=2),
    "header longer than the file": b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
    "no version": npy(header(), EIGHT * 3, version=9),
    "a pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("content", NO_ARRAY.values(), ids=NO_ARRAY)
def test_what_is_no_array_is_refused(run: Path, content: bytes):
    (run / "arrays/kernel" / STEP).write_bytes(npz(("K.npy", content)))
    with refused("kernel"):
        everything(run)


def test_the_arrays_of_these_tests_would_be_read_were_they_right(run: Path):
    (run / "arrays/kernel" / STEP).write_bytes(
        npz(("K.npy", npy(header(), EIGHT * 3)), ("L", npy(header("'>i2'", "(2, 2)", "True"), EIGHT, 2)))
    )
    found = open_run(run).array("kernel", 3)
    assert found["K"].tolist() == [0.0] * 3
    assert found["L"].shape == (2, 2)


def test_a_pickled_array_is_not_unpickled(run: Path, monkeypatch: pytest.MonkeyPatch):
    trap = run.parent / "trap"
    monkeypatch.setenv("FEATLEARN_TEST_TRAP", str(trap))
    numpy.savez(run / "arrays/kernel" / STEP, K=numpy.array([_Malice()], dtype=object))
    with refused("object"):
        everything(run)
    assert not trap.exists()
    numpy.load(run / "arrays/kernel" / STEP, allow_pickle=True)["K"]
    assert trap.exists()  # the trap works


@pytest.mark.parametrize("content", [b"", b"PK", b"\0" * 1000, pickle.dumps([1]), npy(header(), EIGHT * 3)])
def test_what_is_no_npz_is_refused(run: Path, content: bytes):
    (run / "arrays/kernel" / STEP).write_bytes(content)
    with refused("kernel"):
        everything(run)


@pytest.mark.parametrize("name", ["../../x.npy", "/etc/x.npy", ".npy", "a\\b.npy", "x" * 60_000, "<b>.npy", "é.npy"])
def test_keys_of_arrays_are_checked(run: Path, name: str):
    (run / "arrays/kernel" / STEP).write_bytes(npz((name, npy(header(), EIGHT * 3))))
    with refused("kernel"):
        everything(run)


def test_a_flipped_byte_is_noticed_or_without_effect(run: Path):
    place = run / "arrays/kernel" / STEP
    whole = place.read_bytes()
    for flip in range(len(whole)):
        place.write_bytes(whole[:flip] + bytes([whole[flip] ^ 0x55]) + whole[flip + 1 :])
        with suppress(RunError):
            (array,) = open_run(run).array("kernel", 3).values()
            assert numpy.array_equal(array, numpy.eye(3))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(["run.json", "scalars.jsonl", f"arrays/k/{STEP}", "zip"]))
def test_any_bytes_give_a_run_or_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes, place: str):
    folder = tmp_path_factory.mktemp("x") / "a"
    RunWriter(folder, {})
    target = folder.parent / "b" if place == "zip" else folder / place
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    with suppress(RunError):
        everything(target if place == "zip" else folder)


# Archives


def test_an_archive_that_is_none_is_refused(run: Path):
    whole = open_run(run).pack().read_bytes()
    damaged = run.parent / "b.zip"
    for content in (b"", b"PK\x05\x06", b"\0" * 10_000, whole[:100], whole[:-1], whole[:-30], whole[200:], whole[::-1]):
        damaged.write_bytes(content)
        with refused():
            everything(damaged)


def test_a_flipped_byte_of_an_archive_is_noticed_or_without_effect(run: Path):
    whole = open_run(run).pack().read_bytes()
    damaged = run.parent / "b.zip"
    for place in range(0, len(whole), 5):
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            everything(damaged)
        except RunError:
            continue
        found = open_run(damaged)  # a file may have lost its name
        assert found.config["seed"] == 3
        assert found.lines in ([], open_run(run).lines)


def patched(content: bytes, **fields: int) -> bytes:
    """An archive whose last entry in the directory says something else."""
    at = content.rindex(b"PK\x01\x02")
    offsets = {"flags": (8, "<H"), "method": (10, "<H"), "packed": (20, "<L"), "size": (24, "<L"), "offset": (42, "<L")}
    found = bytearray(content)
    for name, value in fields.items():
        struct.pack_into(offsets[name][1], found, at + offsets[name][0], value)
    return bytes(found)


LIES = {
    "encrypted": {"flags": 1},
    "strongly encrypted": {"flags": 0x41},
    "patched data": {"flags": 0x20},
    "unknown compression": {"method": 97},
    "bzip2": {"method": 12},
    "lzma": {"method": 14},
    "longer": {"size": 1000},
    "shorter": {"size": 3},
    "much longer": {"size": 2**32 - 2},
    "longer than the archive": {"packed": 2**31},
    "elsewhere": {"offset": 2**31},
    "in another file": {"offset": 0},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_archives_that_lie_are_refused(run: Path, lie: dict[str, int]):
    outer = archive_of(run, run.parent / "b.zip", **{f"arrays/k/{STEP}": npz(("K.npy", npy(header(), EIGHT * 3)))})
    outer.write_bytes(patched(outer.read_bytes(), **lie))
    with refused():
        everything(outer)
    inner = npz(("J.npy", npy(header(), EIGHT * 3)), ("K.npy", npy(header(), EIGHT * 3)))
    (run / "arrays/kernel" / STEP).write_bytes(patched(inner, **lie))
    with refused("kernel"):
        everything(run)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_only_deflate_is_read(run: Path, method: int):
    with zipfile.ZipFile(run.parent / "b.zip", "w", method) as archive:
        archive.writestr("run.json", b'{"schema": 1}')
    with refused("unsupported compression"):
        open_run(run.parent / "b.zip")


def deflated(name: str, chunks: Iterator[bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as file:
        for chunk in chunks:
            file.write(chunk)
    return buffer.getvalue()


def test_bombs_are_refused_before_they_unpack(run: Path):
    size = 2**26
    bomb = deflated(
        "K.npy", iter([npy(header(shape=f"({size // 8},)")), *(bytes(2**20) for _ in range(size // 2**20))])
    )
    assert len(bomb) < size // 500
    (run / "arrays/kernel" / STEP).write_bytes(bomb)
    with refused("unpacks to"):
        everything(run)
    twice = archive_of(run, run.parent / "b.zip", **{f"arrays/k/{STEP}": bomb})
    with refused("unpacks to"):
        everything(twice)
    for name in ("run.json", "scalars.jsonl"):
        text = archive_of(run, run.parent / "c.zip", **{name.replace(".", "__"): GOOD * (2**24 // len(GOOD))})
        with refused("unpacks to", most=2**24):
            everything(text)


def test_a_bomb_in_a_bomb_counts_as_what_it_takes_on_disk(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "ALWAYS", 2**16)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("K.npy", bytes(2**20), zipfile.ZIP_DEFLATED)
        archive.writestr("padding.npy", bytes(50_000))  # were each of these bytes worth fifty more, K would be read
    outer = archive_of(run, run.parent / "b.zip", **{f"arrays/k/{STEP}": buffer.getvalue()})
    assert 50 * outer.stat().st_size < 2**20 < 50 * len(buffer.getvalue())
    with refused("unpacks to 1048576"):
        everything(outer)


def test_small_bombs_count_together(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "ALWAYS", 2**16)
    small = npy(header(shape="(5000,)"), bytes(40_000))
    (run / "arrays/kernel" / STEP).write_bytes(npz(("a", small)))
    everything(run)
    (run / "arrays/kernel" / STEP).write_bytes(npz(("a", small), ("b", small)))
    with refused("unpacks to"):
        everything(run)


def crowded(content: bytes, entries: list[bytes]) -> bytes:
    """An archive of one file with other entries in its directory."""
    start = content.index(b"PK\x01\x02")
    table = b"".join(entries)
    count = len(entries) % 2**16
    return content[:start] + table + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(table), start, 0)


def test_many_arrays_that_are_one_are_refused(run: Path):
    one = npz(("K.npy", npy(header(), EIGHT * 3)))
    entry = one[one.index(b"PK\x01\x02") : one.index(b"PK\x05\x06")]
    (run / "arrays/kernel" / STEP).write_bytes(crowded(one, [entry] * (layout.MOST_ARRAYS + 1)))
    with refused("at most 10000"):
        everything(run)


def test_an_archive_of_many_files_is_read(run: Path):
    one = npz(("run.json", b'{"schema": 1}'))
    entry = one[one.index(b"PK\x01\x02") : one.index(b"PK\x05\x06")]
    others = [f"arrays/k/{number:012d}.npz".encode() for number in range(100_000)]
    renamed = [entry[:28] + struct.pack("<H", len(name)) + entry[30:46] + name for name in others]
    (run.parent / "b.zip").write_bytes(crowded(one, [entry, *renamed]))
    begun = time.perf_counter()
    found = open_run(run.parent / "b.zip")
    assert len(found.arrays["k"]) == 100_000
    for number in range(100):
        with pytest.raises(RunError, match="differ"):  # all of them say that they are run.json
            found.array("k", number)
    assert time.perf_counter() - begun < 20


STRANGE = [
    "../x",
    "/x",
    "\\x",
    "C:x",
    f"arrays/../{STEP}",
    f"arrays/../../x/{STEP}",
    f"arrays//{STEP}",
    f"arrays/{STEP}",
    f"arrays/./{STEP}",
    f"arrays/k/../{STEP}",
    f"/arrays/k/{STEP}",
    f"arrays\\k\\{STEP}",
    "arrays/k/3.npz",
    "arrays/k/-00000000003.npz",
    f"arrays/{'k' * 201}/{STEP}",
    f"arrays/{'k/' * 30_000}{STEP}",
    "arrays/k/٠٠٠٠٠٠٠٠٠٠٠٣.npz",
    f"arrays/k/{STEP}/",
    f"x/arrays/k/{STEP}",
    f"arrays/ k/{STEP}",
    f"ARRAYS/k/{STEP}",
    f"arrays/k/{STEP}.part",
    "run.json/",
    "scalars.jsonl.part",
]


@pytest.mark.parametrize("name", STRANGE)
def test_files_with_other_names_are_left_alone(run: Path, name: str):
    place = archive_of(run, run.parent / "b.zip", **{name.replace(".", "__"): b"x"})
    before = sorted(run.parent.rglob("*"))
    found = open_run(place)
    assert (found.arrays, len(found.lines)) == ({}, 1)
    everything(place)
    assert sorted(run.parent.rglob("*")) == sorted([*before, run.parent / "a.csv"])


def test_a_folder_in_an_archive_is_explained(run: Path):
    with zipfile.ZipFile(run.parent / "b.zip", "w") as archive:
        archive.writestr("a/run.json", b'{"schema": 1}')
    with pytest.raises(RunError, match="at its top"):
        open_run(run.parent / "b.zip")


# Directories


@pytest.mark.parametrize(
    "place", ["run.json", "scalars.jsonl", "events.jsonl", f"arrays/kernel/{STEP}", "arrays/kernel", "arrays"]
)
@pytest.mark.parametrize("far", [True, False])
def test_links_are_not_followed(run: Path, place: str, far: bool):
    target = (run.parent / "secret") if far else (run / f"{place}.moved")
    (run / place).rename(target)
    (run / place).symlink_to(target)
    with refused("is a link"):
        everything(run)
    with pytest.raises(RunError, match="is a link"):
        open_run(run).pack()


def test_a_link_that_leads_nowhere_or_to_itself_is_refused(run: Path):
    for target in ("nowhere", "scalars.jsonl", "/dev/zero"):
        (run / "scalars.jsonl").unlink()
        (run / "scalars.jsonl").symlink_to(target)
        with refused("is a link"):
            everything(run)


def test_a_link_to_the_run_itself_is_followed(run: Path):
    (run.parent / "latest").symlink_to(run)
    everything(run.parent / "latest")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_pipes_and_folders_are_not_read(run: Path):
    (run / "scalars.jsonl").unlink()
    os.mkfifo(run / "scalars.jsonl")
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").mkdir()
    found = open_run(run)
    assert (found.lines, found.events) == ([], [])
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")
    with refused("has no run"):
        open_run(run)
    with refused("does not exist"):
        open_run(run / "run.json")


def test_other_files_and_folders_of_arrays_are_left_alone(run: Path):
    for name in (
        "arrays/k/3.npz",
        f"arrays/k/{STEP}.part",
        f"arrays/{STEP}",
        "arrays/k /000000000003.npz",
        "arrays/.git/000000000003.npz",
    ):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(b"x")
    (run / "arrays/x" / STEP).mkdir(parents=True)
    everything(run)
    assert open_run(run).arrays == {"kernel": [3]}
    assert len(zipfile.ZipFile(open_run(run).pack()).namelist()) == 4


def test_folders_without_end_do_not_exhaust_the_reader(run: Path):
    here, depth = os.getcwd(), 1500
    os.chdir(run / "arrays")
    try:
        for _ in range(depth):
            os.mkdir("x")
            os.chdir("x")
        begun = time.perf_counter()
        assert open_run(run).arrays == {"kernel": [3]}
        assert time.perf_counter() - begun < 5
    finally:
        for _ in range(depth):  # too deep for shutil
            os.chdir("..")
            os.rmdir("x")
        os.chdir(here)


def test_large_files_are_refused_before_they_are_read(run: Path):
    os.truncate(run / "scalars.jsonl", layout.LARGEST_TEXT + 1)  # takes no room: it has holes
    os.truncate(run / "arrays/kernel" / STEP, layout.LARGEST_ARRAYS + 1)
    found = open_run(run)
    with refused("larger than"):
        assert found.lines
    with refused("larger than"):
        found.array("kernel", 3)


def test_what_a_file_may_unpack_to():
    assert files.allowed(0, 10**12) == files.ALWAYS
    assert files.allowed(10**7, 10**12) == 5 * 10**8
    assert files.allowed(10**12, 10**9) == 10**9
