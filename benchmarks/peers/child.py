"""One measurement in a process of its own: a library, a workload, how many samples; prints one line of JSON."""

import argparse
import functools
import importlib
import importlib.metadata
import json
import time

import torch

from benchmarks.peers.peak import Peak
from benchmarks.workloads import WORKLOADS


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("method")
    parser.add_argument("workload")
    parser.add_argument("out", help="where the kernel goes, a .npy file")
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=9, help="on a GPU, within this process")
    parser.add_argument("--autotuned", action="store_true", help="let cuDNN choose convolutions by timing them")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = options.autotuned
    torch.set_num_threads(1)
    peer = importlib.import_module(f"benchmarks.peers.{options.method}")
    workload, dtype = WORKLOADS[options.workload], getattr(torch, options.dtype)
    network = workload.network(dtype).to(options.device)
    x = workload.probe(options.samples, dtype).to(options.device)
    columns = getattr(peer, "COLUMNS", options.samples)
    few = min(6, options.samples)
    peer.kernel(network, x[:few], workload.mode)  # what is loaded or tuned once is not counted
    measure = functools.partial(peer.kernel, network, x, workload.mode)
    if hasattr(peer, "prepared"):
        measure = peer.prepared(network, x, workload.mode)
    if options.device == "cpu":
        seconds, size, found = _on_cpu(measure)
    else:
        seconds, size, found = _on_cuda(measure, options.repeats)
    import numpy

    numpy.save(options.out, found.detach().cpu().numpy())
    version = ", ".join(f"{name} {_version(name)}" for name in peer.PACKAGES)
    scale = options.samples / min(columns, options.samples)
    print(json.dumps({"seconds": seconds * scale, "bytes": size, "version": version, "scaled": scale > 1}))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # this library, run from its sources
        return "(sources)"


def _on_cpu(measure):  # type: ignore[no-untyped-def]
    """The second call where that takes no more than seconds: the first one gets its memory from the system."""
    peak = Peak()
    for _ in range(2):
        found = None
        begin = time.process_time()
        found = measure()
        seconds = time.process_time() - begin
        if seconds > 5.0:
            break
    return seconds, peak.bytes(), found


def _on_cuda(measure, repeats):  # type: ignore[no-untyped-def]
    """The median of several calls, between events, everything else finished."""
    # Convolutions would take TF32, which costs four digits and is no comparison.
    for owner in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
        owner.fp32_precision = "ieee"
    measure()
    found, times = None, []
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        found = None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        found = measure()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2], torch.cuda.max_memory_allocated() - base, found


if __name__ == "__main__":
    main()
