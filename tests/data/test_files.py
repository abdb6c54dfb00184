"""Readers on files written here byte by byte: what they give, and what they say of damaged and hostile ones."""

import gzip
import io
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from numpy.typing import NDArray

import featlearn as fl

Bytes = NDArray[numpy.uint8]


def some_bytes(*shape: int, seed: int = 0, below: int = 256) -> Bytes:
    return numpy.random.default_rng(seed).integers(0, below, shape, dtype=numpy.uint8)


def idx(entries: Bytes) -> bytes:
    return bytes([0, 0, 8, entries.ndim]) + struct.pack(f">{entries.ndim}I", *entries.shape) + entries.tobytes()


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture(autouse=True)
def _no_default_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEATLEARN_DATA", raising=False)


# MNIST


IMAGES, LABELS = some_bytes(7, 28, 28), numpy.array([3, 1, 4, 1, 5, 9, 2], dtype=numpy.uint8)


def packed(content: bytes) -> bytes:
    """Without the time, which would be part of a test's name."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("folder", "pattern", "pack"),
    [
        ("mnist", "{}-{}-idx{}-ubyte.gz", gzip.compress),
        ("mnist", "{}-{}-idx{}-ubyte", bytes),
        ("MNIST/raw", "{}-{}.idx{}-ubyte", bytes),
        (".", "{}-{}.idx{}-ubyte.gz", gzip.compress),
        ("mnist", "{}-{}-idx{}-ubyte.gz", bytes),  # unpacked, under the old name
    ],
)
def test_mnist_in_all_its_places_and_forms(tmp_path: Path, folder: str, pattern: str, pack: Callable[[bytes], bytes]):
    write(tmp_path / folder / pattern.format("t10k", "images", 3), pack(idx(IMAGES)))
    write(tmp_path / folder / pattern.format("t10k", "labels", 1), pack(idx(LABELS)))
    data = fl.data.mnist(tmp_path, "test")
    assert data.x.dtype == torch.float32
    assert torch.equal((data.x * 255).round().to(torch.uint8), torch.from_numpy(IMAGES)[:, None])
    assert data.labels.tolist() == LABELS.tolist()
    assert (data.classes, data.name) == (10, "mnist")
    with pytest.raises(fl.FeatlearnError, match=r"train-images.* not found"):
        fl.data.mnist(tmp_path)


def tiny_mnist(root: Path, images: bytes, labels: bytes = idx(LABELS)) -> None:
    write(root / "mnist/train-images-idx3-ubyte", images)
    write(root / "mnist/train-labels-idx1-ubyte", labels)


def header(*sizes: int) -> bytes:
    return bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes)


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (idx(IMAGES)[:-1], None, "states the sizes"),
        (idx(IMAGES) + b"0", None, "states the sizes"),
        (idx(IMAGES)[:10], None, "begins with 00 00 08 03"),
        (b"", None, "begins with"),
        (b"\0\0\x0d\x03" + idx(IMAGES)[4:], None, "begins with 00 00 0d 03"),
        (idx(LABELS), None, "begins with 00 00 08 01"),
        (idx(some_bytes(7, 28, 27)), None, r"states the sizes \(7, 28, 27\)"),
        (header(2**32 - 1, 28, 28), None, "states the sizes"),
        (packed(header(2_000_000, 28, 28)), None, "states the sizes"),
        (packed(idx(IMAGES)[:-1]), None, "has 5487 entries"),
        (packed(idx(IMAGES) + b"0"), None, "has more entries"),
        (packed(idx(IMAGES))[:-9], None, "cannot be unpacked"),
        (packed(idx(IMAGES))[:60] + b"x" * 60, None, "cannot be unpacked"),
        (idx(IMAGES), idx(LABELS[:6]), "has 6 labels"),
        (idx(IMAGES), idx(LABELS + 1), "labels up to 10"),
    ],
)
def test_damaged_mnist_is_refused(tmp_path: Path, images: bytes, labels: bytes | None, words: str):
    tiny_mnist(tmp_path, images, idx(LABELS) if labels is None else labels)
    with pytest.raises(fl.FeatlearnError, match=words) as failure:
        fl.data.mnist(tmp_path)
    assert isinstance(failure.value, ValueError)
    assert "copy it again" in str(failure.value)


# where files are


def test_the_environment_says_where_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(fl.FeatlearnError, match="FEATLEARN_DATA is not set"):
        fl.data.mnist()
    tiny_mnist(tmp_path, idx(IMAGES))
    monkeypatch.setenv("FEATLEARN_DATA", str(tmp_path))
    assert len(fl.data.mnist().x) == 7
    with pytest.raises(fl.FeatlearnError, match="expected an existing directory"):
        fl.data.mnist(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("read", "place", "names"),
    [
        (fl.data.mnist, "mnist", ["train-images-idx3-ubyte.gz", "MNIST/raw"]),
        (fl.data.cifar10, "cifar-10-batches-bin", ["data_batch_1.bin", "data_batch_5.bin", "cifar-10-batches-py"]),
    ],
)
def test_what_is_missing_is_named_with_its_place(tmp_path: Path, read, place: str, names: list[str]):
    with pytest.raises(fl.FeatlearnError) as failure:
        read(tmp_path)
    message = str(failure.value)
    assert str(tmp_path / place) in message
    assert all(name in message for name in names)
    assert "root=... or FEATLEARN_DATA" in message
    with pytest.raises(fl.FeatlearnError, match="split is 'validation', expected 'train'"):
        read(tmp_path, "validation")


# options


def test_options_choose_samples(tmp_path: Path):
    labels = numpy.array([0, 1, 2, 0, 1, 0, 2, 0], dtype=numpy.uint8)
    tiny_mnist(tmp_path, idx(some_bytes(8, 28, 28)), idx(labels))
    pixels = fl.data.mnist(tmp_path).x

    def taken(**options: object) -> tuple[list[int], list[int], int]:
        data = fl.data.mnist(tmp_path, **options)
        rows = [int((pixels == image).flatten(1).all(1).nonzero()) for image in data.x]
        return rows, data.labels.tolist(), data.classes

    assert taken(samples=3) == ([0, 1, 2], [0, 1, 2], 10)
    assert taken(classes=(2, 0)) == ([0, 2, 3, 5, 6, 7], [1, 0, 1, 1, 0, 1], 2)
    assert taken(classes=((0, 2), 1), samples=4) == ([0, 1, 2, 3], [0, 1, 0, 0], 2)
    assert taken(classes=(0, 1), samples=4, balanced=True) == ([0, 1, 3, 4], [0, 1, 0, 1], 2)
    assert taken(classes=(0, 1, 2), balanced=True) == ([0, 1, 2, 3, 4, 6], [0, 1, 2, 0, 1, 2], 3)
    rows, kept, _ = taken(generator=torch.Generator().manual_seed(4))
    assert sorted(rows) == [*range(8)]
    assert rows != [*range(8)]
    assert kept == labels[rows].tolist()
    assert taken(generator=torch.Generator().manual_seed(4), samples=5)[0] == rows[:5]
    drawn = taken(generator=torch.Generator().manual_seed(4), classes=(0, 2), samples=4, balanced=True)
    assert sorted(drawn[1]) == [0, 0, 1, 1]


def test_options_shape_the_images(tmp_path: Path):
    tiny_mnist(tmp_path, idx(IMAGES))
    assert torch.equal(fl.data.mnist(tmp_path, flatten=True).x, fl.data.mnist(tmp_path).x.flatten(1))
    standard = fl.data.mnist(tmp_path, normalization="channel").x
    torch.testing.assert_close(standard, (fl.data.mnist(tmp_path).x - 0.1307) / 0.3081, rtol=0, atol=1e-3)
    first = fl.data.mnist(tmp_path)
    first.x.zero_()
    assert fl.data.mnist(tmp_path).x.max() > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 8}, "samples=8, but mnist train has 7"),
        ({"samples": 0}, "samples is 0"),
        ({"samples": 2.0}, "samples is 2.0"),
        ({"sample": 2}, "unknown option 'sample'.*did you mean 'samples'"),
        ({"classes": (1, 10)}, "expected different numbers from 0 to 9"),
        ({"classes": (1, 1)}, "expected different numbers"),
        ({"classes": ()}, "expected different numbers"),
        ({"classes": (True,)}, "expected different numbers"),
        ({"classes": ((1, 2), ())}, "expected different numbers"),
        ({"classes": (1, 3), "samples": 3, "balanced": True}, "expected a multiple"),
        ({"classes": (1, 3), "samples": 4, "balanced": True}, "only 1 samples of class 1"),
        ({"balanced": True}, "only 0 samples of class 0"),
        ({"generator": 3}, "generator is int"),
        ({"normalization": "pixel"}, "expected 'unit' or 'channel'"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, object], words: str):
    tiny_mnist(tmp_path, idx(IMAGES))
    with pytest.raises(fl.FeatlearnError, match=words):
        fl.data.mnist(tmp_path, **options)


def test_signs_are_of_two_classes(tmp_path: Path):
    tiny_mnist(tmp_path, idx(IMAGES))
    assert fl.data.mnist(tmp_path, classes=((0, 2, 4, 6, 8), (1, 3, 5, 7, 9))).signs().tolist() == [
        1,
        1,
        -1,
        1,
        1,
        1,
        -1,
    ]
    with pytest.raises(fl.FeatlearnError, match="10 classes, expected two"):
        fl.data.mnist(tmp_path).signs()


# CIFAR


def cifar_rows(count: int, marks: int, seed: int = 0) -> Bytes:
    rows = some_bytes(count, marks + 3072, seed=seed)
    rows[:, 0] %= 10
    return rows


def python2_pickle(images: Bytes, labels: list[int], key: bytes = b"labels") -> bytes:
    """As the official files are written: protocol 2 by python 2, where text and bytes are the same."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    kind = (
        b"cnumpy\ndtype\n"
        + short(b"u1")
        + b"K\0K\x01\x87R(K\x03"
        + short(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    )
    body = images.tobytes()
    sizes = b"".join(b"J" + struct.pack("<i", size) for size in images.shape)
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + short(b"b") + b"\x87R"
    array += b"(K\x01" + sizes + b"\x86" + kind + b"\x89T" + struct.pack("<i", len(body)) + body + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(key) + numbers + short(b"batch_label") + short(b"one") + b"u."


