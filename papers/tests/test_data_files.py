"""Readers of the data sets of figures, on small files that the tests write."""

import csv
import pickle
import struct
from pathlib import Path

import numpy
import pytest
import torch
from numpy.typing import NDArray

import featlearn as fl
from featlearn_papers import data

Bytes = NDArray[numpy.uint8]


def some_bytes(*shape: int, seed: int = 0, below: int = 256) -> Bytes:
    return numpy.random.default_rng(seed).integers(0, below, shape, dtype=numpy.uint8)


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture(autouse=True)
def _no_default_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEATLEARN_DATA", raising=False)


@pytest.mark.parametrize(
    ("read", "place", "names"),
    [
        (data.cifar100, "cifar-100-binary", ["train.bin", "cifar-100-python"]),
        (data.svhn, "svhn", ["train_32x32.mat"]),
        (data.stl10, "stl10_binary", ["train_X.bin"]),
        (data.gtsrb, "GTSRB", ["Final_Training/Images/"]),
        (data.celeba, "celeba", ["list_attr_celeba.txt"]),
        (data.shakespeare, "shakespeare", ["input.txt"]),
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


# CIFAR-100


def test_cifar100_has_two_labels(tmp_path: Path):
    rows = some_bytes(10_000, 2 + 3072)
    rows[:, 0] = numpy.arange(10_000) % 20
    rows[:, 1] = numpy.arange(10_000) % 100
    write(tmp_path / "cifar-100-binary/test.bin", rows.tobytes())
    fine = data.cifar100(tmp_path, "test", samples=130)
    coarse = data.cifar100(tmp_path, "test", labels="coarse", samples=130)
    assert fine.labels.tolist() == [k % 100 for k in range(130)]
    assert coarse.labels.tolist() == [k % 20 for k in range(130)]
    assert (fine.classes, coarse.classes, fine.name) == (100, 20, "cifar100")
    assert torch.equal((fine.x * 255).round().to(torch.uint8).flatten(1), torch.from_numpy(rows[:130, 2:]))
    with pytest.raises(fl.FeatlearnError, match="labels is 'both'"):
        data.cifar100(tmp_path, "test", labels="both")


def test_cifar100_pickles(tmp_path: Path):
    images = some_bytes(3, 3072)
    content = {"data": images, "fine_labels": [99, 0, 5], "coarse_labels": [19, 0, 1]}
    write(tmp_path / "cifar100/cifar-100-python/train", pickle.dumps(content, 2))
    assert data.cifar100(tmp_path).labels.tolist() == [99, 0, 5]
    assert data.cifar100(tmp_path, labels="coarse").labels.tolist() == [19, 0, 1]


# SVHN


def mat(path: Path, images: NDArray[numpy.generic], labels: NDArray[numpy.generic], packed: bool = False) -> None:
    from scipy.io import savemat

    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"X": images, "y": labels}, do_compression=packed)


