"""The files that each data set consists of, for `featlearn doctor`.

The loaders in `featlearn.data` look in the same places; this module does without torch, which may be what is missing.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

_SIGNS = ("GTSRB", "gtsrb/GTSRB", "gtsrb", "")
_FACES = ("celeba", "CelebA", "CelebA/Anno", "celeba/Anno", "CelebA/Eval", "celeba/Eval", "Anno", "Eval", "")


def _places(folders: Iterable[str], *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" if folder else name for folder in folders for name in names)


def _digits(stem: str, axes: int) -> tuple[str, ...]:
    names = [f"{stem}{mark}idx{axes}-ubyte{suffix}" for mark in "-." for suffix in ("", ".gz")]
    return _places(("mnist", "MNIST", "MNIST/raw", ""), *names)


def _cifar(classes: int, stem: str) -> tuple[str, ...]:
    versions = {10: ("cifar-10-batches-bin", "cifar-10-batches-py"), 100: ("cifar-100-binary", "cifar-100-python")}
    own = f"cifar{classes}"
    folders = (*versions[classes], *(f"{own}/{folder}" for folder in versions[classes]), own, "")
    return _places(folders, f"{stem}.bin", stem)


FILES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mnist": {
        f"{part}-{kind}": _digits(f"{part}-{kind}", axes)
        for part in ("train", "t10k")
        for kind, axes in (("images", 3), ("labels", 1))
    },
    "cifar10": {stem: _cifar(10, stem) for stem in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")},
    "cifar100": {stem: _cifar(100, stem) for stem in ("train", "test")},
    "svhn": {f"{part}_32x32.mat": _places(("svhn", "SVHN", ""), f"{part}_32x32.mat") for part in ("train", "test")},
    "stl10": {
        name: _places(("stl10_binary", "stl10/stl10_binary", "stl10", "STL10/stl10_binary", "STL10", ""), name)
        for name in ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin")
    },
    "gtsrb": {
        **{
            f"GT-{n:05d}.csv": _places(
                _SIGNS, *(f"{folder}/{n:05d}/GT-{n:05d}.csv" for folder in ("Final_Training/Images", "Training"))
            )
            for n in range(43)
        },
        "GT-final_test.csv": _places(
            _SIGNS, "Final_Test/Images/GT-final_test.csv", "GT-final_test.csv", "../GT-final_test.csv"
        ),
    },
    "celeba": {
        **{name: _places(_FACES, name) for name in ("list_attr_celeba.txt", "list_eval_partition.txt")},
        "img_align_celeba": _places(
            ("celeba", "CelebA", "celeba/Img", "CelebA/Img", "Img", ""), "img_align_celeba/000001.jpg"
        ),
    },
    "shakespeare": {
        "input.txt": _places(("shakespeare", "tinyshakespeare", "shakespeare_char", ""), "input.txt"),
    },
}
"""Data set -> file -> where it may lie below the root."""


def absent_files(root: Path, name: str) -> list[str]:
    """The files of a data set that are not below the root."""
    return [file for file, places in FILES[name].items() if not any((root / place).is_file() for place in places)]
