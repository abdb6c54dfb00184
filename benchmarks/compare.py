"""One table: tangent kernels of common networks, by this library and by others, in about ten minutes.

    python benchmarks/compare.py                            every network
    python benchmarks/compare.py --networks W4 "tiny MLP"   some of them
    python benchmarks/compare.py --repeats 1                faster, and less certain
    python benchmarks/compare.py --limit 1000               wait for slow peers

All methods run in one process on one thread, in turns, and the least CPU time of each counts. *Session* repeats a
measurement with `fl.Session`, *once* is a call of `fl.ntk`, which also audits the model. *Bare* is one forward and one
backward pass of the whole batch. Libraries that are not installed, or that do not support a network, are left out.
Peers whose kernel would take more than a few seconds are left out, too. *Error* is the largest difference from the
kernel of the Session, relative to its largest entry.
"""

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch is imported

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import featlearn as fl
from benchmarks.peers import backpack, curvlinops, nngeometry, torch_func, torchjd
from benchmarks.workloads import WORKLOADS, Workload

PEERS = {
    "torch.func": torch_func,
    "nngeometry": nngeometry,
    "backpack": backpack,
    "curvlinops": curvlinops,
    "torchjd": torchjd,
}
FEW = 4
"""Peers are tried on one sample of so many first."""


def main() -> None:
    """Measure and print one line per network."""
    available = [name for name, workload in WORKLOADS.items() if workload.samples]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=available, choices=available, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=15.0, help="leave out a peer that needs more seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    installed = [name for name in PEERS if importlib.util.find_spec(name.partition(".")[0])]
    missing = [name for name in PEERS if name not in installed]
    print(f"torch {torch.__version__}, one thread, CPU milliseconds, least of {options.repeats}")
    print(f"not installed, left out: {', '.join(missing)}" if missing else "all peers are installed")
    columns = ["Session", "once", "bare", *installed]
    print(f"{'network':18}" + "".join(f"{name:>11}" for name in columns), end="")
    print("   func/Session  func/once  Session/bare  error")
    for name in options.networks:
        print(row(WORKLOADS[name], installed, options.repeats, options.limit), flush=True)


def row(workload: Workload, installed: list[str], repeats: int, limit: float) -> str:
    """Return the line of one network."""
    network, x = workload.network(torch.float32), workload.probe(workload.samples, torch.float32)
    outputs = "mean" if workload.mode == "traced" else workload.mode
    session = fl.Session(network, x)
    calls: dict[str, Callable[[], Tensor | None]] = {
        "Session": lambda: session.ntk(outputs=outputs),
        "once": lambda: fl.ntk(network, x, outputs=outputs),
        "bare": lambda: bare(network, x),
    }
    for peer in installed:
        few = x[: max(2, len(x) // FEW)]
        try:
            seconds, _ = timed(lambda peer=peer, few=few: PEERS[peer].kernel(network, few, workload.mode))
        except Exception:  # this peer does not support the network
            continue
        if seconds * FEW < limit:
            calls[peer] = lambda peer=peer: PEERS[peer].kernel(network, x, workload.mode)
    kernels: dict[str, Tensor | None] = {}
    least: dict[str, float] = {}
    for turn in range(repeats + 1):  # the first turn warms up
        for name, call in calls.items():
            if least.get(name, 0.0) > limit:  # once is enough
                continue
            seconds, kernels[name] = timed(call)
            least[name] = seconds if turn < 2 else min(least[name], seconds)
    columns = ("Session", "once", "bare", *installed)
    cells = [f"{1e3 * least[name]:11.1f}" if name in least else f"{'-':>11}" for name in columns]
    func = least.get("torch.func", float("nan"))
    ratios = f"{func / least['Session']:15.2f}{func / least['once']:11.2f}{least['Session'] / least['bare']:14.2f}"
    return f"{workload.name:18}" + "".join(cells) + ratios + f"  {largest_error(kernels):.0e}"


def bare(network: nn.Module, x: Tensor) -> None:
    """Run one forward and one backward pass with weight gradients."""
    torch.autograd.grad(network(x).sum(), list(network.parameters()))


def timed(call: Callable[[], Tensor | None]) -> tuple[float, Tensor | None]:
    """Return the CPU seconds of a call, at least 0.05 s of calls, and its result."""
    count, begun = 0, time.process_time()
    while True:
        result = call()
        count += 1
        if (spent := time.process_time() - begun) > 0.05:
            return spent / count, result


def largest_error(kernels: dict[str, Tensor | None]) -> float:
    """Return the largest difference of any kernel from that of a Session, relative to its largest entry."""
    reference = kernels["Session"]
    assert reference is not None
    size = float(reference.abs().max())
    return max(float((kernel - reference).abs().max()) / size for kernel in kernels.values() if kernel is not None)


if __name__ == "__main__":
    main()
