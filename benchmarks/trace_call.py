"""Count what one kernel passes through: modules of this package, switches between them, calls; and ops of torch.

    python benchmarks/trace_call.py

Counted by `sys.setprofile` for a repeated `fl.ntk`, and for the first and a repeated call of a Session. Networks are so
small that nearly all of a call is Python. Beside the counts are the ops of torch that a call launches, its microseconds
(the best of many), those of the plain forward and backward pass, and of `torch.func`. The last lines are the import
closure of `featlearn.quantities.ntk`, and the modules and lines that one call of `fl.ntk` loads.
"""

import ast
import functools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import featlearn as fl
from benchmarks.peers import torch_func
from benchmarks.workloads import GPT

PACKAGE = str(Path(fl.__file__).parent)


class Perceptron(nn.Module):
    """Three layers, in a module of one's own."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Three layers."""
        found: Tensor = self.c(torch.relu(self.b(torch.relu(self.a(x)))))
        return found


def sequential(outputs: int) -> nn.Sequential:
    """W1 and W2 with little to compute."""
    layers = [nn.Linear(9, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, outputs, bias=False))


class Encoder(nn.Module):
    """A transformer layer, averaged over tokens, and a linear readout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.readout = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (P, 2)."""
        outputs: Tensor = self.readout(self.layer(x).mean(1))
        return outputs


def convolutional() -> nn.Sequential:
    """A convolution, BatchNorm and a linear layer."""
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * 36, 2)).eval()


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Networks whose arithmetic takes no time."""
    torch.manual_seed(0)
    gpt = GPT(width=8, heads=4, tokens=8, symbols=9)
    return {
        "own module": (Perceptron(2), torch.randn(30, 9)),
        "CNN, BatchNorm": (convolutional(), torch.randn(30, 3, 6, 6)),
        "transformer layer": (Encoder().eval(), torch.randn(30, 5, 8)),
        "W1, nn.Sequential": (sequential(10), torch.randn(30, 9)),
        "W2, nn.Sequential": (sequential(1), torch.randn(30, 9)),
        "W5": (gpt, torch.randint(9, (16, 8))),
    }


class Trace(NamedTuple):
    """Counts of one call."""

    modules: int
    """Modules of this package that the call enters."""
    switches: int
    """Calls from one of them into another."""
    calls: int
    """Calls inside the package."""


def traced(call: Callable[[], Any]) -> Trace:
    """Count what a call passes through."""
    modules: set[str] = set()
    switches = calls = 0
    last = ""

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal switches, calls, last
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            modules.add(name)
            calls += 1
            switches += name != last
            last = name

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Trace(len(modules), switches, calls)


def launched(call: Callable[[], Any]) -> int:
    """Ops of torch that were called from Python or from a backward pass; those that they call are not counted."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    ops = [event for event in profile.events() if event.name.startswith("aten::")]
    return sum(event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::") for event in ops)


def microseconds(call: Callable[[], Any], repeats: int = 60) -> float:
    """The best of many, in time of this process."""
    call()
    best = float("inf")
    for _ in range(repeats):
        begun = time.process_time()
        call()
        best = min(best, time.process_time() - begun)
    return 1e6 * best


def import_closure(start: Path) -> set[Path]:
    """The modules of this package that one imports, wherever in its text, and theirs."""
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
                if isinstance(node, ast.ImportFrom) and node.module
                else []
            )
            for name in names:
                if name.startswith("featlearn."):
                    place = Path(PACKAGE, *name.split(".")[1:])
                    waiting += [place.with_suffix(".py"), place / "__init__.py"]
    return found


def loaded() -> set[Path]:
    """The modules of this package that a process has loaded after one call of `fl.ntk`."""
    program = (
        "import sys, torch, featlearn as fl; fl.ntk(torch.nn.Linear(3, 2), torch.ones(4, 3));"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('featlearn')), sep=chr(10))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {Path(line) for line in done.stdout.splitlines()}


def main() -> None:
    """Count and print."""
    torch.set_num_threads(1)
    print("network             call          modules  switches  calls   ops   microseconds   bare  torch.func")
    for name, (model, x) in networks().items():
        parameters = list(model.parameters())

        def bare(model: nn.Module = model, x: Tensor = x, parameters: list[nn.Parameter] = parameters) -> None:
            torch.autograd.grad(model(x).sum(), parameters)

        session = fl.Session(model, x)
        fl.Session(model, x).ntk()  # what a process does once
        once = functools.partial(fl.ntk, model, x)
        calls = {"fl.ntk": once, "Session first": session.ntk, "Session again": session.ntk}
        for title, call in calls.items():
            counts = traced(call)
            is_first = title == "Session first"
            run = once if is_first else call
            spent, plain = microseconds(run, 60 if title == "Session again" else 10), microseconds(bare)
            other = microseconds(lambda model=model, x=x: torch_func.kernel(model, x, "traced"), 10)
            print(
                f"{name:19} {title:13} {counts.modules:7} {counts.switches:9} {counts.calls:6} {launched(run):5} "
                f"{spent:14.0f} {plain:6.0f} {other:11.0f}",
                flush=True,
            )
    closures = {
        "import closure of featlearn.quantities.ntk": import_closure(Path(PACKAGE, "quantities", "ntk.py")),
        "loaded by one call of fl.ntk": loaded(),
    }
    for name, closure in closures.items():
        lines = sum(len(path.read_text().splitlines()) for path in closure)
        print(f"{name}: {len(closure)} modules, {lines} lines")


if __name__ == "__main__":
    main()
