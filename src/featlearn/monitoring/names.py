"""Layer names that are valid as parts of paths and as column heads."""

import hashlib
import re

LONGEST = 80
"""Characters of a name, at most: two of them must fit into the name of a scalar."""


def safe(name: str) -> str:
    """A name with `_` for every character that cannot be recorded; the root module is `root`."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name) or "root"
    plain = re.sub(r"^[.-]", "_", plain)
    plain = re.sub(r"\.$", "_", plain)
    if len(plain) <= LONGEST:
        return plain
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    # the end of a long name identifies the layer better than its beginning
    return f"{mark}_{plain[len(mark) + 1 - LONGEST :]}"


def safe_path(name: str) -> str:
    """A name of the user, made safe part by part between slashes."""
    return "/".join(safe(part) for part in name.split("/"))


class Names(dict[str, str]):
    """Layer name -> the unique name under which it is recorded."""

    def __missing__(self, name: str) -> str:
        found, number, taken = safe(name), 1, set(self.values())
        while found in taken:
            number += 1
            found = f"{safe(name)[: LONGEST - 5]}_{number}"
        self[name] = found
        return found
