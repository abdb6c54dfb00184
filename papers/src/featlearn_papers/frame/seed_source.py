"""The source that the numbers of a seed depend on, by the names that its modules had when seeds were first kept."""

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec, resolve_name
from itertools import groupby
from typing import Any

from featlearn.sweeps.function_source import parsed_file, reachable_definitions, statement_text

SHARED = "featlearn_papers.paper_"
"""Begins the names of modules of figures, which may share code."""
FORMER_NAMES = {
    "featlearn_papers.paper_": "featlearn.papers.paper_",
    "featlearn_papers.frame": "featlearn.papers",
    "featlearn_papers.data": "featlearn.data",
    "featlearn.models": "featlearn.papers.models",
}
"""Prefix of module names -> the former one, which cache keys hash, so that seeds of earlier versions are found."""
FORMER_CODE = {
    "from featlearn_papers import data": "",
    "data.Text": "fl.data.Text",
    "data.shakespeare": "fl.data.shakespeare",
}
"""Names and imports -> the former ones, for the same purpose."""


def source_text(measure: Callable[..., Any]) -> str:
    """Return the definitions that a function reaches in its module, and the modules of figures that they import."""
    reached = reachable_definitions(measure)
    module = inspect.getmodule(measure)
    package = "" if module is None else module.__package__ or ""
    former = _FormerCode(FORMER_CODE)
    texts = (
        _text(node)
        for nodes in (reached, shared_modules(reached.values(), package))
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


def shared_modules(nodes: Iterable[ast.AST], package: str) -> dict[str, ast.Module]:
    """Return the modules of figures that are imported in the nodes, and in these modules in turn, by name."""
    found: dict[str, ast.Module] = {}
    waiting = [name for node in nodes for name in _imported(node, package)]
    while waiting:
        name = waiting.pop()
        origin = None if name in found else _origin(name)
        if origin is None:
            continue
        found[name] = parsed_file(origin)
        own = name if origin.endswith("__init__.py") else name.rpartition(".")[0]
        waiting += _imported(found[name], own)
    return found


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    """Names with this prefix that may be modules, from imports anywhere in a node, inside functions too."""
    names: list[str] = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.ImportFrom):
            base = resolve_name("." * inner.level + (inner.module or ""), package)
            # `from paper_003 import chain` may mean the module paper_003.chain
            names += [base, *(f"{base}.{alias.name}" for alias in inner.names)]
        elif isinstance(inner, ast.Import):
            names += [alias.name for alias in inner.names]
    return (name for name in names if name.startswith(SHARED))


def _origin(name: str) -> str | None:
    """The file of a module; None where the name is that of something inside a module."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        return None
    return None if spec is None else spec.origin


def _text(node: ast.stmt | ast.Module) -> str:
    for inner in ast.walk(node):
        if isinstance(inner, ast.ImportFrom) and inner.module is not None:
            inner.module = _former(inner.module)
        elif isinstance(inner, ast.alias):
            inner.name = _former(inner.name)
    statement_text(node)  # removes docstrings, which would part adjacent imports
    if isinstance(node, ast.Module):
        node.body = _sorted_imports(node.body)
    return statement_text(node)


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


def _former(name: str) -> str:
    """Replace the prefix of a module name by its former one."""
    prefix = next((new for new in FORMER_NAMES if name.startswith(new)), "")
    return FORMER_NAMES[prefix] + name.removeprefix(prefix) if prefix else name
