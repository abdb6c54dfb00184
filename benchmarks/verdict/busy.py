"""Repeat the training of the README beside busy processes, with default threads, and compare what the runs recorded.

    python -m benchmarks.verdict.busy [--runs 10] [--load 4]

Every scalar, array and event but times must be equal bit by bit, and so must the verdict.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy

import featlearn as fl
from benchmarks.verdict.run import busy
from featlearn.record import Run

README = Path(__file__).parents[2] / "README.md"
CLOCKS = ("time", "seconds", "overhead", "created")
"""Parts of the names of entries that hold a time."""


def program() -> str:
    """Return the example of the README."""
    return next(
        code for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "fl.watch" in code
    )


def without_clocks(value: object) -> object:
    if isinstance(value, dict):
        return {k: without_clocks(v) for k, v in value.items() if not any(clock in k for clock in CLOCKS)}
    return [without_clocks(one) for one in value] if isinstance(value, list) else value


def digest(run: Run) -> dict[str, str]:
    """Return a hash of what a run recorded, by kind."""
    kinds = {"scalars": json.dumps(without_clocks(run.lines)).encode()}
    events = [{"kind": event["kind"], "step": event["step"]} for event in run.events]
    kinds["events"] = json.dumps(events).encode()
    arrays = hashlib.sha256()
    for name, steps in sorted(run.arrays.items()):
        for step in steps:
            for key, array in sorted(run.array(name, step).items()):
                arrays.update(f"{name} {step} {key} {array.shape}".encode() + numpy.ascontiguousarray(array).tobytes())
    kinds["arrays"] = arrays.digest()
    verdict = fl.diagnose(run)
    numbers = {name: (float(number), number.stderr) for name, number in verdict.numbers.items()}
    kinds["verdict"] = json.dumps([verdict.regime, verdict.why_helped, verdict.headline, numbers]).encode()
    return {kind: hashlib.sha256(content).hexdigest()[:12] for kind, content in kinds.items()}


def main() -> None:
    """Run the program, and print how many different records there are of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--load", type=int, default=4)
    settings = parser.parse_args()
    digests = []
    for _ in range(settings.runs):
        with tempfile.TemporaryDirectory() as folder, busy(settings.load):
            subprocess.run([sys.executable, "-c", program()], cwd=folder, check=True, capture_output=True)
            digests.append(digest(fl.open_run(Path(folder, "runs", "digits"))))
    for kind in digests[0]:
        counts = Counter(one[kind] for one in digests)
        print(f"{kind}: {len(counts)} different of {settings.runs}: {dict(counts)}")


if __name__ == "__main__":
    main()
