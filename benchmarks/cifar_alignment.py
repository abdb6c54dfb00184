"""Kernel-task alignment of a ResNet-18 on all CIFAR-10 training images at hand, with its error: seconds and memory.

    python benchmarks/cifar_alignment.py [--data-root DIR] [--samples 30000] [--norm group] [--steps 400]

At initialization and after a short training, ten outputs, one-hot targets. The kernel of 30,000 images (3.6 GB for one
output, and hours to form) is not formed. `--check N` also forms it for the first N images and compares.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.models import ResNet18


def train(model: nn.Module, x: Tensor, labels: Tensor, steps: int, lr: float) -> float:
    """Plain momentum descent on cross-entropy; the accuracy on the last batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    right: list[Tensor] = []
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(x), (256,), device=x.device)
        outputs = model(x[chosen])
        optimizer.zero_grad()
        nn.functional.cross_entropy(outputs, labels[chosen]).backward()
        optimizer.step()
        schedule.step()
        right.append((outputs.argmax(1) == labels[chosen]).float().mean())
    return float(torch.stack(right[-20:]).mean())


def report(name: str, model: nn.Module, x: Tensor, y: Tensor, vectors: int | None, check: int) -> None:
    """Measure once, print value, error, seconds and peak memory."""
    cuda = x.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    found = fl.estimate_alignment(model, x, y, vectors=vectors)
    seconds = time.perf_counter() - begun
    memory = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cuda else ""
    print(f"{name}: alignment {found}, {len(x)} images, {seconds:.1f} s{memory}", flush=True)
    if check:
        begun = time.perf_counter()
        exact = float(fl.metrics.alignment(fl.ntk(model, x[:check]), y[:check]))
        formed = time.perf_counter() - begun
        part = fl.estimate_alignment(model, x[:check], y[:check], vectors=vectors or 64)
        off = (float(part) - exact) / float(part.stderr)
        print(f"  first {check}: formed {exact:.6f} in {formed:.1f} s, estimated {part}, {off:+.2f} standard errors")


def main() -> None:
    """Measure at initialization and after training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--samples", type=int, default=30_000)
    parser.add_argument("--norm", choices=["batch", "group", "none"], default="group")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--vectors", type=int, default=None)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--check", type=int, default=0)
    parser.add_argument("--random-data", action="store_true", help="Gaussian images, random labels: for timing")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.random_data:
        x, labels = torch.randn(options.samples, 3, 32, 32), torch.randint(10, (options.samples,))
    else:
        x, labels = fl.data.cifar10(options.data_root, "train", options.batches, normalization="channel")
        x, labels = x[: options.samples], labels[: options.samples]
    x, labels = x.to(device), labels.to(device)
    y = nn.functional.one_hot(labels, 10).float()
    model = ResNet18(norm=options.norm, width=options.width).to(device)
    size = sum(p.numel() for p in model.parameters())
    print(f"ResNet-18, {options.norm} norm, {size / 1e6:.1f} M parameters, torch {torch.__version__}, {device}")
    report("at initialization", model, x, y, options.vectors, options.check)
    accuracy = train(model, x, labels, options.steps, options.lr)
    report(f"after {options.steps} steps (accuracy {accuracy:.2f})", model, x, y, options.vectors, options.check)


if __name__ == "__main__":
    main()