@pytest.mark.parametrize("packed", [False, True])
def test_svhn_turns_axes_and_the_tenth_class(tmp_path: Path, packed: bool):
    images = some_bytes(32, 32, 3, 4)
    mat(tmp_path / "svhn/train_32x32.mat", images, numpy.array([[10], [1], [9], [10]], dtype=numpy.uint8), packed)
    samples = data.svhn(tmp_path)
    assert samples.labels.tolist() == [0, 1, 9, 0]
    pixels = (samples.x * 255).round().to(torch.uint8).numpy()
    for sample, channel, row, column in numpy.ndindex(4, 3, 32, 32):
        if pixels[sample, channel, row, column] != images[row, column, channel, sample]:
            pytest.fail(f"pixel {sample}, {channel}, {row}, {column}")
    assert torch.equal(data.svhn(tmp_path, classes=(9, 0), samples=2).labels, torch.tensor([1, 0]))


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (some_bytes(32, 32, 3, 4), numpy.ones((3, 1)), "states X"),
        (some_bytes(32, 31, 3, 4), numpy.ones((4, 1)), "states X"),
        (some_bytes(32, 32, 3, 4).astype(float), numpy.ones((4, 1)), "of double"),
        (some_bytes(32, 32, 3, 4), numpy.zeros((4, 1)), "labels from 0.0 to 0.0"),
        (some_bytes(32, 32, 3, 4), numpy.full((4, 1), 1.5), "whole numbers"),
        (some_bytes(32, 32, 3, 4), numpy.full((4, 1), numpy.nan), "whole numbers"),
        (some_bytes(32, 32, 3, 4), numpy.full((4, 1), "a"), "states X|has y of|y "),
    ],
)
def test_wrong_svhn_is_refused(tmp_path: Path, images: Bytes, labels: NDArray[numpy.generic], words: str):
    mat(tmp_path / "svhn/test_32x32.mat", images, labels)
    with pytest.raises(fl.FeatlearnError, match=words):
        data.svhn(tmp_path, "test")


def test_damaged_svhn_is_refused(tmp_path: Path):
    path = tmp_path / "svhn/train_32x32.mat"
    mat(path, some_bytes(32, 32, 3, 4), numpy.ones((4, 1), dtype=numpy.uint8))
    whole = path.read_bytes()
    sizes = struct.pack("<4i", 32, 32, 3, 4)
    assert whole.count(sizes) == 1
    for content in (
        b"",
        whole[:100],
        whole[:5000],
        b"x" * 1000,
        whole.replace(sizes, struct.pack("<4i", 32, 32, 3, 2**30)),
        whole.replace(sizes, struct.pack("<4i", 32, 32, 3, -4)),
        whole.replace(sizes, struct.pack("<4i", 32, 32, 3, 5)),
    ):
        path.write_bytes(content)
        with pytest.raises(fl.FeatlearnError, match=r"train_32x32\.mat' (cannot be read|states)"):
            data.svhn(tmp_path)


# STL-10, GTSRB, CelebA


def test_stl10_stands_column_by_column(tmp_path: Path):
    stored = some_bytes(3, 3, 96, 96)
    write(tmp_path / "stl10_binary/train_X.bin", stored.tobytes())
    write(tmp_path / "stl10_binary/train_y.bin", bytes([1, 10, 4]))
    samples = data.stl10(tmp_path)
    assert samples.labels.tolist() == [0, 9, 3]
    assert torch.equal((samples.x * 255).round().to(torch.uint8), torch.from_numpy(stored).transpose(2, 3))
    assert torch.equal(data.stl10(tmp_path, classes=(3,)).x, samples.x[2:])
    small = data.stl10(tmp_path, size=32).x
    # bilinear and antialiased: a triangle of three times the width, whose middle pixels are all inside
    reference = torch.nn.functional.interpolate(samples.x, size=(32, 32), mode="bilinear", antialias=True)
    torch.testing.assert_close(small, reference, rtol=0, atol=1.01 / 255)
    with pytest.raises(fl.FeatlearnError, match="no statistics of stl10"):
        data.stl10(tmp_path, normalization="channel")
    write(tmp_path / "stl10_binary/train_X.bin", stored.tobytes()[:-1])
    with pytest.raises(fl.FeatlearnError, match="has 82943 bytes"):
        data.stl10(tmp_path)
    write(tmp_path / "stl10_binary/train_X.bin", stored.tobytes())
    write(tmp_path / "stl10_binary/train_y.bin", bytes([1, 11, 4]))
    with pytest.raises(fl.FeatlearnError, match="labels from 1 to 11"):
        data.stl10(tmp_path)


def ppm(image: Bytes) -> bytes:
    return f"P6\n{image.shape[1]} {image.shape[0]}\n255\n".encode() + image.tobytes()


