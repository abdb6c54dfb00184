import ast
import importlib.metadata
import inspect
import operator
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import featlearn as fl

SOURCE = Path(fl.__file__).parent
PUBLIC = [name for name in dir(fl) if not name.startswith("_")]


def modules_after(code: str) -> set[str]:
    """Names in sys.modules of a fresh interpreter that ran the code."""
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_featlearn_imports_nothing_heavy():
    loaded = modules_after("import featlearn; featlearn.__version__; dir(featlearn); featlearn.FeatlearnError")
    assert "featlearn.errors" in loaded
    assert not loaded & {"torch", "numpy", "scipy", "sklearn"}


def test_importing_data_does_not_import_scikit_learn():
    loaded = modules_after("import featlearn; featlearn.data")
    assert "featlearn.data.digits" in loaded
    assert "sklearn" not in loaded


def test_a_kernel_loads_what_it_needs_and_nothing_of_ranks_and_sketches():
    loaded = modules_after(
        "import featlearn as fl, torch; fl.ntk(torch.nn.Linear(3, 2), torch.ones(4, 3), outputs='each', verify=True)"
    )
    assert "featlearn.kernel.execution" in loaded
    unneeded = ("divided", "sketched", "distributed.exchange", "layered_weights", "stream", "operator", "neural")
    assert not [name for name in loaded for word in unneeded if name.startswith("featlearn") and word in name]
    assert "sympy" not in loaded  # half of the time of the first call


def test_a_watched_run_loads_only_what_it_uses(tmp_path: Path):
    loaded = modules_after(
        f"""if True:
        import featlearn as fl, torch
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fl.watch(model, probe=(torch.randn(5, 3), torch.randn(5, 2)), out={str(tmp_path / "run")!r}) as watch:
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(5, 3)).square().mean().backward()
                optimizer.step()
                watch.step()
        """
    )
    modules = {name for name in loaded if name.partition(".")[0] == "featlearn"}
    rooms = {name.split(".")[1] for name in modules if "." in name}
    assert not rooms & {"diagnosis", "dynamics", "reporting", "steer", "sweeps", "theory", "widths"}
    assert len(modules) <= 134


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves_and_is_documented(name: str):
    assert inspect.getdoc(getattr(fl, name))


def test_type_checkers_see_the_names_that_load():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == fl._HOME | dict.fromkeys(fl._SUBMODULES, "featlearn")


@pytest.mark.parametrize("name", PUBLIC)
def test_the_types_of_a_signature_can_be_looked_up(name: str):
    found = getattr(fl, name)
    if inspect.isfunction(found):
        assert typing.get_type_hints(found)
    elif inspect.isclass(found):
        assert typing.get_type_hints(found) is not None
        assert typing.get_type_hints(found.__init__) is not None


def test_nothing_is_public_twice():
    modules = [name for name in PUBLIC if inspect.ismodule(getattr(fl, name))]
    names = [name for name in PUBLIC if name not in modules]
    names += [f"{module}.{name}" for module in modules for name in getattr(fl, module).__all__]
    places: dict[int, list[str]] = {}
    for name in names:
        thing = operator.attrgetter(name)(fl)
        if not inspect.ismodule(thing):
            places.setdefault(id(thing), []).append(name)
    assert [names for names in places.values() if len(names) > 1] == []


def test_every_theory_lists_its_names():
    theories = [getattr(fl.theory, name) for name in fl.theory.__all__ if name not in ("NetworkPath", "which")]
    assert [theory.__name__ for theory in theories if not theory.__all__] == []


def test_a_name_is_loaded_once():
    assert fl.FeatlearnError is fl.FeatlearnError
    assert "FeatlearnError" in vars(fl)


@pytest.mark.parametrize(("wrong", "right"), [("nkt", "ntk"), ("reedouts", "readouts")])
def test_a_misspelled_name_is_corrected(wrong: str, right: str):
    with pytest.raises(AttributeError, match=f"no attribute '{wrong}'; did you mean '{right}'"):
        getattr(fl, wrong)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(fl, "zzzzzz")


def test_the_version_is_the_installed_one():
    assert fl.__version__ == importlib.metadata.version("featlearn")


def test_the_release_is_the_same_everywhere():
    top = Path(__file__).parents[1]
    assert re.findall(r"^version: (.*)$", (top / "CITATION.cff").read_text(), re.MULTILINE) == [fl.__version__]
    released = re.findall(r"^## \[(.*)\](?: - (.*))?$", (top / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == ("Unreleased", "")
    assert released[1][0] == fl.__version__
    date = re.findall(r"^date-released: (.*)$", (top / "CITATION.cff").read_text(), re.MULTILINE)
    assert [released[1][1]] == date


def test_the_package_ships_its_types():
    assert (SOURCE / "py.typed").is_file()


def test_every_exception_is_a_featlearn_error_and_a_builtin_one_and_warnings_are_the_users():
    from featlearn import errors

    for name in errors.__all__:
        kind = getattr(errors, name)
        if name.endswith("Warning"):
            assert issubclass(kind, UserWarning)
            continue
        assert issubclass(kind, fl.FeatlearnError)
        assert kind is fl.FeatlearnError or issubclass(kind, ValueError | TypeError)


def test_every_imported_distribution_is_declared():
    declared = {re.split(r"[\s\[<>=!~;]", line)[0].lower() for line in importlib.metadata.requires("featlearn") or []}
    imported = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).split(".")[0])
    foreign = imported - sys.stdlib_module_names - {"featlearn"}
    distributions = importlib.metadata.packages_distributions()
    assert {name for name in foreign if not declared & {d.lower() for d in distributions.get(name, ())}} == set()
