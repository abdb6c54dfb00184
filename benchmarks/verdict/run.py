"""Train the runs of a suite, diagnose them, and keep one line of JSON for each.

    python -m benchmarks.verdict.run held-out|calibration|grokking [--jobs 4] [--out TABLE.jsonl] [--only NAME]
    python -m benchmarks.verdict.run held-out --table | --list

A line has the regime by theory, what `fl.diagnose` says with all its numbers, the steps that were measured, and
references that do not come from the diagnosis (reference.py). Runs that are in the table are not trained again.
`--only` takes constructions with this in their name, `--first N` the first N runs. `--load K` starts K busy processes
beside the runs, to see whether what is measured depends on the load of the machine. `--table` trains nothing and
prints what the table holds, `--list` the constructions with the reason for the regime of each.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process for every core, not a thread

import torch

import featlearn as fl
from benchmarks.verdict.constructions import Construction, Job, jobs
from benchmarks.verdict.reference import references
from benchmarks.verdict.table import rows, show
from benchmarks.verdict.training import trained

SUITES = {"held-out": "held_out", "calibration": "calibration", "grokking": "grokking"}
LONGEST = 180
"""Seconds after which a run is given up, and stands in the table as failed."""


def constructions(suite: str) -> dict[str, Construction]:
    return {one.name: one for one in import_module(f"benchmarks.verdict.{SUITES[suite]}").CONSTRUCTIONS}


def suite_jobs(suite: str, only: str | None = None) -> list[Job]:
    module = import_module(f"benchmarks.verdict.{SUITES[suite]}")
    return jobs(suite, module.CONSTRUCTIONS, module.FIRST_SEED, only)


def line_of(job: Job) -> dict[str, Any]:
    """Train and diagnose one run: what the table keeps of it."""
    begun, made = time.perf_counter(), constructions(job.suite)[job.construction]
    kept: dict[str, Any] = {"suite": job.suite, "construction": job.construction, "variant": job.variant}
    kept |= {"seed": job.seed, "regime_by_theory": made.regime}
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LONGEST)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept |= _measured(made, job, Path(folder, "run"))
    except Exception as error:  # one run that fails must not cost the others
        kept["failed"] = f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.alarm(0)
        torch.set_num_threads(threads)
    return {**kept, "seconds": round(time.perf_counter() - begun, 1)}


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"not done after {LONGEST} s")


def _measured(made: Construction, job: Job, path: Path) -> dict[str, Any]:
    torch.manual_seed(job.seed)
    trial = made.make(job.seed, job.variant)
    begun = time.perf_counter()
    run = trained(trial, path, job.seed)
    watched = time.perf_counter()
    diagnosis = json.loads(fl.diagnose(run.run).to_json())
    diagnosed = time.perf_counter()
    steps = {name: found for name, found in run.run.arrays.items() if name.startswith("ntk")}
    return {
        "regime": diagnosis["regime"],
        "headline": diagnosis["headline"],
        "numbers": diagnosis["numbers"],
        "opinions": {name: [one["value"], one["says"]] for name, one in diagnosis["opinions"].items()},
        "useful": {key: diagnosis["useful"][key] for key in ("first", "later", "network", "error", "unit")},
        "times": diagnosis["times"],
        "steps": run.run.lines[-1]["step"],
        "measured_steps": [line["step"] for line in run.run.lines],
        "kernel_steps": max(steps.values(), key=len, default=[]),
        "loss_first": run.losses[0],
        "loss_left": run.losses[1] / run.losses[0],
        "loss_left_centered": run.left,
        **references(trial, run),
        "training_seconds": round(watched - begun, 1),
        "diagnosis_seconds": round(diagnosed - watched, 1),
    }


def lines_of(missing: list[Job], processes: int) -> Iterator[dict[str, Any]]:
    """As they are done; in this process if it is the only one."""
    if processes == 1:
        yield from (rounded(line_of(job)) for job in missing)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(line_of, job) for job in missing]):
            yield rounded(future.result())


def rounded(value: Any) -> Any:
    """Four digits; what is not finite is null."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def computed(asked: list[Job], table: Path, processes: int) -> None:
    """Train what the table does not have yet."""
    have = {(line["construction"], str(line["variant"]), line["seed"]) for line in rows(table)}
    missing, begun = [job for job in asked if job.key not in have], time.monotonic()
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("a") as out:
        for done, line in enumerate(lines_of(missing, processes), 1):
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(f"{done}/{len(missing)} {time.monotonic() - begun:.0f} s", told(line), file=sys.stderr, flush=True)


def told(line: dict[str, Any]) -> str:
    """A line of the table in short."""
    name = f"{line['construction']} ({line['variant']}) seed {line['seed']}"
    if "failed" in line:
        return f"{name}: {line['failed']}"
    numbers = {
        "left": "loss_left",
        "centered": "loss_left_centered",
        "gap": "reference_gap_probe",
        "test": "reference_gap_test",
        "unshrunk": "reference_gap_unshrunk",
        "turned": "reference_turning",
        "grew": "reference_growth",
    }
    values = {short: math.nan if line[key] is None else line[key] for short, key in numbers.items()}
    shown = " ".join(f"{short} {value:.3g}" for short, value in values.items())
    return (
        f"{name}: {line['regime_by_theory']}, told {line['regime']}; {shown}; "
        f"{line['steps']} steps, {line['training_seconds']} + {line['diagnosis_seconds']} of {line['seconds']} s"
    )


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that keep a core busy each."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--out", type=Path, help="a file of one line of JSON for each run, added to")
    parser.add_argument("--only", help="a part of the name of a construction")
    parser.add_argument("--first", type=int, help="so many runs at most")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the runs")
    parser.add_argument("--table", action="store_true", help="train nothing, print what the table holds")
    parser.add_argument("--list", action="store_true", help="train nothing, print constructions and reasons")
    given = parser.parse_args(arguments)
    if given.list:
        for one in constructions(given.suite).values():
            print(f"{one.name}: {one.regime}, {one.seeds * len(one.variants)} runs; {one.reason}")
        return
    table = given.out or Path(__file__).parent / f"{SUITES[given.suite]}.jsonl"
    if not given.table:
        with busy(given.load):
            computed(suite_jobs(given.suite, given.only)[: given.first], table, given.jobs)
    show([line for line in rows(table) if given.only is None or given.only in line["construction"]])


if __name__ == "__main__":
    main()
