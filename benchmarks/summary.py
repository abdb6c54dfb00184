"""Repeated calls of a Session in one process, on a GPU if there is one: median and least milliseconds.

    python benchmarks/summary.py            about 80 s on an H200
    python benchmarks/summary.py --small    tiny sizes, for a trial on a CPU

Workloads of `benchmarks/workloads.py`; W5 in turns with `torch.func`; networks of the size of GPT-2 (by `transformers`
where it is installed), ViT-B/16 and ConvNeXt-tiny in turns with their bare passes, forward and backward with weight
gradients; all with weights drawn at random. *First* is the first call of a Session in a process that has run the bare
passes, *fresh* the first call of another Session later. float32, TF32 off.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import featlearn as fl
from benchmarks import workloads
from benchmarks.peers import torch_func
from benchmarks.plain_passes import gpt2

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def timed(*calls: Callable[[], Any], repeats: int) -> list[list[float]]:
    """Milliseconds of every call, in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, own in zip(calls, times, strict=True):
            _wait()
            begun = time.perf_counter()
            call()
            _wait()
            own.append(1e3 * (time.perf_counter() - begun))
    return times


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def shown(times: list[float]) -> str:
    """Median and least."""
    return f"{statistics.median(times):9.2f} ({min(times):.2f})"


def workload_rows(small: bool) -> None:
    """W1, W2, W4 and ResNet-18."""
    for name, repeats in (("W1-traced", 50), ("W2-2000", 50), ("W2-10000", 9), ("W4", 7), ("R18-one", 4)):
        one = workloads.WORKLOADS[name]
        network, x = (
            one.network(torch.float32).to(DEVICE),
            one.probe(9 if small else one.cuda, torch.float32).to(DEVICE),
        )
        session = fl.Session(network, x)
        session.ntk()
        session.ntk()
        (ours,) = timed(session.ntk, repeats=2 if small else repeats)
        print(f"{name:10} P = {len(x):<6} repeated {shown(ours)}", flush=True)


def transformer_rows(small: bool) -> None:
    """W5 in turns with torch.func, five Sessions."""
    one = workloads.WORKLOADS["W5"]
    network, x = one.network(torch.float32).to(DEVICE), one.probe(9 if small else one.cuda, torch.float32).to(DEVICE)
    torch_func.kernel(network, x, "traced")
    for number in range(1 if small else 5):
        session = fl.Session(network, x)
        session.ntk()
        session.ntk()
        ours, others, bare = timed(
            session.ntk,
            lambda: torch_func.kernel(network, x, "traced"),
            bare_passes(network, x),
            repeats=2 if small else 20,
        )
        print(
            f"W5 Session {number + 1}         repeated {shown(ours)}  torch.func {shown(others)}  bare {shown(bare)}",
            flush=True,
        )


def bare_passes(network: nn.Module, x: Any, readout: Any = None) -> Callable[[], None]:
    """A forward and a backward pass with weight gradients."""
    parameters = list(network.parameters())

    def run() -> None:
        output = network(**x) if isinstance(x, dict) else network(x)
        outputs: Tensor = readout(output, x) if readout else output
        torch.autograd.grad(outputs.sum(), parameters, allow_unused=True)

    return run


def language_model(small: bool) -> tuple[nn.Module, Any, Any]:
    """GPT-2 124M, 64 sequences of 128 tokens, mean log-probability."""
    try:
        return gpt2(small)
    except ImportError:
        sizes = (2, 64, 2, 12, 97) if small else (12, 768, 12, 128, 50257)
        return workloads.LanguageModel(*sizes), torch.randint(sizes[4], (9 if small else 64, sizes[3])), None


def vision_transformer(small: bool) -> tuple[nn.Module, Any, Any]:
    """ViT-B/16, 64 images, one output."""
    size = 32 if small else 224
    network = workloads.VisionTransformer(32, 16, 32, 2, 2) if small else workloads.VisionTransformer()
    return network, torch.randn(9 if small else 64, 3, size, size), None


def convolutional(small: bool) -> tuple[nn.Module, Any, Any]:
    """ConvNeXt-tiny, 64 images, one output."""
    size = 32 if small else 224
    network = workloads.convnext((8, 16), (1, 2)) if small else workloads.convnext()
    return network, torch.randn(9 if small else 64, 3, size, size), None


def large_rows(small: bool) -> None:
    """Against bare passes."""
    for name, build in (("GPT-2", language_model), ("ViT-B/16", vision_transformer), ("ConvNeXt", convolutional)):
        torch.manual_seed(0)
        network, x, readout = build(small)
        network = network.to(DEVICE).eval()
        x = {key: value.to(DEVICE) for key, value in x.items()} if isinstance(x, dict) else x.to(DEVICE)
        bare = bare_passes(network, x, readout)
        bare()
        session = fl.Session(network, x, readout=readout)
        first = timed(session.ntk, repeats=1)[0][0]
        session.ntk()
        ours, passes = timed(session.ntk, bare, repeats=2 if small else 7)
        fresh = timed(fl.Session(network, x, readout=readout).ntk, repeats=1)[0][0]
        ratio = statistics.median(ours) / statistics.median(passes)
        print(
            f"{name:10}            repeated {shown(ours)}  bare {shown(passes)}  ratio {ratio:.2f}  first {first:.0f}"
            f"  fresh {fresh:.0f}",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    if DEVICE == "cuda":
        for owner in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
            owner.fp32_precision = "ieee"
    begun = time.perf_counter()
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'}; milliseconds, "
        "median (least)",
        flush=True,
    )
    workload_rows(small)
    transformer_rows(small)
    large_rows(small)
    print(f"{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
