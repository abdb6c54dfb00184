"""The part of a figure's source that its numbers depend on: a caption may be mended without running all seeds again."""

import ast
import inspect
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SHARED = "featlearn.papers.paper_"
"""modules of figures, which may share code"""


def behind(function: Callable[..., Any]) -> str:
    """All definitions of its module that a function reaches, and whole modules of other figures that these import.

    Without comments and docstrings. The library itself is not in it: it changes every day, and mostly not the numbers.
    """
    module = inspect.getmodule(function)
    if module is None:
        return ""
    # not through a cache that knows the file of an hour ago
    source = Path(str(module.__file__)).read_text(encoding="utf-8") if getattr(module, "__file__", None) else ""
    defined = {name: node for node in ast.parse(source).body for name in _names(node)}
    reached: dict[str, str] = {}
    waiting = [function.__name__]
    while waiting:
        name = waiting.pop()
        if name in reached or name not in defined:
            continue
        reached[name] = _text(defined[name])
        waiting += [node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)]
    return "\n".join(reached[name] for name in sorted(reached))


def _names(node: ast.stmt) -> Iterator[str]:
    """What a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.ImportFrom | ast.Import):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
    else:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name))


def _text(node: ast.stmt) -> str:
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(SHARED):
        spec = find_spec(str(node.module))
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).read_text(encoding="utf-8")
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef):
            inner.body = [one for one in inner.body if not _is_string(one)] or [ast.Pass()]
    return ast.dump(node)


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
