"""Lines that were added to a file of a run since the last look."""

import os
import stat
from pathlib import Path

from featlearn.errors import RunError
from featlearn.record.files import opened
from featlearn.record.layout import LARGEST_TEXT


class GrowingLines:
    """Reads a file of a run from where it stopped; the file is open only while it is read."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._offset, self._file = 0, 0
        self.more = False
        """Whether the last call left something, because there was more than it may read at once."""

    def read(self, most: int) -> tuple[list[bytes], bool]:
        """Whole lines among the next `most` bytes, and whether the file begins anew: it was replaced or became shorter.

        Links, files that no run can have, and lines longer than `most` are refused.
        """
        self.more = False
        where = self._folder / self._name
        if opened(self._folder).weight(self._name) is None:  # refuses links
            return [], False
        try:
            content, anew = self._bytes(where, most)
        except OSError as error:
            raise RunError(f"{where} cannot be read: {error.strerror or error}") from error
        end = content.rfind(b"\n") + 1
        if not end and len(content) == most:
            raise RunError(f"{where} has a line of more than {most} bytes, expected the lines of a run")
        self._offset += end
        self.more = len(content) == most
        return content[:end].splitlines(keepends=True), anew

    def _bytes(self, where: Path, most: int) -> tuple[bytes, bool]:
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(where, flags), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_TEXT:
                raise RunError(f"{where} is no file of a run, expected one of at most {LARGEST_TEXT} bytes")
            anew = self._file not in (0, status.st_ino) or status.st_size < self._offset
            if anew:
                self._offset = 0
            self._file = status.st_ino
            file.seek(self._offset)
            return file.read(most), anew
