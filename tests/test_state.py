"""No state at module level: what lives longer than a call belongs to an object that the user holds.

Tables that nothing changes are welcome. The registries below may grow, when a module or the user registers something.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import featlearn

ROOT = Path(featlearn.__file__).parent

REGISTRIES = {
    "featlearn.ops.registry": {"_RULES", "_BUILT_IN", "_FLOWS"},
    "featlearn.monitoring.ranks": {"_opened"},  # keys of the one store that a process has
}
"""Containers that may be changed by the functions of their module."""

CACHES = {
    "featlearn.citations": {"bibliography", "equations", "sources"},  # files of the package
    "featlearn.contraction.gram": {"cheaper_route"},  # arithmetic with sizes
    "featlearn.contraction.hardware": {"cache_bytes"},  # facts about the machine
    "featlearn.planning.memory": {"keep_released_memory"},  # done once in a process
    "featlearn.network.state": {"_kind_of"},  # facts about types
    "featlearn.network.large_weights": {"_written"},  # facts about ops
    "featlearn.separation": {"_schema"},  # facts about ops
    "featlearn.record.layout": {"checked_scalar_name"},  # of strings
    "featlearn.theory.early.words": {"cycle_weights"},  # of whole numbers
    "featlearn.cli.swept_function": {"_load"},  # a file of the user, run once in a worker process
}
"""Functions whose results may be kept: facts that no call can change."""

CONTAINERS = {
    "list",
    "dict",
    "set",
    "defaultdict",
    "OrderedDict",
    "Counter",
    "deque",
    "WeakKeyDictionary",
    "WeakSet",
    "WeakValueDictionary",
    "bytearray",
    "count",
    "local",
    "ContextVar",
}
STATEFUL = {"count", "local", "ContextVar", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary"}
"""Made to be changed, whatever their names are."""
CHANGING = {
    "add",
    "append",
    "appendleft",
    "clear",
    "discard",
    "extend",
    "insert",
    "move_to_end",
    "pop",
    "popitem",
    "popleft",
    "remove",
    "reverse",
    "set",
    "setdefault",
    "sort",
    "subtract",
    "update",
}


def called(node: ast.AST) -> str:
    """The last name of what a call calls: `defaultdict` of `collections.defaultdict(list)`."""
    function = node.func if isinstance(node, ast.Call) else node
    function = function.value if isinstance(function, ast.Subscript) else function
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_container(value: ast.AST | None) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    if isinstance(value, ast.BinOp):
        return is_container(value.left) or is_container(value.right)
    return isinstance(value, ast.Call) and (called(value) in CONTAINERS or called(value) == "fromkeys")


def assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.AST | None]]:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id, statement.value
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value
            elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                for one, value in zip(target.elts, statement.value.elts, strict=False):
                    if isinstance(one, ast.Name):
                        yield one.id, value


def base(node: ast.AST) -> str:
    """The name at the front of `name[...][...]` or `name.attribute`."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


