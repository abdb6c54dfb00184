"""Names of layers that can be recorded: parts of a path and heads of columns."""

import hashlib
import re

LONGEST = 80
"""Two names and what stands around them fit into the name of a scalar."""


def safe(name: str) -> str:
    """A name with `_` for every character that cannot be recorded; the root module is `root`."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name) or "root"
    plain = re.sub(r"^[.-]", "_", plain)
    plain = re.sub(r"\.$", "_", plain)
    if len(plain) <= LONGEST:
        return plain
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{mark}_{plain[len(mark) + 1 - LONGEST :]}"  # the end of a long name says more than its beginning


def safe_path(name: str) -> str:
    """A name of the user's, in parts divided by /."""
    return "/".join(safe(part) for part in name.split("/"))


class Names(dict[str, str]):
    """Name of a layer -> the one it is recorded under; two layers never share one."""

    def __missing__(self, name: str) -> str:
        found, number, taken = safe(name), 1, set(self.values())
        while found in taken:
            number += 1
            found = f"{safe(name)[: LONGEST - 5]}_{number}"
        self[name] = found
        return found
