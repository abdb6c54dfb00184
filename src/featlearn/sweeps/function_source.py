"""Source code that the results of a function depend on, excluding unrelated code in the same file."""

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def reachable_source(function: Callable[..., Any]) -> str:
    """Return the definitions that a function reaches in its module, without comments and docstrings.

    The result is empty if the function is not defined at the top level of a file. Other modules are excluded: libraries
    change often, and their numbers rarely do.
    """
    definitions = reachable_definitions(function)
    return "\n".join(statement_text(definitions[name]) for name in sorted(definitions))


def reachable_definitions(function: Callable[..., Any]) -> dict[str, ast.stmt]:
    """Return the statements that a function reaches in its module, by the name that each defines."""
    module = inspect.getmodule(function)
    if module is None or getattr(module, "__file__", None) is None:
        return {}
    defined = {name: node for node in parsed_file(str(module.__file__)).body for name in _names(node)}
    reached: dict[str, ast.stmt] = {}
    pending = [function.__name__]
    while pending:
        name = pending.pop()
        if name in reached or name not in defined:
            continue
        reached[name] = defined[name]
        pending += [node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)]
    return reached


def parsed_file(path: str) -> ast.Module:
    """Parse a file from disk, bypassing caches that may be stale."""
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def statement_text(node: ast.stmt | ast.Module) -> str:
    """Return the text of a statement, which does not depend on comments, docstrings, or the version of Python."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef | ast.Module):
            inner.body = [statement for statement in inner.body if not _is_string(statement)] or [ast.Pass()]
    return _dump(node)


def _names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a top-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.ImportFrom | ast.Import):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
    else:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name))


def _dump(thing: Any) -> str:
    """Return `ast.dump` without empty fields, in which versions of Python differ."""
    if isinstance(thing, list):
        return f"[{', '.join(map(_dump, thing))}]"
    if not isinstance(thing, ast.AST):
        return repr(thing)
    fields = (f"{name}={_dump(value)}" for name, value in ast.iter_fields(thing) if value is not None and value != [])
    return f"{type(thing).__name__}({', '.join(fields)})"


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
