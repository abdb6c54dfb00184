"""What watching costs: three networks trained with and without `fl.watch`, in one process.

    python benchmarks/watch_overhead.py [--device cuda] [--models mlp resnet18 gpt] [--steps N] [--cheap]

Default schedule and budget (5 %), default quantities or, with `--cheap`, those of a few forward passes; a probe and as
many test points. Inputs are random: what a step costs does not depend on them. The bare loop makes half of its steps
before the watched one and half after it, so that a machine that becomes slower does not count as overhead. Seconds are
CPU time of the process, or wall time on a GPU. `more` is what watching added, entering and the last measurement
included, and should be at most `allowed`: 5 % and 4 s. `single` is one measurement of everything, in the middle.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import featlearn as fl


class Block(nn.Module):
    """Two convolutions around which the input goes, too."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        same = inputs == outputs and stride == 1
        around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.around = nn.Identity() if same else around

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(h)) + self.around(x))


def resnet18(width: int) -> nn.Module:
    """ResNet-18 for images of 32 x 32 pixels."""
    blocks, inputs = [], width
    for stage in range(4):
        for number in range(2):
            outputs = width * 2**stage
            blocks.append(Block(inputs, outputs, 2 if stage and not number else 1))
            inputs = outputs
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class Attention(nn.Module):
    """Causal, with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.into, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """A decoder with learned positions; (P, T) tokens to (P, T, tokens) logits."""

    def __init__(self, tokens: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.maps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for layer, (attention, maps) in enumerate(zip(self.attention, self.maps, strict=True)):
            h = h + attention(self.norms[2 * layer](h))
            h = h + maps(self.norms[2 * layer + 1](h))
        return self.head(self.norms[-1](h))


@dataclass
class Task:
    """A network with its batches, its probe and how many steps it makes by default."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    samples: int
    probe: int
    steps: int
    readout: Any = None

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-3)


def tasks(device: str) -> dict[str, Task]:
    """Sizes for one core, or for a GPU."""
    large = device != "cpu"

    def images(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        return lambda count: (torch.randn(count, *shape, device=device), torch.randint(10, (count,), device=device))

    def text(count: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(65, (count, length + 1), device=device)
        return ids[:, :-1], ids[:, 1:]

    length = 256 if large else 32
    gpt = (6, 384, 6) if large else (4, 64, 2)  # heads, width, layers
    return {
        "mlp": Task(
            lambda: nn.Sequential(nn.Flatten(), *mlp_layers(1024 if large else 256)),
            images(784),
            128,
            128,
            20_000 if large else 9000,
        ),
        "resnet18": Task(
            lambda: resnet18(64 if large else 8),
            images(3, 32, 32),
            128 if large else 32,
            128,
            2000 if large else 1300,
        ),
        "gpt": Task(
            lambda: GPT(65, length, gpt[1], gpt[0], gpt[2]),
            text,
            64 if large else 16,
            64 if large else 32,
            2000 if large else 1250,
            fl.readouts.last_token,
        ),
    }


def mlp_layers(width: int) -> list[nn.Module]:
    return [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]


class Training:
    """A network being trained, with the seconds that it took."""

    def __init__(self, task: Task, device: str) -> None:
        torch.manual_seed(0)
        self.task, self.model = task, task.build().to(device)
        self.optimizer = task.optimizer(self.model)
        self.seconds = 0.0

    def run(self, steps: int, seen: Any = None) -> None:
        begun = now()
        for _ in range(steps):
            x, y = self.task.batch(self.task.samples)
            outputs = self.model(x)
            loss = functional.cross_entropy(outputs.flatten(0, -2), y.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if seen is not None:
                seen.step(loss=loss)
        self.seconds += now() - begun


def now() -> float:
    """CPU seconds of this process, or wall time on a GPU once all that was started is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def probe_of(task: Task) -> tuple[Tensor, Tensor]:
    x, y = task.batch(task.probe)
    return x, y if y.dim() == 1 else y[:, -1]


def single(task: Task, device: str, folder: Path, quantities: list[str] | None) -> float:
    """Seconds of one measurement of everything: the median of three, after the first."""
    training, found = Training(task, device), []
    with fl.watch(
        training.model,
        probe=probe_of(task),
        out=folder,
        every=1,
        budget=None,
        optimizer=training.optimizer,
        readout=task.readout,
        quantities=quantities,
    ) as seen:
        for _ in range(4):
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.mul_(1.001)
            begun = now()
            seen.step()
            found.append(now() - begun)
    return statistics.median(found[1:])


COLUMNS = [
    "network",
    "parameters",
    "device",
    "steps",
    "bare, s",
    "more, s",
    "allowed, s",
    "gaps, kernels",
    "probe samples",
    "single, s",
]


def row(name: str, task: Task, device: str, steps: int, folder: Path, quantities: list[str] | None) -> list[str]:
    """Train both and say what it took."""
    bare, watched = Training(task, device), Training(task, device)
    for training in (bare, watched):  # the first steps of a process cost more than all others
        training.run(3)
        training.seconds = 0.0
    bare.run(steps // 2)
    begun = now()
    with fl.watch(
        watched.model,
        probe=probe_of(task),
        test=probe_of(task),
        out=folder / "run",
        optimizer=watched.optimizer,
        readout=task.readout,
        quantities=quantities,
    ) as seen:
        watched.run(steps, seen)
    whole = now() - begun
    bare.run(steps - steps // 2)
    run = seen.run
    counts = [len(run.scalar(key)[0]) if key in run.names else 0 for key in ("gap/probe", "ntk/norm")]
    return [
        name,
        f"{sum(p.numel() for p in watched.model.parameters()):,}",
        device,
        str(steps),
        f"{bare.seconds:.1f}",
        f"{whole - bare.seconds:.1f}",
        f"{0.05 * bare.seconds + 4:.1f}",
        ", ".join(map(str, counts)),
        str((run.probe_samples or (0, 0))[1]),
        f"{single(task, device, folder / 'single', quantities):.3f}",
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", choices=list(tasks("cpu")), default=list(tasks("cpu")))
    parser.add_argument("--steps", type=int, help="of every network; by default about half a minute of each")
    parser.add_argument("--cheap", action="store_true", help="the linearization gap, richness and weights alone")
    options = parser.parse_args()
    quantities = ["gap", "richness", "weights"] if options.cheap else None
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS), flush=True)
    for name in options.models:
        task = tasks(options.device)[name]
        with tempfile.TemporaryDirectory() as folder:
            found = row(name, task, options.device, options.steps or task.steps, Path(folder), quantities)
        print("| " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main()