def test_the_python2_pickle_is_one():
    images = some_bytes(3, 3072)
    content = pickle.loads(python2_pickle(images, [1, 2, 3]), encoding="bytes")
    assert numpy.array_equal(content[b"data"], images)
    assert content[b"labels"] == [1, 2, 3]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Batches 2 and 4 and the test batch in the binary version."""
    root = tmp_path_factory.mktemp("cifar")
    for seed, name in ((2, "data_batch_2"), (4, "data_batch_4"), (6, "test_batch")):
        write(root / f"cifar-10-batches-bin/{name}.bin", cifar_rows(10_000, 1, seed).tobytes())
    return root


def test_cifar10_joins_the_batches_in_the_order_asked_for(cifar: Path):
    data = fl.data.cifar10(cifar, batches=(4, 2), classes=(3, 7), samples=2500)
    rows = numpy.concatenate([cifar_rows(10_000, 1, 4), cifar_rows(10_000, 1, 2)])
    rows = rows[numpy.isin(rows[:, 0], (3, 7))][:2500]
    assert numpy.array_equal((data.x * 255).round().numpy().astype(numpy.uint8).reshape(2500, -1), rows[:, 1:])
    assert data.labels.tolist() == (rows[:, 0] == 7).astype(int).tolist()
    assert data.x.shape == (2500, 3, 32, 32)
    test = fl.data.cifar10(cifar, "test", samples=5, flatten=True)
    assert torch.equal((test.x * 255).round().to(torch.uint8), torch.from_numpy(cifar_rows(10_000, 1, 6)[:5, 1:]))


def test_missing_batches_are_named(cifar: Path):
    with pytest.raises(
        fl.FeatlearnError, match=r"batches 2, 4 are here: batches=\[2, 4\].*data_batch_1.bin or"
    ) as failure:
        fl.data.cifar10(cifar)
    assert "data_batch_3.bin or data_batch_5.bin not found in" in str(failure.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batches": (6,)}, "numbers from 1 to 5"),
        ({"batches": (1, 1)}, "numbers from 1 to 5"),
        ({"batches": ()}, "numbers from 1 to 5"),
        ({"batches": 2}, "numbers from 1 to 5"),
        ({"batches": (2,), "split": "test"}, "only training data has batches"),
    ],
)
def test_wrong_batches_are_refused(cifar: Path, arguments: dict[str, object], words: str):
    with pytest.raises(fl.FeatlearnError, match=words):
        fl.data.cifar10(cifar, **arguments)


@pytest.mark.parametrize("size", [0, 3072, 15_365_000, 30_729_999, 30_733_073])
def test_a_cut_binary_batch_is_refused(tmp_path: Path, size: int):
    write(tmp_path / "cifar-10-batches-bin/test_batch.bin", bytes(size))
    with pytest.raises(fl.FeatlearnError, match=f"has {size} bytes, expected 10000 images of 1 \\+ 3072"):
        fl.data.cifar10(tmp_path, "test")


def test_cifar_labels_are_checked(tmp_path: Path):
    rows = numpy.zeros((10_000, 3073), dtype=numpy.uint8)
    rows[17, 0] = 10
    write(tmp_path / "cifar10/test_batch.bin", rows.tobytes())
    with pytest.raises(fl.FeatlearnError, match="labels up to 10"):
        fl.data.cifar10(tmp_path, "test")


@pytest.mark.parametrize("protocol", ["python 2", 2, 3, 4])
def test_pickles_of_any_age_are_read(tmp_path: Path, protocol: str | int):
    images, labels = some_bytes(5, 3072), [1, 0, 9, 3, 3]
    if isinstance(protocol, str):
        content = python2_pickle(images, labels)
    else:
        content = pickle.dumps({b"data": images, b"labels": labels, b"filenames": [b"a"] * 5}, protocol)
    write(tmp_path / "cifar-10-batches-py/test_batch", content)
    data = fl.data.cifar10(tmp_path, "test")
    assert torch.equal((data.x * 255).round().to(torch.uint8).flatten(1), torch.from_numpy(images))
    assert data.labels.tolist() == labels


class Runs:
    """A pickle of this runs a command."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> object:
        return self.call


