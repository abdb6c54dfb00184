"""The source that the results of a function depend on: a plot beside it may change without running it again."""

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec, resolve_name
from itertools import groupby
from pathlib import Path
from typing import Any


def reachable_source(
    function: Callable[..., Any],
    shared: str | None = None,
    former_names: Mapping[str, str] | None = None,
    former_code: Mapping[str, str] | None = None,
) -> str:
    """Return the definitions that a function reaches in its module, without comments and docstrings.

    Empty for a function that is not defined at the top of a file. Other modules are left out, because the library
    changes every day and its numbers rarely do.

    Args:
        function: Function to follow.
        shared: Prefix of module names; modules with it that the definitions import are added whole.
        former_names: Prefixes of module names, replaced in imports: code that has moved keeps its text.
        former_code: Dotted names and import statements, replaced by their former ones. An empty one is removed.
    """
    module = inspect.getmodule(function)
    if module is None or getattr(module, "__file__", None) is None:
        return ""
    defined = {name: node for node in _parsed(str(module.__file__)).body for name in _names(node)}
    reached: dict[str, ast.stmt] = {}
    waiting = [function.__name__]
    while waiting:
        name = waiting.pop()
        if name in reached or name not in defined:
            continue
        reached[name] = defined[name]
        waiting += [node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)]
    behind = {} if shared is None else _shared(reached.values(), module.__package__ or "", shared)
    former = _FormerCode(former_code or {})
    texts = (
        _text(node, former_names or {})
        for nodes in (reached, behind)
        for name in sorted(nodes)
        if (node := former.visit(nodes[name])) is not None
    )
    return "\n".join(texts)


class _FormerCode(ast.NodeTransformer):
    """Replace names and import statements by their former ones."""

    def __init__(self, former: Mapping[str, str]) -> None:
        self.former = former

    def visit(self, node: ast.AST) -> Any:
        match node:
            case ast.Attribute() | ast.ImportFrom() if (text := ast.unparse(node)) in self.former:
                body = ast.parse(self.former[text]).body
                return None if not body else body[0].value if isinstance(body[0], ast.Expr) else body[0]
            case ast.Constant(value=str() as text) if text in self.former:  # a quoted annotation
                return ast.Constant(self.former[text])
        return self.generic_visit(node)


def _parsed(path: str) -> ast.Module:
    # from the disk, not through a cache that knows the file of an hour ago
    return ast.parse(Path(path).read_text(encoding="utf-8"))


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


def _shared(nodes: Iterable[ast.AST], package: str, prefix: str) -> dict[str, ast.Module]:
    """Modules with this prefix that are imported in the nodes, and in these modules in turn, by name."""
    found: dict[str, ast.Module] = {}
    waiting = [name for node in nodes for name in _imported(node, package, prefix)]
    while waiting:
        name = waiting.pop()
        origin = None if name in found else _origin(name)
        if origin is None:
            continue
        found[name] = _parsed(origin)
        own = name if origin.endswith("__init__.py") else name.rpartition(".")[0]
        waiting += _imported(found[name], own, prefix)
    return found


def _imported(node: ast.AST, package: str, prefix: str) -> Iterator[str]:
    """Names with this prefix that may be modules, from imports anywhere in a node, inside functions too."""
    names: list[str] = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.ImportFrom):
            base = resolve_name("." * inner.level + (inner.module or ""), package)
            # `from paper_003 import chain` may mean the module paper_003.chain
            names += [base, *(f"{base}.{alias.name}" for alias in inner.names)]
        elif isinstance(inner, ast.Import):
            names += [alias.name for alias in inner.names]
    return (name for name in names if name.startswith(prefix))


def _origin(name: str) -> str | None:
    """The file of a module; None where the name is that of something inside a module."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        return None
    return None if spec is None else spec.origin


def _text(node: ast.stmt | ast.Module, former_names: Mapping[str, str]) -> str:
    for inner in ast.walk(node):
        if isinstance(inner, ast.ImportFrom) and inner.module is not None:
            inner.module = _former(inner.module, former_names)
        elif isinstance(inner, ast.alias):
            inner.name = _former(inner.name, former_names)
        if isinstance(inner, ast.FunctionDef | ast.ClassDef | ast.Module):
            inner.body = [statement for statement in inner.body if not _is_string(statement)] or [ast.Pass()]
    if former_names and isinstance(node, ast.Module):
        node.body = _sorted_imports(node.body)
    return _dumped(node)


def _sorted_imports(body: list[ast.stmt]) -> list[ast.stmt]:
    """Sort adjacent imports of featlearn by module name: a module that has moved stands elsewhere among them."""
    ordered: list[ast.stmt] = []
    for is_import, group in groupby(body, _is_library_import):
        statements = list(group)
        if is_import:
            statements.sort(key=lambda node: getattr(node, "module", ""))
        ordered += statements
    return ordered


def _is_library_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith("featlearn")


def _former(name: str, former_names: Mapping[str, str]) -> str:
    """Replace the prefix of a module name by its former one."""
    prefix = next((new for new in former_names if name.startswith(new)), "")
    return former_names[prefix] + name.removeprefix(prefix) if prefix else name


def _dumped(thing: Any) -> str:
    """As `ast.dump`, without empty fields: versions of Python differ in these, and seeds are to be found by all."""
    if isinstance(thing, list):
        return f"[{', '.join(map(_dumped, thing))}]"
    if not isinstance(thing, ast.AST):
        return repr(thing)
    fields = (f"{name}={_dumped(value)}" for name, value in ast.iter_fields(thing) if value is not None and value != [])
    return f"{type(thing).__name__}({', '.join(fields)})"


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
