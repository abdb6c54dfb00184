"""Kernels in files: written tile by tile, read by blocks of rows."""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError

BLOCK = 2**23
"""Entries of a kernel that are read at a time."""


class StoredKernel:
    """A kernel in a `.npy` file, written by `fl.ntk(..., out=path)`. Only what is asked for is read into memory.

    `stored[rows, columns]` is a tensor and takes the same indices as one. `fl.metrics.alignment`, `centered_alignment`,
    `spectrum(top=k)`, `predicted_risk` and `fl.dynamics.kernel_regression` accept a stored kernel and read it by
    blocks of rows.

    >>> kernel = fl.StoredKernel("kernel.npy")
    >>> corner = kernel[:100, :100]  # (100, 100)
    >>> product = kernel @ torch.randn(len(kernel), 3)  # (P, 3), float64

    Args:
        path: Path that was passed as `out=`. The file `<path>.manifest` must lie beside it.
        part: Name of a layer or parameter, if the kernel was measured with `by=`.
    """

    def __init__(self, path: str | Path, part: str = "") -> None:
        self.path, self.part = Path(path), part
        self._header, self._tiles = read_manifest(self.path)
        self.parts: list[str] = self._header["parts"]
        """Names of all kernels in the file; `[""]` for the kernel of the network."""
        if part not in self.parts:
            names = ", ".join(repr(name) for name in self.parts[:5])
            raise InputValueError(f"part={part!r}, expected one of the {len(self.parts)} kernels in {path}: {names}")
        self.shape: tuple[int, int] = tuple(self._header["shape"])
        """(P, P2)"""
        self.symmetric: bool = self._header["symmetric"]
        """Whether it is the kernel of one batch with itself."""
        self.scale: float = self._header["scale"]
        """Factor of the numbers in the file; 1 unless they are float16."""

    @property
    def device(self) -> torch.device:
        """The CPU, where blocks are read to."""
        return torch.device("cpu")

    @property
    def precision(self) -> float:
        """Relative rounding error of the numbers in the file."""
        return float(numpy.finfo(self._header["dtype"]).eps)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        name = f" of {self.part!r}" if self.part else ""
        state = "" if self.done else f", {len(self._tiles)} of {self._count} tiles written"
        return (
            f"StoredKernel({str(self.path)!r}{name}, {self.shape[0]} x {self.shape[1]} {self._header['dtype']}{state})"
        )

    @property
    def done(self) -> bool:
        """Whether all tiles are written."""
        return len(self._tiles) == self._count

    @property
    def _count(self) -> int:
        return len(tile_places(self._header))

    @property
    def rounding(self) -> float:
        """Norm of what rounding to the file's dtype changed, divided by the norm of the kernel; 0 for none."""
        lost, total = (sum(tile[key][self.parts.index(self.part)] for tile in self._tiles.values()) for key in _SUMS)
        return float((lost / total) ** 0.5) if total else 0.0

    def numpy(self) -> numpy.memmap[Any, Any]:
        """Return the numbers in the file as a read-only memory map (P, P2); the kernel is `.scale` times them."""
        if not self.done:
            raise InputValueError(
                f"{self.path} has {len(self._tiles)} of {self._count} tiles, expected all: call fl.ntk with the same "
                "arguments again to write the rest"
            )
        whole: Any = numpy.load(self.path, mmap_mode="r")
        found: numpy.memmap[Any, Any] = whole if len(self.parts) == 1 else whole[self.parts.index(self.part)]
        return found

    def __getitem__(self, index: Any) -> Tensor:
        index = tuple(numpy.asarray(i) if isinstance(i, Tensor) else i for i in _as_tuple(index))
        return self._tensor(self.numpy()[index])

    def _tensor(self, stored: Any) -> Tensor:
        numbers = torch.from_numpy(numpy.array(stored))
        return numbers.float().mul_(self.scale) if numbers.dtype == torch.float16 else numbers

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of rows in float64: their place, and the entries (rows, P2)."""
        stored, step = self.numpy(), max(1, BLOCK // self.shape[1])
        for begin in range(0, len(self), step):
            rows = slice(begin, min(begin + step, len(self)))
            yield rows, self._tensor(stored[rows]).double()

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """K v for (P2,) or (P2, m), in float64."""
        return torch.cat([block @ vectors.double() for _, block in self.blocks()])

    @cached_property
    def diagonal(self) -> Tensor:
        """(P,) entries K(x_i, x_i), float64."""
        return self._tensor(self.numpy().diagonal()).double()


_SUMS = ("lost", "squares")
"""Sums over the entries of a tile, by kernel: squared rounding errors, and squares."""


def _as_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def manifest_path(path: Path) -> Path:
    """Return where the progress of a kernel is written: a header, and a line for every tile, JSON."""
    return path.with_name(path.name + ".manifest")


def read_manifest(path: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the header of a stored kernel, and its finished tiles by number."""
    manifest = manifest_path(path)
    lines = manifest.read_text().split("\n")[:-1] if manifest.exists() else []
    if not lines:
        raise InputValueError(
            f"{manifest} does not exist, expected a kernel that fl.ntk(..., out={str(path)!r}) has written"
        )
    header, *tiles = map(json.loads, lines)
    return header, {tile["tile"]: tile for tile in tiles}


