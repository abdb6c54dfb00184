"""The python version of CIFAR, unpickled without running anything that the file names.

A pickle calls functions by name. Here these names lead to stand-ins that only keep what they were given; the few that
the official files need are known, and any other is an error.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from featlearn.data.files import damaged

_MOST = 1 << 29  # bytes; the largest official file has 155 million


class _Kind:
    """Stand-in for numpy.dtype: the name of a type."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        """Byte order and the like: bytes have none."""


class _Array:
    """Stand-in for numpy.ndarray: the bytes as they stand in the file."""

    def __init__(self, *arguments: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Encoded:
    """Stand-in for _codecs.encode, by which python 3 writes bytes in old pickles.

    A class, as the others: a pickle may set attributes of a function, but not of what has its own __setstate__.
    """

    def __new__(cls, text: object, encoding: object) -> Any:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("text in another encoding than latin1")
        return text.encode("latin1")

    def __setstate__(self, state: object) -> None:
        """There is nothing to set."""


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _Kind,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("_codecs", "encode"): _Encoded,
}


class _Unpickler(pickle._Unpickler):
    # the one written in python: that in C makes room for the memo at any place that the file names
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _STAND_INS[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside")


def unpickled(path: Path) -> dict[bytes, Any]:
    """The mapping in a CIFAR pickle, with arrays of bytes as arrays; nothing in the file is run."""
    expected = "the python version of CIFAR: a mapping of arrays and lists"
    size = path.stat().st_size
    if size > _MOST:
        raise damaged(path, f"has {size} bytes", f"fewer than {_MOST}")
    try:
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except Exception as error:  # a damaged pickle fails in any way there is
        raise damaged(path, f"cannot be unpickled safely ({error})", expected) from error
    if not isinstance(content, dict):
        raise damaged(path, f"holds {type(content).__name__}", expected)
    return {key.encode() if isinstance(key, str) else key: value for key, value in content.items()}


def bytes_array(value: object, path: Path, columns: int) -> NDArray[numpy.uint8]:
    """The array (N, columns) of bytes that a stand-in kept."""
    expected = f"(N, {columns}) bytes under the key data"
    if not isinstance(value, _Array) or not isinstance(value.state, tuple) or len(value.state) != 5:
        raise damaged(path, f"holds {type(value).__name__}", expected)
    _, shape, kind, column_major, body = value.state
    named = kind.arguments[0] if isinstance(kind, _Kind) and kind.arguments else None
    whole = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if named not in ("u1", b"u1", "|u1", b"|u1") or column_major or not isinstance(body, bytes) or not whole:
        raise damaged(path, "holds an array of another kind", expected)
    if len(shape) != 2 or shape[1] != columns or math.prod(shape) != len(body):
        raise damaged(path, f"states the sizes {shape} for {len(body)} bytes", expected)
    return numpy.frombuffer(body, numpy.uint8).reshape(shape)
