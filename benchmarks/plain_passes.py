"""Tangent kernels against the plain forward and backward pass of the same network and batch, in one process.

    python benchmarks/plain_passes.py                       every network, on a GPU if there is one
    python benchmarks/plain_passes.py --networks gpt2 w5    some of them
    python benchmarks/plain_passes.py --small               tiny sizes, for a trial on a CPU

Columns: a forward pass and a forward and backward pass with weight gradients (bare); the first call of a Session, a
repeated one, what `fl.ntk` takes without a Session; repeated over bare; peak memory above what was held; and
`torch.func` where it works. float32, TF32 off, medians.
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
from benchmarks.peers import torch_func
from benchmarks.workloads import GPT


def log_probability(output: Any, x: dict[str, Tensor]) -> Tensor:
    """(P,) the mean log-probability of the tokens that follow."""
    found = output.logits[:, :-1].log_softmax(-1).gather(2, x["input_ids"][:, 1:, None])
    mean: Tensor = found.mean((1, 2))
    return mean


def gpt2(small: bool) -> tuple[nn.Module, Any, Any]:
    """GPT-2 124M, 64 sequences of 128 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=97) if small else GPT2Config()
    config.use_cache = False
    samples, length = (9, 12) if small else (64, 128)
    ids = torch.randint(config.vocab_size, (samples, length))
    return GPT2LMHeadModel(config), {"input_ids": ids}, log_probability


def images(name: str, small: bool, zero_head: bool = False) -> tuple[nn.Module, Any, Any]:
    """A torchvision network with one output on 64 images."""
    import torchvision

    size, samples = (64, 5) if small else (224, 64)
    options = {"image_size": size} if name.startswith("vit") else {}
    model = getattr(torchvision.models, name)(num_classes=1, **options)
    if name.startswith("vit") and not zero_head:  # torchvision begins with zeros there, behind which nothing moves
        nn.init.normal_(model.heads.head.weight, std=0.02)
    return model, torch.randn(samples, 3, size, size), None


def small_gpt(samples: int) -> tuple[nn.Module, Any, Any]:
    """W5: three blocks of width 128, 64 tokens."""
    return GPT(), torch.randint(65, (samples, 64)), None


NETWORKS: dict[str, Callable[[bool], tuple[nn.Module, Any, Any]]] = {
    "gpt2": gpt2,
    "vit_b_16": lambda small: images("vit_b_16", small),
    "vit_zero_head": lambda small: images("vit_b_16", small, zero_head=True),
    "w5": lambda small: small_gpt(9 if small else 64),
    "w5_512": lambda small: small_gpt(12 if small else 512),
    "resnet50": lambda small: images("resnet50", small),
    "convnext_tiny": lambda small: images("convnext_tiny", small),
}


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds."""
    times = []
    for _ in range(repeats):
        _wait()
        begun = time.perf_counter()
        call()
        _wait()
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="print where a repeated call spends its time")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        for owner in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
            owner.fp32_precision = "ieee"
    print("network          forward     bare    first  repeated   fl.ntk  /bare  torch.func   peak GiB")
    for name in options.networks:
        torch.manual_seed(0)
        model, x, readout = NETWORKS[name](options.small)
        model = model.to(device).eval()
        x = {k: v.to(device) for k, v in x.items()} if isinstance(x, dict) else x.to(device)
        _row(name, model, x, readout, options, device)


def _row(name: str, model: nn.Module, x: Any, readout: Any, options: argparse.Namespace, device: str) -> None:
    def forward() -> Tensor:
        output = model(**x) if isinstance(x, dict) else model(x)
        return readout(output, x) if readout else output  # type: ignore[no-any-return]

    parameters = list(model.parameters())

    def bare() -> None:
        torch.autograd.grad(forward().sum(), parameters, allow_unused=True)

    bare()
    once, both = timed(forward, options.repeats), timed(bare, options.repeats)
    session = fl.Session(model, x, readout=readout)
    first = timed(session.ntk, 1)
    session.ntk()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    repeated = timed(session.ntk, options.repeats)
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30 if device == "cuda" else float("nan")
    single = timed(lambda: fl.ntk(model, x, readout=readout), 3)
    other = float("nan")
    if name.startswith("w5"):
        torch_func.kernel(model, x, "traced")
        other = timed(lambda: torch_func.kernel(model, x, "traced"), options.repeats)
    print(
        f"{name:15} {once:8.1f} {both:8.1f} {first:8.1f} {repeated:9.1f} {single:8.1f} {repeated / both:6.2f} "
        f"{other:11.1f} {peak:10.2f}",
        flush=True,
    )
    if options.profile:
        _profiled(session)


def _profiled(session: fl.Session) -> None:
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.enable()
    session.ntk()
    profile.disable()
    pstats.Stats(profile).sort_stats("cumulative").print_stats(45)


if __name__ == "__main__":
    main()
