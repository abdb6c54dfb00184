"""Follow the advice of twelve runs: train, ask for the other regime, change the first weights, and train again.

    python -m benchmarks.verdict.followed [--only NAME]

A promise is kept if the gap moves in the wanted direction and the loss falls. What is not offered promises nothing.
"""

import argparse
import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import featlearn as fl
from benchmarks.verdict import networks as net
from benchmarks.verdict import tasks
from benchmarks.verdict.cases import adam, sgd, trained
from benchmarks.verdict.projects import LowRank, pretrained
from benchmarks.verdict.run import rounded
from featlearn.record import Run

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
LARGEST_LEFT = 0.9
"""Share of the first loss above which it has not fallen."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training, and the regime that is asked for."""

    model: Callable[[], nn.Module]
    task: tasks.Task
    loss: Any
    optimizer: Optimizer
    toward: Literal["rich", "lazy"]
    steps: int = 200
    declared: bool = True

    def train(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
        settings = {"loss": self.loss, "steps": self.steps, "declared": self.declared, "batch": 64}
        return trained(path, model, *self.task, optimizer=optimizer, **settings)


def no_bias(sizes: list[int]) -> nn.Sequential:
    return net.mlp(sizes, bias=False)


class Branches(nn.Module):
    """The sum of two networks without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (no_bias([64, 60, 60, 10]) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def adapted() -> nn.Module:
    """A transformer with adapters in its attention."""
    model = net.Transformer(10, 32, 2, 4).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = LowRank(block.qkv), LowRank(block.out)
    return model


def contrast(f: Tensor, _: Tensor) -> Tensor:
    """InfoNCE between neighbors in the batch."""
    z = functional.normalize(f, dim=1)
    return functional.cross_entropy((z @ z.T / 0.2).fill_diagonal_(-1e9), torch.arange(len(z)).roll(1))


def counts() -> tasks.Task:
    train, test = tasks.index(5008, 300)
    return tuple(tasks.Samples(part.x, torch.poisson((1 + part.y).exp())) for part in (train, test))


def scaled(model: nn.Module, factor: float) -> nn.Module:
    return fl.steer.scale_output(model, factor)


def jobs() -> dict[str, Job]:
    """Return all trainings by name."""
    labels, rows = tasks.digits(5000, 300, targets="labels"), tasks.digits(5001, 200)
    entropy, square = nn.CrossEntropyLoss(), nn.MSELoss()
    return {
        "frozen body": Job(
            model=lambda: net.frozen(net.mlp([64, 100, 100, 10])),
            task=labels,
            loss=entropy,
            optimizer=lambda m: adam(m, 3e-3),
            toward="rich",
        ),
        "head of a network with BatchNorm": Job(
            model=lambda: net.frozen(pretrained(5002, nn.BatchNorm2d)),
            task=labels,
            loss=entropy,
            optimizer=lambda m: adam(m, 3e-3),
            toward="rich",
        ),
        "linear model": Job(
            model=lambda: nn.Linear(64, 10), task=labels, loss=entropy, optimizer=lambda m: sgd(m, 0.05), toward="rich"
        ),
        "output x 100, SGD": Job(
            model=lambda: scaled(net.mlp([64, 100, 100, 10]), 100),
            task=rows,
            loss=square,
            optimizer=lambda m: sgd(m, 5e-5),
            toward="rich",
        ),
        "transformer x 30, AdamW": Job(
            model=lambda: scaled(net.Transformer(10, 32, 2, 4), 30),
            task=labels,
            loss=entropy,
            optimizer=lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 3e-5),
            toward="rich",
        ),
        "branches x 100": Job(
            model=lambda: scaled(Branches(), 100),
            task=rows,
            loss=square,
            optimizer=lambda m: sgd(m, 2e-5),
            toward="rich",
        ),
        "CNN from small weights, Adam": Job(
            model=lambda: net.small(net.cnn((12, 16), 10), 0.5),
            task=labels,
            loss=entropy,
            optimizer=lambda m: adam(m, 2e-3),
            toward="lazy",
        ),
        "perceptron, SGD": Job(
            model=lambda: net.mlp([64, 100, 10]),
            task=labels,
            loss=entropy,
            optimizer=lambda m: sgd(m, 0.1),
            toward="lazy",
        ),
        "Poisson counts, Adam": Job(
            model=lambda: net.mlp([15, 64, 64, 1]),
            task=counts(),
            loss=nn.PoissonNLLLoss(),
            optimizer=lambda m: adam(m, 3e-3),
            toward="lazy",
        ),
        "InfoNCE, not declared": Job(
            model=lambda: net.mlp([64, 100, 32]),
            task=labels,
            loss=contrast,
            optimizer=lambda m: adam(m, 2e-3),
            toward="lazy",
            declared=False,
        ),
        "log-softmax, x 100": Job(
            model=lambda: nn.Sequential(scaled(net.mlp([64, 100, 10]), 100), nn.LogSoftmax(1)),
            task=labels,
            loss=nn.NLLLoss(),
            optimizer=lambda m: sgd(m, 2e-5),
            toward="rich",
        ),
        "adapters, x 30": Job(
            model=lambda: scaled(adapted(), 30),
            task=labels,
            loss=entropy,
            optimizer=lambda m: adam(m, 2e-5),
            toward="rich",
        ),
    }


def followed(name: str, job: Job, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a line for each change that is offered, or one that says why there is none."""
    torch.manual_seed(sum(map(ord, name)))
    model = job.model()
    start = copy.deepcopy(model)
    before = fl.diagnose(job.train(folder / "before", model, job.optimizer(model)))
    advice = fl.advise(before, job.toward)
    line = {"run": name, "toward": job.toward, "regime": before.regime, "gap": float(before.gap)}
    if not advice.changes:
        yield {**line, "offered": "", "note": advice.note}
    for number, change in enumerate(advice.changes):
        again = copy.deepcopy(start)
        after = fl.diagnose(job.train(folder / f"after{number}", *change.apply(again, job.optimizer(again))))
        left, gap = float(after.numbers["loss_left"]), float(after.gap)
        moved = gap > float(before.gap) if job.toward == "rich" else gap < float(before.gap)
        yield {
            **line,
            "offered": change.text,
            "tried": str(change.tried),
            "regime_after": after.regime,
            "gap_after": gap,
            "loss_left": left,
            "kept": moved and not after.diverged and not left > LARGEST_LEFT,
        }


def main() -> None:
    """Follow the advice of all runs, and print a line for each change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "followed.jsonl")
    settings = parser.parse_args()
    warnings.simplefilter("ignore")
    with settings.out.open("w") as out, tempfile.TemporaryDirectory() as folder:
        for name, job in jobs().items():
            if settings.only in name:
                for line in followed(name, job, Path(folder, name.replace(" ", "-"))):
                    out.write(json.dumps(rounded(line)) + "\n")
                    print(rounded(line), flush=True)


if __name__ == "__main__":
    main()
