"""Train the networks of a list of cases, diagnose each, and write one line of JSON for each.

    python -m benchmarks.verdict.cases difficult|projects|unseen [--only NAME] [--out TABLE.jsonl] [--table]

Each case trains one network as its owner would. A reference gap comes from `reference.linearization_gap`, which shares
no code with the library, on the part of the model before its link or with its products merged. Expected regimes follow
from the construction, or from the reference where that is clear: below `CLEARLY_LAZY` or above `CLEARLY_RICH`.
`--table` trains nothing and prints the table that is kept.
"""

import argparse
import contextlib
import importlib
import io
import json
import math
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

import featlearn as fl
from benchmarks.verdict import tasks
from benchmarks.verdict.constructions import Samples
from benchmarks.verdict.reference import linearization_gap
from benchmarks.verdict.run import rounded
from benchmarks.verdict.table import rows
from benchmarks.verdict.training import copied
from featlearn.record import Run

CLEARLY_LAZY, CLEARLY_RICH = 0.1, 0.35
"""Reference gaps that settle the regime; between them any verdict passes."""
SUITES = ("difficult", "projects", "unseen")

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run, and a gap that was computed another way."""

    run: Run
    reference: float = math.nan


Train = Callable[[Path], Trained]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training, with the verdict of the version before the link where that is known."""

    train: Train
    expected: tuple[str, ...]
    """Regimes by construction; empty where the reference decides."""
    before: str
    reason: str

    def accepted(self, reference: float) -> tuple[str, ...]:
        """Return the regimes that are right."""
        if self.expected:
            return self.expected
        if reference < CLEARLY_LAZY:
            return ("lazy",)
        return ("rich",) if reference > CLEARLY_RICH else ("lazy", "mixed", "rich")


def collector(cases: dict[str, Case]) -> Callable[..., Callable[[Train], Train]]:
    """Return the decorator that adds a training to the cases; `reason`: of the expected regimes."""

    def case(name: str, *, expected: tuple[str, ...] = (), before: str = "", reason: str) -> Callable[[Train], Train]:
        def add(train: Train) -> Train:
            cases[name] = Case(train=train, expected=expected, before=before, reason=reason)
            return train

        return add

    return case


def trained(
    path: Path,
    model: nn.Module,
    train: Samples,
    test: Samples,
    *,
    loss: Any,
    optimizer: torch.optim.Optimizer,
    steps: int,
    batch: int = 0,
    seed: int = 0,
    declared: bool = True,
    at: dict[int, Callable[[], None]] | None = None,
    each: Callable[[int], object] | None = None,
) -> Run:
    """Train a model on mini-batches, or on all samples, inside `fl.watch` with its default settings.

    `at` acts before a step, `each` after the optimizer of every step.
    """
    generator = tasks.generator(seed)
    probe = (train.x[:100], train.y[:100])
    with watched(model, probe, path, tuple(test), optimizer, loss if declared else None) as watch:
        for step in range(steps):
            if at is not None and step in at:
                at[step]()
            rows = torch.randint(len(train.x), (batch,), generator=generator) if batch else slice(None)
            optimizer.zero_grad()
            value = loss(model(train.x[rows]), train.y[rows])
            value.backward()
            optimizer.step()
            if each is not None:
                each(step)
            watch.step(loss=value)
    return watch.run


@contextlib.contextmanager
def watched(
    model: nn.Module,
    probe: Any,
    path: Path,
    test: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Any = None,
    **options: Any,
) -> Iterator[Any]:
    """Watch with the default settings, silently."""
    with (
        contextlib.redirect_stderr(io.StringIO()),
        fl.watch(model, probe, out=path, test=test, optimizer=optimizer, loss=loss, **options) as watch,
    ):
        yield watch


def gap_of(model: nn.Module, part: nn.Module, initial: State, x: Tensor, prefix: str = "0.") -> float:
    """Return the gap of the part of a sequence before its link."""
    now = copied(model)
    first, last = (
        {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        for state in (initial, now)
    )
    return linearization_gap(part, first, last, x)


def adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return Adam for the trained parameters."""
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr)


def sgd(model: nn.Module, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    """Return SGD for the trained parameters."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, momentum=momentum)


def line_of(name: str, case: Case) -> dict[str, Any]:
    """Train and diagnose one case."""
    begun = time.process_time()
    torch.manual_seed(sum(map(ord, name)))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = case.train(Path(folder, "run"))
        diagnosed = time.process_time()
        diagnosis = json.loads(fl.diagnose(outcome.run).to_json())
        summary = str(fl.diagnose(outcome.run))
    numbers = {key: value["value"] for key, value in diagnosis["numbers"].items()}
    return {
        "construction": name,
        "expected": list(case.accepted(outcome.reference)),
        "before": case.before,
        "reason": case.reason,
        "regime": diagnosis["regime"],
        "headline": diagnosis["headline"],
        "helped": diagnosis.get("helped"),
        "reference_gap": outcome.reference,
        "gap": numbers["gap"],
        **{key: numbers.get(key) for key in ("plain_gap", "features_moved", "statistics_moved", "loss_left")},
        "summary": summary,
        "cpu_seconds": round(time.process_time() - begun, 1),
        "diagnosis_seconds": round(time.process_time() - diagnosed, 1),
    }


def lines_of(cases: dict[str, Case], only: str) -> Iterator[dict[str, Any]]:
    """Yield a line for each case, also for those that fail."""
    for name, case in cases.items():
        if only in name:
            try:
                yield rounded(line_of(name, case))
            except Exception as error:  # one case that fails must not cost the others
                yield {"construction": name, "regime": "failed", "failed": f"{type(error).__name__}: {error}"[:300]}


def show(lines: list[dict[str, Any]]) -> None:
    """Print a table in Markdown, and how often each verdict was right."""
    print("| training | before | now | gap | reference | helped |\n| --- | --- | --- | --- | --- | --- |")
    for line in lines:
        gap, reference = (line.get(key) for key in ("gap", "reference_gap"))
        numbers = " | ".join("–" if number is None else f"{number:.2g}" for number in (gap, reference))
        mark = "" if line["regime"] in line.get("expected", ()) else " (!)"
        before = line.get("before") or "–"
        print(f"| {line['construction']} | {before} | {line['regime']}{mark} | {numbers} | {line.get('helped')} |")
    counts = Counter(("/".join(line.get("expected", ())), line["regime"]) for line in lines)
    print(*(f"{expected}: {regime} {count}" for (expected, regime), count in sorted(counts.items())), sep="\n")


def main(arguments: list[str] | None = None) -> None:
    """Run the cases, and print the verdict of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--only", default="", help="a part of the name of a construction")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true", help="train nothing, print the table that is kept")
    settings = parser.parse_args(arguments)
    table = settings.out or Path(__file__).parent / f"{settings.suite}.jsonl"
    if settings.table:
        return show(rows(table))
    cases = importlib.import_module(f"benchmarks.verdict.{settings.suite}").CASES
    with table.open("w") as out:
        for line in lines_of(cases, settings.only):
            out.write(json.dumps(line) + "\n")
            out.flush()
            correct = line["regime"] in line.get("expected", ())
            print(
                "  " if correct else "! ", line["construction"], "|", line.get("failed") or line["summary"], flush=True
            )
    return None


if __name__ == "__main__":
    main()
