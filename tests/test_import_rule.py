"""Imports flow one way: each package sees only those the table names."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import featlearn

ROOT = Path(featlearn.__file__).parent

FOUNDATION = {"errors", "shapes", "linalg", "signatures", "losses", "torch_internals", "palette"}
# from per-sample gradients to kernels, in the order in which data flows
CONTRACTION = {"errors", "shapes", "torch_internals", "contraction"}
GRADIENTS = CONTRACTION | {"graph", "ops", "separation", "network", "gradients"}
MEASUREMENT = GRADIENTS | {"audit", "distributed", "request", "measurement"}
AUDITED_MODEL = MEASUREMENT | {"planning", "readouts", "audited_model"}
MEASURING = FOUNDATION | AUDITED_MODEL | {"linear_maps", "linearization", "kernel", "quantities", "readouts", "session"}
READING = {"metrics", "dynamics", "theory", "record", "diagnosis", "reporting"}
LIBRARY = MEASURING | READING | {"citation_index", "citations", "comparison", "data", "models", "statistics", "steer"}
LIBRARY |= {"attribution", "explorer", "integrations", "monitoring", "sweeps", "widths"}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "citations": {"errors", "signatures", "citation_index"},
    "citation_index": set(),
    "palette": set(),
    "shapes": {"errors"},
    "torch_internals": {"errors"},
    "signatures": {"errors"},
    "linalg": {"errors", "shapes"},
    "losses": {"errors", "shapes"},
    "readouts": {"errors", "shapes", "losses", "signatures"},
    "contraction": {"errors", "shapes", "torch_internals"},
    "graph": {"errors", "torch_internals"},
    "ops": {"errors", "torch_internals", "contraction", "graph"},
    "separation": {"errors", "torch_internals", "graph", "ops"},
    "network": {"errors", "shapes", "readouts", "torch_internals"},
    "gradients": GRADIENTS - {"gradients"},
    "audit": GRADIENTS | {"readouts"},
    "measurement": GRADIENTS | {"audit", "readouts", "request"},
    "planning": MEASUREMENT - {"distributed"},
    "distributed": {"errors", "shapes", "torch_internals", "contraction", "network"},
    "linear_maps": MEASUREMENT - {"audit", "distributed"},
    "request": {"errors", "network", "distributed"},
    "audited_model": MEASUREMENT | {"planning", "readouts"},
    "kernel": FOUNDATION | AUDITED_MODEL | {"readouts"},
    "linearization": FOUNDATION | AUDITED_MODEL | {"kernel"},
    "quantities": FOUNDATION | AUDITED_MODEL | {"linear_maps", "linearization", "kernel", "readouts", "dynamics"},
    "session": FOUNDATION | AUDITED_MODEL | {"linear_maps", "kernel", "quantities"},
    "statistics": FOUNDATION | AUDITED_MODEL | {"kernel", "quantities"},
    "metrics": FOUNDATION,
    "dynamics": FOUNDATION | {"network"},  # fused ops taken apart, for Taylor expansions
    # from_network reads a module, from_run a run
    "theory": MEASURING | {"dynamics", "metrics", "record"},
    "data": {"errors", "shapes"},
    "record": {"errors"},
    "diagnosis": MEASURING | {"metrics", "dynamics", "theory", "record", "steer"},  # steer and network: advice is tried
    "reporting": {
        "errors",
        "signatures",
        "palette",
        "linalg",
        "record",
        "diagnosis",
        "metrics",
        "dynamics",
        "citations",
    },
    "explorer": {"reporting"},
    "steer": MEASURING | {"metrics", "dynamics", "theory"},
    "attribution": MEASURING | {"dynamics", "monitoring", "record"},
    "comparison": MEASURING | {"metrics", "steer"},
    "monitoring": MEASURING | {"metrics", "dynamics", "record"},
    "integrations": {"errors", "record", "monitoring"},
    "sweeps": {"errors", "signatures", "palette", "record", "diagnosis", "reporting"},
    "widths": FOUNDATION | {"graph", "network", "theory", "reporting"},
    "models": FOUNDATION | {"theory"},
    "cli": LIBRARY | {"featlearn"},
    "featlearn": LIBRARY,  # the package's own __init__
    "__main__": {"cli"},
}

# they load inside the functions that need them, for `import featlearn.x` to stay quick; cli is what cyclopts reads
LATE = {"cyclopts", "matplotlib", "rich", "scipy.integrate", "sklearn", "starlette", "transformers", "uvicorn"}
LATE |= {"xarray"}


class Import(NamedTuple):
    module: str  # absolute, with the imported name where that may be a module: featlearn.ops.registry
    line: int
    at_import_time: bool


def imports(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """Every import statement of a file, wherever it stands."""
    tree = ast.parse(source)
    inside_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, base] if base else kept)
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            yield Import(name, node.lineno, id(node) not in inside_functions)


def package_of(module: str) -> str:
    """featlearn.ops.registry -> ops; a name of the package itself -> featlearn."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "featlearn"


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    own = module.split(".")[1] if "." in module else "featlearn"
    if own not in ALLOWED:
        return [f"{module}: package {own!r} is not in the table of allowed imports; add it with what it may see"]
    found = []
    for name, line, at_import_time in imports(source, module, is_package):
        if name.split(".")[0] == "featlearn":
            seen = package_of(name)
            if seen != own and seen not in ALLOWED[own]:
                found.append(f"{module}:{line}: {own} imports {name}; it may see {sorted(ALLOWED[own])}")
        elif name.split(".")[0] == "featlearn_papers":
            found.append(f"{module}:{line}: {own} imports {name}; the library does not see the papers")
        elif own == "record" and name.split(".")[0] == "torch":
            found.append(f"{module}:{line}: record imports torch")
        elif own == "cli" and name.split(".")[0] == "cyclopts":
            continue
        elif at_import_time and any(name == late or name.startswith(f"{late}.") for late in LATE):
            found.append(f"{module}:{line}: {name} loads with the module; import it in the function that needs it")
    return found


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_package_keeps_the_rule():
    files = sorted(ROOT.rglob("*.py"))
    assert files
    broken = [line for f in files for line in violations(f.read_text(), module_of(f), f.name == "__init__.py")]
    assert not broken, "\n".join(broken)


