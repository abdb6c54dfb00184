"""Keep the package narrow: modules that a call enters, imports, chains of imports, and names with one meaning."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.shape import HEART, Shape

ROOT = Path(__file__).resolve().parents[1]
# Lower a limit when the package gets narrower.
MODULES_OF_NTK = 34
MODULES_OF_A_SESSION = 27
MODULES_OF_A_WATCH = 121
IMPORTS = 28
CHAIN = 26
NAMES_USED_TWICE = 7  # with Attribution, Replay and Answer, which are also theory, diagnosis and cli


@pytest.fixture(scope="module")
def shape() -> Shape:
    return Shape()


def test_a_kernel_enters_few_modules():
    """In a process of its own: code for ranks is entered where torch's is loaded."""
    program = """if True:
        import json, featlearn as fl
        from benchmarks.trace_call import networks, traced
        counts = {}
        for name, (model, x) in list(networks().items())[:3]:
            session = fl.Session(model, x)
            for warm_up in (session.ntk, session.ntk, lambda: fl.ntk(model, x)):
                warm_up()
            counts[name] = traced(lambda: fl.ntk(model, x)).modules, traced(session.ntk).modules
        print(json.dumps(counts))
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout.splitlines()[-1])
    assert set(counts) == {"own module", "CNN, BatchNorm", "transformer layer"}
    assert max(once for once, _ in counts.values()) <= MODULES_OF_NTK, counts
    assert max(again for _, again in counts.values()) <= MODULES_OF_A_SESSION, counts
    assert min(again for _, again in counts.values()) > 5


def test_a_measured_step_isolates_and_captures_once():
    """Of the default quantities, a step in the middle of a run: counted in a process of its own."""
    program = """if True:
        import json, sys, tempfile, torch, featlearn as fl
        from benchmarks.trace_call import Perceptron

        calls, sizes = [], []
        def note(frame, event, argument):
            code = frame.f_code
            if event == "call" and code.co_qualname in ("RandomState.__init__", "Chunk.__init__"):
                calls.append(code.co_qualname)

        def passes(model, inputs):
            if not model.training:
                sizes.append(len(inputs[0]))

        def train(folder, **options):
            torch.manual_seed(0)
            model = Perceptron(3)
            model.register_forward_pre_hook(passes)
            data = torch.randn(40, 9), torch.randint(3, (40,))
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            watching = fl.watch(
                model, data, out=folder + "/run", every=1, budget=None, optimizer=optimizer, loss="cross-entropy",
                **options
            )
            modules = sum(name.startswith("featlearn") for name in sys.modules)
            with watching as watch:
                for step in range(1, 5):
                    loss = torch.nn.functional.cross_entropy(model(data[0]), data[1])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    calls.clear(), sizes.clear()
                    sys.setprofile(note if step == 3 else None)
                    watch.step(loss=loss)
                    sys.setprofile(None)
                    if step == 3:
                        counted = {name: calls.count(name) for name in set(calls)}, sorted(sizes)
            return modules, *counted

        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            test = torch.randn(30, 9), torch.randint(3, (30,))
            print(json.dumps([train(one), train(other, test=test)]))
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    (modules, calls, sizes), (_, calls_with_test, sizes_with_test) = json.loads(done.stdout.splitlines()[-1])
    assert calls == calls_with_test == {"RandomState.__init__": 1, "Chunk.__init__": 1}
    assert sizes == [40, 40], "the network now, and its linearization at the start"
    assert sizes_with_test == [30, 40, 70], "test points, probe, and the linearization of both"
    assert 50 < modules <= MODULES_OF_A_WATCH


def test_a_module_imports_few_others(shape: Shape):
    wide = {name: len(others) for name, others in shape.imports.items() if len(others) > IMPORTS}
    wide.pop("__init__", None)  # it lists the public names, one import each
    assert not wide


def test_chains_of_imports_are_short(shape: Shape):
    assert len(shape.longest_chain) <= CHAIN, " > ".join(shape.longest_chain)


def test_a_class_name_has_one_meaning(shape: Shape):
    assert not shape.used_twice(HEART)
    assert len(shape.used_twice()) <= NAMES_USED_TWICE, shape.used_twice()


def test_no_line_is_kept_from_the_formatter():
    folders = ("src", "papers", "tests", "benchmarks", "examples")
    skipped = [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "fmt: " + "skip" in path.read_text()
    ]
    assert not skipped


def test_the_shape_of_a_small_package_is_counted(tmp_path: Path):
    root = tmp_path / "featlearn"
    (root / "a").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "a/__init__.py": "",
        "a/one.py": "from featlearn.b import Two\nclass One: ...\n",
        "b.py": "def late():\n    from featlearn.a import one\nclass Two: ...\nclass One: ...\n",
        "c.py": "from featlearn.a import one\nfrom featlearn.a.one import One\nimport torch\n",
    }
    for name, text in files.items():
        (root / name).write_text(text)
    shape = Shape(root)
    assert shape.longest_chain == ["c", "a.one", "b"]
    assert {name: others for name, others in shape.imports.items() if others} == {
        "a.one": {"b"},
        "b": {"a.one"},
        "c": {"a.one"},
    }
    assert shape.used_twice() == {"One": ["a.one", "b"]}
    assert shape.used_twice({"a"}) == {}
    assert shape.lines["a"] == 2