def changes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of which something is changed in place, with the line."""
    for node in ast.walk(tree):
        targets: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            targets = [node.func.value]
        elif isinstance(node, ast.Assign | ast.Delete):
            targets = [target for target in node.targets if isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        for target in targets:
            if base(target):
                yield base(target), node.lineno


def bound_inside(function: ast.AST) -> set[str]:
    """Names that are arguments or variables of a function, and so not those of the module."""
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return arguments | stored


def violations(source: str, module: str) -> list[str]:
    tree, found = ast.parse(source), []
    names = {name: value for statement in tree.body for name, value in assigned(statement) if is_container(value)}
    free = names.keys() - REGISTRIES.get(module, set())
    for name in free:
        if called(names[name]) in STATEFUL:
            found.append(f"{module}: {name} is a {called(names[name])}, which is made to be changed")
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        own = bound_inside(function)
        for name, line in changes(function):
            if name in free - own:
                found.append(f"{module}:{line}: {function.name} changes {name}, which is the module's")
        kept = {called(decorator) for decorator in function.decorator_list} & {"cache", "lru_cache"}
        if kept and function.name not in CACHES.get(module, set()):
            found.append(
                f"{module}:{function.lineno}: {function.name} keeps its results; add it to CACHES with a reason"
            )
        for default in (*function.args.defaults, *function.args.kw_defaults):
            if is_container(default):
                found.append(f"{module}:{function.lineno}: {function.name} has a default that calls share")
    found += [
        f"{module}:{node.lineno}: global {', '.join(node.names)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    return found


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_has_state():
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 100
    broken = [line for file in files for line in violations(file.read_text(), module_of(file))]
    assert not broken, "\n".join(broken)


def test_what_is_allowed_exists():
    for module, names in (*REGISTRIES.items(), *CACHES.items()):
        path = ROOT.parent.joinpath(*module.split(".")).with_suffix(".py")
        tree = ast.parse(path.read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        defined |= {name for statement in tree.body for name, _ in assigned(statement)}
        assert names <= defined


@pytest.mark.parametrize(
    "source",
    [
        "_audits = {}\ndef f(model):\n    _audits[model] = 1",
        "_audits: dict[str, int] = {}\ndef f(model):\n    _audits.setdefault(model, 1)",
        "_audits = dict()\ndef f():\n    _audits.update(a=1)",
        "SEEN = []\ndef f(x):\n    SEEN.append(x)",
        "SEEN = set()\nclass A:\n    def f(self, x):\n        SEEN.add(x)",
        "SEEN = [[]]\ndef f(x):\n    SEEN[0].append(x)",
        "TABLE = {'a': 1}\ndef f():\n    del TABLE['a']",
        "TABLE = {'a': 1} | {'b': 2}\ndef f():\n    return TABLE.pop('a')",
        "TABLE = {'a': 1}\ndef f():\n    TABLE['a'] += 1",
        "import collections\nCOUNTS = collections.defaultdict(int)\ndef f(x):\n    COUNTS[x] += 1",
        "from weakref import WeakKeyDictionary\n_known = WeakKeyDictionary()",
        "import weakref\n_known: weakref.WeakKeyDictionary[int, int] = weakref.WeakKeyDictionary()",
        "import threading\n_state = threading.local()",
        "_patience = 0\ndef f():\n    global _patience\n    _patience += 1",
        "from functools import cache\n@cache\ndef audit(model):\n    return model",
        "import functools\n@functools.lru_cache(maxsize=8)\ndef audit(model):\n    return model",
        "class A:\n    from functools import lru_cache\n    @lru_cache\n    def audit(self):\n        return 1",
        "def f(x, seen=[]):\n    return seen",
        "def f(x, *, seen={}):\n    return seen",
    ],
)
def test_state_is_caught(source: str):
    assert len(violations(source, "featlearn.novelty")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "TABLE = {'a': 1}\ndef f(x):\n    return TABLE[x]",
        "TABLE = {'a': 1}\nTABLE_TOO = {**TABLE, 'b': 2}",
        "NAMES = ['a', 'b']\ndef f():\n    names = list(NAMES)\n    names.append('c')\n    return names",
        "names = ['a']\ndef f(names):\n    names.append('c')",
        "names = ['a']\ndef f():\n    names = []\n    names.append('c')",
        "Kernels = dict[str, int]\ndef f():\n    kernels: Kernels = {}\n    kernels['a'] = 1",
        "from functools import cached_property\nclass A:\n    @cached_property\n    def a(self):\n        return 1",
        "import threading\n_measuring = threading.RLock()",
    ],
)
def test_tables_and_local_variables_pass(source: str):
    assert violations(source, "featlearn.novelty") == []


def test_registries_may_grow():
    source = "_RULES = {}\n_OTHER = {}\ndef add(name):\n    _RULES[name] = 1\n    _OTHER[name] = 1"
    assert len(violations(source, "featlearn.ops.registry")) == 1
