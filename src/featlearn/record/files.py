"""The files of a run, in a directory or an archive: only those that belong to it, never larger than they may be.

Nothing is unpacked to disk, no link is followed, and a small file that unpacks to a huge one is refused.
"""

import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, Protocol

from featlearn.errors import RunError
from featlearn.record.layout import ARRAYS, EVENTS, LONGEST_NAME, RUN, SCALARS, named_array

# What a compressed file may unpack to: this much in any case, or so many times what it takes on disk.
# Numbers as text shrink 5 times; deflate reaches 1000.
ALWAYS, _RATIO = 2**23, 50
# The others (lzma, bzip2) reserve what a header asks for.
_COMPRESSIONS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}


class Files(Protocol):
    """A directory or an archive."""

    def names(self) -> list[str]:
        """The places that belong to a run."""

    def weight(self, place: str) -> int | None:
        """Bytes that it takes on disk, None if it is not there."""

    def read(self, place: str, most: int) -> bytes | None:
        """What it holds, None if it is not there; more than `most` bytes are refused."""


def opened(path: Path) -> Files:
    """The files of the run at `path`."""
    try:
        if path.is_dir():
            return _Directory(path)
        if path.is_file():
            return _Archive(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    raise RunError(f"{path} is not there, expected the directory or the .zip of a run")


def allowed(weight: int, most: int) -> int:
    """Bytes that a file of `weight` bytes on disk may unpack to."""
    return min(most, max(ALWAYS, _RATIO * weight))


def member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, *, size: int, most: int) -> bytes:
    """One member of an archive of `size` bytes, refused if it unpacks to more than `most`."""
    name = repr(info.filename[:80])
    if info.compress_type not in _COMPRESSIONS:
        raise RunError(f"{name} is compressed in a way that is not read, expected stored or deflated")
    if info.file_size > most or info.compress_size > size:
        raise RunError(
            f"{name} takes {info.compress_size} bytes and unpacks to {info.file_size}, expected at most "
            f"{most}; if you trust it, unpack the archive and open the directory"
        )
    with archive.open(info) as file:
        content = file.read(info.file_size + 1)  # checks the sum at the end
    if len(content) != info.file_size:
        raise RunError(f"{name} is damaged: it is not as long as it says")
    return content


@contextmanager
def damage(where: object) -> Iterator[None]:
    """Whatever goes wrong inside becomes a `RunError`: zlib, zipfile, numpy and the system each have their own."""
    try:
        yield
    except RunError as error:
        raise RunError(f"{where}: {error}") from error
    except Exception as error:
        raise RunError(f"{where} is damaged or cannot be read: {str(error)[:200] or type(error).__name__}") from error


class _Directory:
    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> list[str]:
        found = [name for name in (RUN, SCALARS, EVENTS) if self.weight(name) is not None]
        if self._lies(ARRAYS):
            for folder, folders, files in os.walk(self._path / ARRAYS, onerror=_refuse):
                inside = Path(folder).relative_to(self._path)
                if len(inside.parts) > LONGEST_NAME:  # no array lies so deep
                    folders.clear()
                for name in folders:
                    self._lies((inside / name).as_posix())
                found += filter(named_array, ((inside / name).as_posix() for name in files))
        return sorted(found)

    def weight(self, place: str) -> int | None:
        status = self._lies(place)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def read(self, place: str, most: int) -> bytes | None:
        if self.weight(place) is None:  # a pipe or a device is not there either
            return None
        with damage(self._path / place), (self._path / place).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise RunError(f"it is larger than {most} bytes, expected the file of a run")
            return file.read(size)  # not what is being added

    def _lies(self, place: str) -> os.stat_result | None:
        """What lies at a place; links are refused, for they may lead to files that are not of the run."""
        path = self._path
        status = None
        for part in place.split("/"):
            path = path / part
            try:
                status = path.lstat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                raise RunError(f"{path} cannot be read: {error}") from error
            if stat.S_ISLNK(status.st_mode):
                raise RunError(f"{path} is a link, expected a file of the run; put what it names in its place")
        return status


class _Archive:
    def __init__(self, path: Path) -> None:
        self._path = path
        with damage(path):
            self._size = path.stat().st_size
            self._archive = zipfile.ZipFile(path)  # kept open: its table is read once
            self._members = {info.filename: info for info in self._archive.infolist() if _belongs(info.filename)}

    def names(self) -> list[str]:
        return sorted(self._members)

    def weight(self, place: str) -> int | None:
        info = self._members.get(place)
        return None if info is None else min(info.compress_size, self._size)

    def read(self, place: str, most: int) -> bytes | None:
        info, weight = self._members.get(place), self.weight(place)
        if info is None or weight is None:
            return None
        with damage(self._path):
            return member(self._archive, info, size=self._size, most=allowed(weight, most))


def _belongs(place: str) -> bool:
    return place in (RUN, SCALARS, EVENTS) or named_array(place) is not None


def _refuse(error: OSError) -> NoReturn:
    raise RunError(f"{error.filename} cannot be read: {error}") from error
