"""How much faster ranks are together than one process: kernels, operator, alignment, and `fl.watch`.

    python benchmarks/ranks.py [--ranks 2] [--repeats 5] [--small]

One thread for each rank, gloo on this machine. Runs of one and of several ranks take turns, the best of each counts.
Wall time says what was gained here, where other processes may have the cores; CPU seconds of the busiest rank say what
would be gained if every rank had a core of its own and waited for nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MUST = {
    "kernel, perceptron": 1.5,
    "kernel, convolutions": 1.5,
    "op @ v": 1.8,
    "estimate_alignment": 1.8,
    "step of fl.watch": 1.0,
}


def workloads(group: Any, small: bool, folder: Path) -> dict[str, Callable[[], object]]:
    """What is timed."""
    import torch
    from torch import nn

    import featlearn as fl

    torch.manual_seed(0)
    few = 20 if small else 1
    wide = nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 1))
    pictures = nn.Sequential(
        nn.Conv2d(3, 32, 5),
        nn.ReLU(),
        nn.Conv2d(32, 32, 5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 1),
    )
    x, images = torch.randn(16000 // few, 784), torch.randn(1200 // few, 3, 20, 20)
    v, y = torch.randn(16000 // few, 1), torch.randn(16000 // few)
    sessions = [fl.Session(wide, x[: 6000 // few], group=group), fl.Session(pictures, images, group=group)]
    operator = fl.NTKOperator(wide, x, group=group)
    return {
        "kernel, perceptron": sessions[0].ntk,
        "kernel, convolutions": sessions[1].ntk,
        "op @ v": lambda: operator @ v,
        "estimate_alignment": lambda: fl.estimate_alignment(wide, x, y, vectors=64, group=group),
        "step of fl.watch": watched_step(small, folder),
    }


def watched_step(small: bool, folder: Path) -> Callable[[], object]:
    """All default quantities of a convolutional network with BatchNorm on 256 images, measured at one step."""
    import torch
    from torch import nn

    import featlearn as fl

    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    samples = 64 if small else 256
    probe = (torch.randn(samples, 3, 16, 16), torch.arange(samples) % 10)
    seen = fl.watch(model, probe, out=folder / "run", every=1, budget=None).__enter__()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.01
    for _ in range(3):  # the first ones are measured by rank 0 alone, and tell how long it takes
        seen.step()
    return seen.step


def rank_main(rank: int, size: int, folder: Path, small: bool) -> None:
    """One rank: seconds of the second call of everything, on the wall clock and of this process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    found = {}
    for name, call in workloads("world" if size > 1 else None, small, folder).items():
        call()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        found[name] = (time.perf_counter() - wall, time.process_time() - cpu)
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measured(size: int, small: bool) -> dict[str, tuple[float, float]]:
    """The slowest rank of a run of so many."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", folder, "--ranks", str(size), *(["--small"] if small else [])]
        started = [subprocess.Popen([*command, "--rank", str(r)], env=environment, cwd=ROOT) for r in range(size)]
        if any(one.wait(600) for one in started):
            raise SystemExit("a rank has failed")
        said = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    return {name: tuple(max(one[name][k] for one in said) for k in (0, 1)) for name in said[0]}  # type: ignore[misc]


def main() -> None:
    """A table of the best of all repeats."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a few samples, to see that it runs")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank, given.ranks, given.folder, given.small)
        return
    best: dict[tuple[str, int], list[float]] = {}
    for _ in range(given.repeats):
        for size in (1, given.ranks):
            for name, seconds in measured(size, given.small).items():
                before = best.setdefault((name, size), [float("inf")] * 2)
                best[name, size] = [min(pair) for pair in zip(before, seconds, strict=True)]
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, best of {given.repeats}\n")
    print(f"| | 1 rank | {given.ranks} ranks | speed-up | by CPU seconds of the busiest rank | must |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, must in MUST.items():
        (one, one_cpu), (several, several_cpu) = best[name, 1], best[name, given.ranks]
        print(
            f"| {name} | {one:.2f} s | {several:.2f} s | {one / several:.2f} | {one_cpu / several_cpu:.2f} | {must} |"
        )


if __name__ == "__main__":
    main()