def sign_list(path: Path, rows: list[tuple[str, int]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(["Filename", "Width", "Height", "Roi.X1", "Roi.Y1", "Roi.X2", "Roi.Y2", "ClassId"])
        writer.writerows([name, 9, 9, 0, 0, 8, 8, label] for name, label in rows)


@pytest.fixture
def signs(tmp_path: Path) -> Path:
    folder = tmp_path / "GTSRB/Final_Training/Images"
    for label in range(43):
        sign_list(folder / f"{label:05d}/GT-{label:05d}.csv", [("00000_00000.ppm", label)])
        write(folder / f"{label:05d}/00000_00000.ppm", ppm(some_bytes(6, 6, 3, seed=label)))
    write(tmp_path / "GTSRB/Final_Test/Images/00000.ppm", ppm(numpy.full((9, 11, 3), [10, 20, 30], dtype=numpy.uint8)))
    sign_list(tmp_path / "GTSRB/GT-final_test.csv", [("00000.ppm", 16)])
    return tmp_path


def test_gtsrb_reads_lists_and_pictures(signs: Path):
    samples = data.gtsrb(signs, size=6)
    assert samples.labels.tolist() == [*range(43)]
    assert (samples.classes, samples.x.shape) == (43, (43, 3, 6, 6))
    expected = torch.from_numpy(some_bytes(6, 6, 3, seed=7)).permute(2, 0, 1)
    assert torch.equal((samples.x[7] * 255).round().to(torch.uint8), expected)
    test = data.gtsrb(signs, "test")
    assert test.labels.tolist() == [16]
    assert torch.equal((test.x * 255).round()[0, :, 5, 9], torch.tensor([10.0, 20.0, 30.0]))
    assert test.x.shape == (1, 3, 32, 32)


@pytest.mark.parametrize(
    ("name", "label", "words"),
    [
        ("../00000/00000_00000.ppm", 3, "has the row 2"),
        ("/etc/passwd", 3, "has the row 2"),
        ("..", 3, "has the row 2"),
        ("00000_00000.ppm", 43, "has the row 2"),
        ("other.ppm", 3, "other.ppm not found"),
    ],
)
def test_wrong_lists_of_signs_are_refused(signs: Path, name: str, label: int, words: str):
    sign_list(signs / "GTSRB/Final_Training/Images/00003/GT-00003.csv", [(name, label)])
    with pytest.raises(fl.FeatlearnError, match=words):
        data.gtsrb(signs)


def test_a_list_that_is_no_table_is_refused(signs: Path):
    write(signs / "GTSRB/Final_Training/Images/00003/GT-00003.csv", b"Filename;ClassId\n" + b"x" * 200_000 + b";3\n")
    with pytest.raises(fl.FeatlearnError, match="cannot be read"):
        data.gtsrb(signs)
    write(signs / "GTSRB/Final_Training/Images/00003/GT-00003.csv", b"Filename,ClassId\na.ppm,3\n")
    with pytest.raises(fl.FeatlearnError, match="has the row 2: None, None"):
        data.gtsrb(signs)


@pytest.mark.parametrize(
    "content", [b"", b"P6\n6 6\n255\nabc", b"GIF89a", b"P6\n99999 99999\n255\n", b"P6\n-1 6\n255\n"]
)
def test_damaged_pictures_are_refused(signs: Path, content: bytes):
    write(signs / "GTSRB/Final_Training/Images/00003/00000_00000.ppm", content)
    with pytest.raises(fl.FeatlearnError, match="cannot be read"):
        data.gtsrb(signs)


def faces(root: Path, rows: str, parts: str, count: int = 4) -> None:
    from PIL import Image

    folder = root / "celeba/img_align_celeba"
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(4):
        image = numpy.zeros((218, 178, 3), dtype=numpy.uint8)
        image[20:198] = (40 * k, 200, 90)  # the middle square; the rest is cut off
        Image.fromarray(image).save(folder / f"{k + 1:06d}.jpg", quality=95)
    (root / "celeba/list_attr_celeba.txt").write_text(f"{count}\nBald Eyeglasses Smiling\n{rows}")
    (root / "celeba/list_eval_partition.txt").write_text(parts)


ROWS = "000001.jpg -1  1 -1\n000002.jpg  1 -1 -1\n000003.jpg -1 -1  1\n000004.jpg -1  1 -1\n"
PARTS = "000001.jpg 0\n000002.jpg 0\n000003.jpg 0\n000004.jpg 2\n"


def test_celeba_reads_an_attribute(tmp_path: Path):
    faces(tmp_path, ROWS, PARTS)
    samples = data.celeba(tmp_path, size=16)
    assert samples.labels.tolist() == [1, 0, 0]
    assert (samples.x.shape, samples.classes) == ((3, 3, 16, 16), 2)
    expected = torch.tensor([[0, 200, 90], [40, 200, 90], [80, 200, 90]]) / 255
    torch.testing.assert_close(samples.x, expected[:, :, None, None].expand(-1, -1, 16, 16), rtol=0, atol=3 / 255)
    assert data.celeba(tmp_path, attribute="Smiling").labels.tolist() == [0, 0, 1]
    assert data.celeba(tmp_path, "test").labels.tolist() == [1]
    assert data.celeba(tmp_path, samples=2, balanced=True).labels.tolist() == [1, 0]
    with pytest.raises(fl.FeatlearnError, match="did you mean 'Eyeglasses'"):
        data.celeba(tmp_path, attribute="Eyeglases")


@pytest.mark.parametrize(
    ("rows", "parts", "count", "words"),
    [
        (ROWS, PARTS, 5, "has 4 rows"),
        (ROWS.replace("000003", "../3"), PARTS, 4, "has 4 rows"),
        (ROWS.replace("-1  1 -1", "-1 0 -1"), PARTS, 4, "has 4 rows"),
        (ROWS, PARTS.replace(" 2", " 3"), 4, "file names of the attributes"),
        (ROWS, PARTS.replace("000004", "000005"), 4, "file names of the attributes"),
    ],
)
def test_wrong_lists_of_faces_are_refused(tmp_path: Path, rows: str, parts: str, count: int, words: str):
    faces(tmp_path, rows, parts, count)
    with pytest.raises(fl.FeatlearnError, match=words):
        data.celeba(tmp_path)


# text


def test_text_is_parted_and_cut_into_windows(tmp_path: Path):
    write(tmp_path / "tinyshakespeare/input.txt", "To be, or not to be: é".encode())
    whole = data.shakespeare(tmp_path, "all")
    train, test = data.shakespeare(tmp_path), data.shakespeare(tmp_path, "test")
    assert whole.text(whole.tokens) == "To be, or not to be: é"
    assert whole.vocabulary == "".join(sorted(set("To be, or not to be: é"))) == train.vocabulary
    assert (train.text(train.tokens), test.text(test.tokens)) == ("To be, or not to be", ": é")
    x, y = whole.windows(50, 6, generator=torch.Generator().manual_seed(1))
    assert x.shape == y.shape == (50, 6)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert all(
        whole.text(row) + whole.text(end[-1:]) in "To be, or not to be: é" for row, end in zip(x, y, strict=True)
    )
    assert {whole.text(end[-1:]) for end in y} >= {"é", "r"}  # the last place and the first that can be
    assert torch.equal(whole.windows(2, 21)[1][:, -1], whole.tokens[[21, 21]])
    with pytest.raises(fl.FeatlearnError, match="the text has 22 characters"):
        whole.windows(2, 22)


@pytest.mark.parametrize(("content", "words"), [(b"", "has 0 bytes"), (b"\xff\xfe\x00", "is not text")])
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, words: str):
    write(tmp_path / "shakespeare/input.txt", content)
    with pytest.raises(fl.FeatlearnError, match=words):
        data.shakespeare(tmp_path)
