"""Names that readers did not understand at once stay away: metaphors, and words that hide a known one."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import featlearn

ROOT = Path(featlearn.__file__).parent

MODULES = {
    "arriving",
    "blame",
    "collapse",
    "coverage",
    "cuts",
    "film",
    "later",
    "ledger",
    "pairs",
    "pilots",
    "preparation",
    "projections",
    "rates",
    "ration",
    "recipe",
    "repetition",
    "seen",
    "sightings",
    "succession",
    "utils",
    "helpers",
    "misc",
    "base",
    "common",
}
DEFINED = {
    "Access",
    "FeatureWays",
    "Film",
    "Later",
    "Order",
    "Place",
    "Preparation",
    "Probe",
    "Projection",
    "Projections",
    "Push",
    "Sight",
    "Unconfirmed",
    "Way",
    "Witness",
    "again",
    "arriving",
    "doubt",
    "exemplary",
    "recalling",
    "remembering",
    "untold",
}
"""Classes, functions and methods."""
BEGINNINGS = ("judged_", "get_", "compute_")


def violations(source: str, module: str) -> Iterator[str]:
    if module in MODULES:
        yield f"module {module}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bare = node.name.lstrip("_")
            if bare in DEFINED or bare.startswith(BEGINNINGS):
                yield f"{module}:{node.lineno}: {node.name}"


def test_no_private_word_is_a_name():
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 100
    found = [line for file in files for line in violations(file.read_text(), file.stem)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("", "pilots"),
        ("class Probe:\n    pass", "inputs"),
        ("class _Push:\n    pass", "pairs_of_layers"),
        ("class Call:\n    def again(self):\n        pass", "calls"),
        ("def judged_gap():\n    pass", "gap"),
    ],
)
def test_private_words_are_caught(source: str, module: str):
    assert len(list(violations(source, module))) == 1


def test_their_replacements_pass():
    source = "class Directions:\n    pass\nclass ModelWithInputs:\n    pass\ndef assess_gap():\n    held = 1"
    assert not list(violations(source, "audit"))
