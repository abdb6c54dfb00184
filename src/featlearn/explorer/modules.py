"""ES modules as one classic script, without tools: a page that opens from disk cannot import files.

Modules import by `import { a, b } from "./x.mjs";` or `import * as x from "./x.mjs";` and export functions, classes and
constants where they are declared. Each becomes a function of its own, so that names do not meet.
"""

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator

_IMPORT = re.compile(r'^import (?:\{([^}]*)\}|\* as (\w+)) from "(\.[^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)
_OTHER = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)
_COMMENT = re.compile(r"^[ \t]*/\*\*(?:(?!\*/).)*\*/\n", re.MULTILINE | re.DOTALL)

REGISTRY = "featlearnModules"
"""The global name under which scripts of one page share their modules."""


def module_order(entry: str, read: Callable[[str], str], known: Iterable[str] = ()) -> list[str]:
    """Paths of the modules that `entry` needs, itself last, each after what it imports; without the known ones."""
    found = list(known)
    begun = set(found)

    def visit(path: str) -> None:
        begun.add(path)
        for needed in _needed(path, read(path)):
            if needed not in begun:
                visit(needed)
            elif needed not in found:
                raise ValueError(f"{path} and {needed} import each other, expected modules without a circle")
        found.append(path)

    visit(entry)
    return found[len(list(known)) :]


def bundle(paths: Iterable[str], read: Callable[[str], str]) -> str:
    """One script that defines these modules, in this order; documentation comments are left out."""
    return "".join(_definition(path, read) for path in paths)


def _needed(path: str, source: str) -> Iterator[str]:
    for match in _IMPORT.finditer(source):
        yield _resolve(path, match[3])


def _resolve(path: str, relative: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), relative))


def _exported_names(source: str) -> list[str]:
    return [match[2] for match in _EXPORT.finditer(source)]


def _definition(path: str, read: Callable[[str], str]) -> str:
    source = read(path)

    def declared(match: re.Match[str]) -> str:
        origin, parts = (
            _resolve(path, match[3]),
            [part.strip() for part in (match[1] or "").split(",") if part.strip()],
        )
        missing = {part.split(" as ")[0] for part in parts} - set(_exported_names(read(origin)))
        if missing:
            raise ValueError(f"{path} imports {', '.join(missing)}, expected names that {origin} exports, one by one")
        bound = match[2] or "{" + ",".join(part.replace(" as ", ": ") for part in parts) + "}"
        return f'const {bound} = {REGISTRY}["{origin}"];\n'

    body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(declared, _COMMENT.sub("", source)))
    left = _OTHER.search(body)
    if left:
        raise ValueError(f"{path} has the line {left[0]!r}, expected imports and exports in the form of modules.py")
    first, names = f"globalThis.{REGISTRY} ??= {{}};\n", ", ".join(_exported_names(source))
    return f'{first}{REGISTRY}["{path}"] = (() => {{\n"use strict";\n{body}return {{ {names} }};\n}})();\n'
