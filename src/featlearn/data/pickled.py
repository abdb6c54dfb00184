"""Read the Python version of CIFAR without running the functions that a pickle names."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from featlearn.data.dataset_files import damage

_CALLABLES = {("numpy", "dtype"), ("numpy", "ndarray"), ("_codecs", "encode")}
_CALLABLES |= {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
_MAX_BYTES = 1 << 29  # the largest official file has 155 million


class _Recorded:
    """Arguments and state of a call in the pickle. Nothing is called."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


# the version in Python: the one in C allocates a memo of any size that the file states
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CALLABLES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _Recorded


def _as_bytes(value: Any) -> Any:
    """Decode text, which Python 3 writes to old pickles as a call of `_codecs.encode`."""
    match value:
        case _Recorded(arguments=(str() as text, "latin1" | b"latin1")):
            return text.encode("latin1")
    return value.encode() if isinstance(value, str) else value


def read_pickle(path: Path, columns: int) -> tuple[NDArray[numpy.uint8], dict[Any, Any]]:
    """Return the images, shape (N, columns), and the whole mapping by keys in bytes."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise pickle.UnpicklingError(f"it has more than {_MAX_BYTES} bytes")
        loaded = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        content = {_as_bytes(key): value for key, value in loaded.items()}
    except Exception as error:  # a damaged pickle raises any error
        raise damage(path, f"cannot be unpickled safely ({error})", "the Python version of CIFAR") from error
    match content.get(b"data"):
        case _Recorded(
            state=(_, (int() as rows, int() as width), _Recorded(arguments=(b"u1" | "u1", *_)), False, entries)
        ):
            body = _as_bytes(entries)
            if isinstance(body, bytes) and width == columns and len(body) == rows * width:
                return numpy.frombuffer(body, numpy.uint8).reshape(rows, width), content
    raise damage(path, "has other images under the key data", f"an array of (N, {columns}) bytes")
