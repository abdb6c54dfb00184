"""Print the shape of the package: chains of imports, imports per module, names defined twice, lines per room.

    python benchmarks/shape.py

Imports are read from the text. A chain counts imports that run when a module loads; the number of imports of a module
counts those inside its functions, too.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Collection
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "featlearn"
HEART = {
    *("network", "graph", "ops", "separation", "gradients", "audit", "planning", "contraction", "kernel"),
    *("request", "measurement", "audited_model", "session", "torch_internals"),
}
"""Rooms and modules between a model and its kernel."""


class Shape:
    """Imports and definitions of all modules of a package."""

    def __init__(self, root: Path = ROOT) -> None:
        self.files = {_name(path, root): path for path in sorted(root.rglob("*.py"))}
        """Module name without the package's own -> file."""
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.files.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> modules of the package that it imports anywhere."""
        return {name: self._imports(name, loading=False) for name in self.files}

    @cached_property
    def loaded(self) -> dict[str, set[str]]:
        """Module -> modules of the package that load with it."""
        return {name: self._imports(name, loading=True) for name in self.files}

    @cached_property
    def longest_chain(self) -> list[str]:
        """Modules that import one another when they load, as long as there are any."""
        chains: dict[str, list[str]] = {}

        def chain(name: str) -> list[str]:
            if name not in chains:
                chains[name] = [name, *max((chain(other) for other in self.loaded[name]), key=len, default=[])]
            return chains[name]

        return max(map(chain, self.files), key=len)

    @cached_property
    def classes(self) -> dict[str, list[str]]:
        """Class name -> modules that define it."""
        places: dict[str, list[str]] = defaultdict(list)
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(name)
        return places

    @cached_property
    def lines(self) -> Counter[str]:
        """Room -> lines of its files."""
        rooms: Counter[str] = Counter()
        for name, path in self.files.items():
            rooms[name.split(".")[0]] += len(path.read_text().splitlines())
        return rooms

    def used_twice(self, rooms: Collection[str] = ()) -> dict[str, list[str]]:
        """Class names that several modules define, of some rooms or of all -> these modules."""
        places = {
            name: [module for module in modules if not rooms or module.split(".")[0] in rooms]
            for name, modules in self.classes.items()
        }
        return {name: modules for name, modules in places.items() if len(modules) > 1}

    def _imports(self, name: str, *, loading: bool) -> set[str]:
        """Return the modules that one imports: all, or those that load with it."""
        found: set[str] = set()
        waiting: list[ast.AST] = [self.trees[name]]
        while waiting:
            node = waiting.pop()
            late = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if loading and (late or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))):
                continue
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("featlearn."):
                base = str(node.module).removeprefix("featlearn.")
                found |= {
                    f"{base}.{alias.name}" if f"{base}.{alias.name}" in self.files else base for alias in node.names
                }
            waiting.extend(ast.iter_child_nodes(node))
        return found & self.files.keys() - {name}


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def main() -> None:
    """Print the shape."""
    shape = Shape()
    print(f"{sum(shape.lines.values())} lines in {len(shape.files)} modules")
    print(f"{sum(shape.lines[room] for room in HEART)} lines from a model to its kernel")
    print(", ".join(f"{room} {count}" for room, count in shape.lines.most_common()))
    print(f"longest chain of imports, {len(shape.longest_chain)}: {' > '.join(shape.longest_chain)}")
    widest = sorted(((len(others), name) for name, others in shape.imports.items()), reverse=True)[:10]
    print("most imports:", ", ".join(f"{name} {count}" for count, name in widest))
    modules: dict[str, list[str]] = defaultdict(list)
    for name in shape.files:
        modules[name.split(".")[-1]].append(name)
    several = {name: places for name, places in modules.items() if len(places) > 1}
    for title, twice in (("classes", shape.used_twice()), ("modules", several)):
        listed = "; ".join(f"{name}: {', '.join(places)}" for name, places in twice.items())
        print(f"{len(twice)} {title} with a name used twice: {listed}")


if __name__ == "__main__":
    main()