GOOD = {b"data": some_bytes(2, 3072), b"labels": [0, 1]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps(GOOD, 2)[:-100], "cannot be unpickled"),
        (b"", "cannot be unpickled"),
        (b"not a pickle", "cannot be unpickled"),
        (pickle.dumps([1, 2], 2), "cannot be unpickled"),
        (pickle.dumps({b"data": [1], b"labels": [1]}, 2), "has other images"),
        (pickle.dumps({b"labels": [1]}, 2), "has other images|cannot be unpickled"),
        (pickle.dumps({**GOOD, b"data": some_bytes(2, 3071)}, 2), "has other images"),
        (pickle.dumps({**GOOD, b"data": some_bytes(3072)}, 2), "has other images"),
        (pickle.dumps({**GOOD, b"data": numpy.zeros((2, 3072))}, 2), "has other images"),
        (pickle.dumps({**GOOD, b"data": numpy.asfortranarray(some_bytes(2, 3072))}, 2), "has other images"),
        (pickle.dumps({**GOOD, b"labels": [0, 1, 2]}, 2), "no list of 2 classes"),
        (pickle.dumps({**GOOD, b"labels": [0, -1]}, 2), "no list of 2 classes"),
        (pickle.dumps({**GOOD, b"labels": [0, "1"]}, 2), "no list of 2 classes"),
        (pickle.dumps({**GOOD, b"labels": [0, 10]}, 2), "labels up to 10"),
        # sizes that would fill the memory, of the array, of the memo and of a string
        (python2_pickle(some_bytes(2, 3072), [0, 1]).replace(b"J\x02\0\0\0", b"J\xff\xff\xff\x7f"), "has other images"),
        (b"\x80\x02Nr\xff\xff\xff\xff.", "has other images|cannot be unpickled"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0fabc", "cannot be unpickled"),
        # attributes of what stands in for functions
        (b"\x80\x02c_codecs\nencode\n}X\x01\0\0\0aK\x01sb.", "cannot be unpickled"),
        (b"\x80\x02(S'x'\nP0\n.", "cannot be unpickled"),
    ],
)
def test_damaged_and_hostile_pickles_are_refused(tmp_path: Path, content: bytes, words: str):
    write(tmp_path / "cifar-10-batches-py/test_batch", content)
    with pytest.raises(fl.FeatlearnError, match=words):
        fl.data.cifar10(tmp_path, "test")


@pytest.mark.parametrize("function", [os.mkdir, exec, eval, pickle.loads, io.open, numpy.load])
def test_a_pickle_runs_nothing(tmp_path: Path, function: Callable[..., object]):
    target = tmp_path / "made"
    argument = str(target) if function is os.mkdir else f"import os; os.mkdir({str(target)!r})"
    content = pickle.dumps({**GOOD, b"filenames": Runs(function, argument)}, 2)
    write(tmp_path / "cifar-10-batches-py/test_batch", content)
    with pytest.raises(fl.FeatlearnError, match=r"cannot be unpickled safely \(it asks for"):
        fl.data.cifar10(tmp_path, "test")
    assert not target.exists()
