"""Files of a run in a directory or an archive, limited to known names and sizes.

Nothing is unpacked to disk, no link is followed, and archive bombs raise an error.
"""

import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from featlearn.errors import RunError
from featlearn.record.layout import ARRAYS, EVENTS, LONGEST_NAME, RUN, SCALARS, named_array

# Largest unpacked size of a compressed file: ALWAYS bytes, or _RATIO times its size on disk. Text of numbers is
# compressed 5 times; deflate reaches 1000.
ALWAYS, _RATIO = 2**23, 50
# Other methods (lzma, bzip2) allocate whatever a header states.
_COMPRESSIONS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}


def open_files(path: Path) -> "_Directory | _Archive":
    """Open the files of the run at `path`."""
    try:
        if path.is_dir():
            return _Directory(path)
        if path.is_file():
            return _Archive(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    raise RunError(f"{path} does not exist, expected the directory or the .zip of a run")


def allowed(weight: int, most: int) -> int:
    """Return the largest unpacked size of a file of `weight` bytes on disk."""
    return min(most, max(ALWAYS, _RATIO * weight))


def member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, *, size: int, most: int) -> bytes:
    """Read a member of an archive of `size` bytes; raise if it unpacks to more than `most` bytes."""
    name = repr(info.filename[:80])
    if info.compress_type not in _COMPRESSIONS:
        raise RunError(f"{name} has an unsupported compression, expected stored or deflated")
    if info.file_size > most or info.compress_size > size:
        raise RunError(
            f"{name} takes {info.compress_size} bytes and unpacks to {info.file_size}, expected at most "
            f"{most}; if you trust it, unpack the archive and open the directory"
        )
    with archive.open(info) as file:
        content = file.read(info.file_size + 1)  # checks the checksum at the end
    if len(content) != info.file_size:
        raise RunError(f"{name} is damaged: its length differs from its header")
    return content


@contextmanager
def damage(where: object) -> Iterator[None]:
    """Convert all exceptions inside to `RunError`; zlib, zipfile, numpy, and the system raise different ones."""
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
        """Return the paths that belong to the run."""
        names = [name for name in (RUN, SCALARS, EVENTS) if self.weight(name) is not None]
        if self._status(ARRAYS):
            for folder, folders, files in os.walk(self._path / ARRAYS, onerror=_refuse):
                inside = Path(folder).relative_to(self._path)
                if len(inside.parts) > LONGEST_NAME:  # deeper than any array
                    folders.clear()
                for name in folders:
                    self._status((inside / name).as_posix())
                names += filter(named_array, ((inside / name).as_posix() for name in files))
        return sorted(names)

    def weight(self, place: str) -> int | None:
        """Return the size on disk in bytes; None if the file does not exist."""
        status = self._status(place)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def read(self, place: str, most: int) -> bytes | None:
        """Return the content, None if the file does not exist; raise if it exceeds `most` bytes."""
        if self.weight(place) is None:  # pipes and devices do not count as files
            return None
        with damage(self._path / place), open(self._path / place, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):  # a pipe that took the place of the file since
                return None
            if size > most:
                raise RunError(f"it is larger than {most} bytes, expected the file of a run")
            return file.read(size)  # excludes bytes appended meanwhile

    def _status(self, place: str) -> os.stat_result | None:
        """Return the status of a path, or None; raise for links, which may lead outside the run."""
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
                raise RunError(f"{path} is a link, expected a file of the run; replace it by its target")
        return status


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for a writer, as a pipe would."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


class _Archive:
    """The same of a .zip."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with damage(path):
            self._size = path.stat().st_size
            self._archive = zipfile.ZipFile(path)  # stays open, so that its directory is read once
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