def test_the_table_has_no_cycle():
    remaining = dict(ALLOWED)
    while remaining:
        free = [name for name, seen in remaining.items() if not seen & remaining.keys()]
        assert free, f"these packages see each other in a circle: {sorted(remaining)}"
        for name in free:
            del remaining[name]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("featlearn.ops.registry", "from featlearn.quantities.ntk import ntk"),
        ("featlearn.ops.registry", "import featlearn.gradients"),
        ("featlearn.ops.registry", "from featlearn import audit"),
        ("featlearn.ops.registry", "from featlearn import ntk"),
        ("featlearn.ops.registry", "import featlearn as fl"),
        ("featlearn.ops.registry", "from ..gradients import chunk"),
        ("featlearn.ops.registry", "from .. import network"),
        ("featlearn.ops.registry", "def f():\n    from featlearn.monitoring.entry import watch"),
        ("featlearn.ops.registry", "from featlearn import novelty"),
        ("featlearn.theory.ofe", "from featlearn.monitoring import entry"),
        ("featlearn.contraction.gram", "from featlearn.graph.graph import Layout"),
        ("featlearn.gradients.captured", "from featlearn.audit.audit import audited"),
        ("featlearn.audit.audit", "from featlearn.measurement import Measurement"),
        ("featlearn.measurement", "from featlearn.planning.kernel_plan import grouped"),
        ("featlearn.quantities.ntk", "from featlearn.session import Session"),
        ("featlearn.linear_maps.weight_matrices", "from featlearn.planning.kernel_plan import parameter_plans"),
        ("featlearn.record.run", "import torch.nn"),
        ("featlearn.reporting.page", "from featlearn.quantities import ntk"),
        ("featlearn.quantities.ntk", "from featlearn import models"),
        ("featlearn.cli.app", "from featlearn_papers.frame import registry"),
        ("featlearn.data.digits", "from sklearn.datasets import load_digits"),
        ("featlearn.novelty", ""),
    ],
)
def test_a_forbidden_import_is_caught(module: str, source: str):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source", "is_package"),
    [
        ("featlearn.ops", "from . import form\nfrom ..errors import FeatlearnError", True),
        ("featlearn.ops.matmul", "from .form import Use\nfrom featlearn.ops import registry\nimport torch", False),
        ("featlearn.quantities.ntk", "from featlearn.gradients.captured import Chunk", False),
        ("featlearn.session", "from featlearn.quantities.ntk import ntk_of", False),
        ("featlearn.models", "from featlearn.theory import arguments", True),
        ("featlearn.data.digits", "def f():\n    from sklearn.datasets import load_digits", False),
    ],
)
def test_an_allowed_import_passes(module: str, source: str, is_package: bool):
    assert violations(source, module, is_package) == []