def tile_places(header: Mapping[str, Any]) -> list[tuple[slice, slice]]:
    """Return rows and columns of all tiles; of a symmetric kernel those of the lower triangle."""
    rows, columns = (
        [slice(begin, min(begin + header["tile"], count)) for begin in range(0, count, header["tile"])]
        for count in header["shape"]
    )
    return [(i, j) for i in rows for j in columns if not header["symmetric"] or j.start <= i.start]


class KernelFile:
    """The file of a kernel while it is written. Each finished tile is on disk before the manifest says so."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, leads: bool = True) -> None:
        self.header: dict[str, Any] = json.loads(json.dumps(header))
        self._path, self._dtype = path, numpy.dtype(header["dtype"])
        shape = tuple(header["shape"]) if len(header["parts"]) == 1 else (len(header["parts"]), *header["shape"])
        head = BytesIO()
        numpy.lib.format.write_array_header_1_0(
            head, {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        )
        self._head = head.getvalue()
        self._size = len(self._head) + int(numpy.prod(shape)) * self._dtype.itemsize
        new = [file for file in (path, manifest_path(path)) if leads and not file.exists()]
        self._manifest = manifest_path(path).open("ab", buffering=0)
        try:
            if leads:
                _lock(self._manifest, path)
                self._begin()
            else:
                self._compare(*read_manifest(path))
            self.header, self._tiles = read_manifest(path)
        except BaseException:
            self.close()
            for file in new:
                file.unlink(missing_ok=True)
            raise

    @property
    def missing(self) -> list[tuple[int, slice, slice]]:
        """Number, rows and columns of the tiles that are not written."""
        places = enumerate(tile_places(self.header))
        return [(number, *place) for number, place in places if number not in self._tiles]

    def _begin(self) -> None:
        """Compare with the call that began the file, or reserve the space for a new one."""
        begun = manifest_path(self._path).read_bytes()
        self._manifest.truncate(begun.rfind(b"\n") + 1)  # a line without its end belongs to a call that was killed
        if b"\n" in begun:
            stored, tiles = read_manifest(self._path)
            if tiles:
                self._compare(stored, tiles)
                return
        elif self._path.exists():
            raise InputValueError(f"{self._path} exists and has no manifest, expected a new file; remove it first")
        free = free_disk(self._path) + (self._path.stat().st_size if self._path.exists() else 0)
        full = InputValueError(
            f"out={str(self._path)!r} takes {self._size / 1e9:.3g} GB and {free / 1e9:.3g} GB are free on that disk, "
            "expected room for all of it; out_dtype=torch.float16 takes half of float32"
        )
        if self._size > free:
            raise full
        self._manifest.truncate(0)
        self._manifest.write((json.dumps(self.header) + "\n").encode())
        with self._path.open("wb") as file:
            file.write(self._head)
            file.flush()
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, self._size)
                file.truncate(self._size)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise full from error
                file.truncate(self._size)  # a file system that reserves no space

    def _compare(self, stored: dict[str, Any], tiles: Mapping[int, Any]) -> None:
        """Refuse a call with other arguments, data or weights than the one that began the file."""
        differing = _first_difference(stored["call"], self.header["call"])
        if differing is not None:
            raise InputValueError(
                f"{self._path} was begun by another call: {differing} differs, expected the same model, data and "
                f"arguments; pass another out=, or remove {self._path} and its manifest"
            )
        then, now = (torch.tensor(header["outputs"], dtype=torch.float64) for header in (stored, self.header))
        if then.shape != now.shape or not torch.allclose(then, now, rtol=1e-3, atol=1e-3 * float(then.abs().max())):
            raise InputValueError(
                f"{self._path} was begun by another call: the model's outputs differ for the same weights and samples, "
                "expected the same network and readout; pass another out="
            )
        if tiles and (not self._path.exists() or self._path.stat().st_size != self._size):
            raise InputValueError(
                f"{self._path} is missing or has another size, expected the file of its manifest; remove both"
            )

    def write(self, number: int, kernels: Mapping[str, Tensor]) -> None:
        """Write a tile of every kernel, and its mirror image if the kernel is symmetric."""
        rows, columns = tile_places(self.header)[number]
        sums: dict[str, list[float]] = {key: [] for key in _SUMS}
        with self._path.open("r+b", buffering=0) as file:
            for place, name in enumerate(self.header["parts"]):
                mirrored = self.header["symmetric"] and rows != columns
                lost = squares = 0.0
                for first in range(0, rows.stop - rows.start, 256):
                    values = kernels[name][first : first + 256].cpu()
                    stored = self._rounded(values)
                    begin = rows.start + first
                    self._put(file, place, slice(begin, begin + len(stored)), columns, stored)
                    if stored.itemsize < values.itemsize:
                        back = torch.from_numpy(stored).double() * self.header["scale"]
                        lost += float((back - values).square().sum()) * (1 + mirrored)
                        squares += float(values.double().square().sum()) * (1 + mirrored)
                for first in range(0, columns.stop - columns.start if mirrored else 0, 256):
                    values = kernels[name][:, first : first + 256].T.contiguous().cpu()
                    begin = columns.start + first
                    self._put(file, place, slice(begin, begin + len(values)), rows, self._rounded(values))
                sums["lost"].append(lost)
                sums["squares"].append(squares)
            os.fsync(file.fileno())
        self._manifest.write((json.dumps({"tile": number, **sums}) + "\n").encode())
        os.fsync(self._manifest.fileno())

    def _rounded(self, values: Tensor) -> Any:
        with numpy.errstate(over="ignore"):
            stored = (values / self.header["scale"]).numpy().astype(self._dtype, copy=False)
        if self._dtype == numpy.float16 and not numpy.isfinite(stored).all():
            raise InputValueError(
                "the kernel has entries that float16 cannot hold beside those of its first samples, expected a ratio "
                "below 128; leave out_dtype= out"
            )
        return stored

    def _put(self, file: IO[bytes], part: int, rows: slice, columns: slice, values: Any) -> None:
        height, width = self.header["shape"]
        for row, numbers in zip(range(rows.start, rows.stop), values, strict=True):
            file.seek(len(self._head) + ((part * height + row) * width + columns.start) * self._dtype.itemsize)
            view = memoryview(numpy.ascontiguousarray(numbers).data).cast("B")
            while view:
                view = view[file.write(view) :]

    def close(self) -> None:
        """Close the manifest, and let other processes write."""
        self._manifest.close()


def stored_square(kernel: StoredKernel) -> StoredKernel:
    """Return a kernel of one batch with itself; raise for a cross kernel."""
    if not kernel.symmetric:
        raise InputValueError(
            f"K is a cross kernel of shape {kernel.shape}, expected the kernel of one batch: fl.ntk without x2"
        )
    return kernel


def overlap_and_norm(kernel: StoredKernel, targets: Tensor, *, centered: bool = False) -> tuple[Tensor, Tensor]:
    """Trace of Y^T K Y for targets (P, C), and |K|_F, of H K H with H = I - 1 1^T / P if `centered`."""
    samples = len(kernel)
    means = kernel @ targets.new_full((samples,), 1.0 / samples) if centered else targets.new_zeros(samples)
    overlap = squares = targets.new_zeros(())
    for rows, block in kernel.blocks():
        block = block - means[rows, None] - means + means.mean()
        overlap = overlap + (targets[rows] * (block @ targets)).sum()
        squares = squares + block.square().sum()
    return overlap, squares.sqrt()


def free_disk(path: Path) -> int:
    """Return the free bytes on the disk of a file."""
    return shutil.disk_usage(path.parent).free


def _first_difference(stored: Mapping[str, Any], call: Mapping[str, Any]) -> str | None:
    for name in {**stored, **call}:
        then, now = stored.get(name), call.get(name)
        if isinstance(then, dict) and isinstance(now, dict):
            inside = _first_difference(then, now)
            if inside is not None:
                return f"{name} {inside}".rstrip()
        elif then != now:
            return name
    return None


def _lock(manifest: IO[bytes], path: Path) -> None:
    """Refuse a second process that writes the same kernel. A killed process holds no lock."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputValueError(f"another process is writing {path}, expected one; wait for it, or end it") from None
    except OSError:  # a file system without locks
        return


def checked_path(out: object) -> Path:
    """Return the path of a kernel to write."""
    if not isinstance(out, str | os.PathLike):
        raise InputTypeError(f"out is {type(out).__name__}, expected a path such as 'kernel.npy'")
    path = Path(out)
    if path.suffix != ".npy" or not path.parent.is_dir():
        raise InputValueError(f"out={str(path)!r}, expected a file named .npy in a folder that exists")
    return path
