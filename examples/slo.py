"""What speed limited optimization does to features, layer alignment and test error.

speeds    a fast first layer among slow ones, against gradient descent, from small and large weights
          (Beaglehole et al. 2024, Fig. 4)
scale     weights of constant norm (keep_output_scale), against gradient descent, LARS and plain SLO
          (asked for in Xu & Ziyin 2024, Sec. 3.4)
adaptive  always the layer whose features are furthest behind, against gradient descent
          (Beaglehole et al. 2024, Fig. 12)

Each line is a mean over seeds, with the lowest and the highest in brackets.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import inf, isfinite
from typing import NamedTuple

import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.steer import SLO, AdaptiveSLO, hidden_correlations, speed_groups

Numbers = dict[str, float]


class LARS(torch.optim.Optimizer):
    """W <- W - lr |W| g / |g|: layerwise rates by the norm of the weights (You et al. 2017), the bare rule."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad * (group["lr"] * weight.norm() / weight.grad.norm()))


class Task(NamedTuple):
    """Samples to train on and unseen ones, targets (P, C)."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    egop: Tensor | None = None


def chain(degree: int, seed: int, samples: int = 256, dimension: int = 32) -> Task:
    """The chain monomial, with 4096 unseen samples."""
    data = fl.data.chain_monomial(samples + 4096, dimension, degree, generator=torch.Generator().manual_seed(seed))
    x, y = data.x, data.y[:, None]
    return Task(x[:samples], y[:samples], x[samples:], y[samples:], data.egop)


def digits(validate: bool) -> Task:
    """500 digits to train on; unseen are 1000 others of the training part, or the test part."""
    data, test = fl.data.digits("train"), fl.data.digits("test")
    x, y = data.x, data.one_hot(centered=True)
    unseen = (x[500:], y[500:]) if validate else (test.x, test.one_hot(centered=True))
    return Task(x[:500], y[:500], *unseen)


def perceptron(task: Task, width: int, hidden: int, seed: int) -> nn.Sequential:
    """ReLU layers without biases, initialized as torch does."""
    torch.manual_seed(seed)
    sizes = [task.x.shape[1], *[width] * hidden, task.y.shape[1]]
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair, bias=False), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def weights(model: nn.Sequential) -> list[Tensor]:
    """Of every layer, first to last."""
    return [parameter.detach() for parameter in model.parameters()]


@torch.no_grad()
def rescale(model: nn.Sequential, factors: Iterable[float]) -> None:
    """Multiply every layer by its factor."""
    for weight, factor in zip(weights(model), factors, strict=True):
        weight.mul_(factor)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Squared error of a sample, averaged."""
    return (model(x) - y).square().sum(1).mean()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    task: Task,
    steps: int,
    decay: bool = False,
    each: Callable[[int], None] = lambda step: None,
) -> None:
    """Full-batch steps; `decay` lowers the rate to zero along a cosine."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if decay else None
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, task.x, task.y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        each(step)


@torch.no_grad()
def errors(model: nn.Module, task: Task) -> Numbers:
    """On seen and unseen samples; for classes also the share of unseen samples that are misclassified."""
    found = {"train": float(loss_of(model, task.x, task.y)), "test": float(loss_of(model, task.x_test, task.y_test))}
    if task.y.shape[1] > 1:
        wrong = model(task.x_test).argmax(1) != task.y_test.argmax(1)
        found["wrong"] = float(wrong.float().mean())
    return found


def features(model: nn.Sequential, task: Task, initial: dict[str, Tensor]) -> Numbers:
    """Neural feature correlations of the first layer, and how far its weights resemble the task."""
    # in double: somewhere in many measurements a ReLU is too near to zero for single precision
    first = fl.neural_features(model, task.x, initial=initial, layers="0", dtype=torch.float64)["0"]
    found = {"UC-NFC": first.uncentered, "C-NFC": first.centered, "C/UC": first.centered_share}
    if task.egop is not None:
        found["NFM~EGOP"] = float(fl.metrics.correlation(first.nfm, task.egop))
    return found


def line(label: str, runs: list[Numbers]) -> None:
    """Mean, lowest and highest of every number."""
    parts = []
    for name in runs[0]:
        values = [run[name] for run in runs]
        parts.append(f"{name} {sum(values) / len(values):.3f} ({min(values):.3f}-{max(values):.3f})")
    print(f"{label:56}", *parts, sep="  ", flush=True)


def speeds(quick: bool) -> None:
    """Beaglehole et al. 2024, Fig. 4: scale of the first layer, learning rate of the paper, readout times 0.01."""
    seeds, steps = (1, 40) if quick else (3, 600)
    for scale, lr in ((1.0, 0.03), (0.1, 0.1), (0.01, 0.2), (0.001, 0.4)):
        runs: dict[str, list[Numbers]] = {"gradient descent": [], "SLO": []}
        for method, found in runs.items():
            for seed in range(seeds):
                task = chain(5, seed=100 + seed)
                model = perceptron(task, 256, 2, seed)
                rescale(model, (scale, 1.0, 0.01))
                initial = {name: value.clone() for name, value in model.state_dict().items()}
                optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr)
                if method == "SLO":
                    optimizer = SLO(speed_groups(model, {"0": 500.0, "*": 0.002}), lr, eps=0.1)
                train(model, optimizer, task, steps)
                found.append(features(model, task, initial) | errors(model, task))
            line(f"{method} from {scale}", found)


State = dict[str, Tensor]


def scaled(task: Task, method: str, rate: float, scale: float, seed: int, steps: int) -> tuple[nn.Sequential, State]:
    """A trained network and its initial weights. `rate` is the share of its norm that a weight moves (GD: the lr)."""
    model = perceptron(task, 256, 2, seed)
    rescale(model, 3 * [scale])
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    groups = speed_groups(model, {name: float(value.norm()) for name, value in initial.items()})
    optimizer = {
        "gradient descent": lambda: torch.optim.SGD(model.parameters(), rate),
        "LARS": lambda: LARS(model.parameters(), rate),
        "SLO": lambda: SLO(groups, rate),
        "SLO, scale kept": lambda: SLO(groups, rate, keep_output_scale=True),
    }[method]()
    train(model, optimizer, task, steps, decay=True)
    return model, initial


def judged(model: nn.Sequential, initial: State, task: Task) -> Numbers:
    """Layer alignment, growth of norms, features and errors."""
    # |U W| / (|U| |W|) of layers that follow each other; 0.0625 at first, one over the root of the width
    pairs = [float((u @ w).norm() / u.norm() / w.norm()) for w, u in pairwise(weights(model))]
    grown = [float(now.norm() / then.norm()) for now, then in zip(weights(model), initial.values(), strict=True)]
    found = {f"zeta{i + 1}": value for i, value in enumerate(pairs)}
    found |= {f"norm{i + 1}": value for i, value in enumerate(grown)}
    found |= {name: value for name, value in features(model, task, initial).items() if name in ("UC-NFC", "NFM~EGOP")}
    return found | errors(model, task)


def scale(quick: bool) -> None:
    """Xu & Ziyin 2024, Sec. 3.4: alignment at constant scale. Rates are chosen on other samples, for each line."""
    seeds, steps, rates = (1, 30, 1) if quick else (3, 600, 3)
    methods = {
        "gradient descent": (0.1, 0.3, 1.0),
        "LARS": (0.01, 0.03, 0.1),
        "SLO": (0.01, 0.03, 0.1),
        "SLO, scale kept": (0.01, 0.03, 0.1),
    }
    for name in ("chain", "digits"):
        other = chain(5, seed=50) if name == "chain" else digits(validate=True)
        tasks = [chain(5, 100 + seed) if name == "chain" else digits(validate=False) for seed in range(seeds)]
        for size in (1.0,) if quick else (1.0, 0.7, 0.5):
            for method, grid in methods.items():
                tried = {r: errors(scaled(other, method, r, size, 50, steps)[0], other)["test"] for r in grid[:rates]}
                best = min(tried, key=lambda r: tried[r] if isfinite(tried[r]) else inf)
                runs = [judged(*scaled(task, method, best, size, seed, steps), task) for seed, task in enumerate(tasks)]
                line(f"{name}, {method}, weights times {size}, rate {best}", runs)


def adaptive(quick: bool) -> None:
    """Beaglehole et al. 2024, Fig. 12, as printed: all layers times 0.1. Correlations: means of the last 100 steps."""
    seeds, steps = (1, 12) if quick else (5, 500)
    methods = {"gradient descent": 0, "adaptive": 1, "adaptive, every 10": 10}
    for name, factors in (("all layers times 0.1", (0.1,) * 4), ("first 0.1, readout 0.01", (0.1, 1.0, 1.0, 0.01))):
        for method, every in methods.items():
            runs = []
            for seed in range(seeds):
                task = chain(3, seed=100 + seed)
                model = perceptron(task, 256, 3, seed)
                rescale(model, factors)
                optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.25)
                if every:
                    optimizer = AdaptiveSLO(model, task.x, 0.05, every=every)
                runs.append(tail_means(model, optimizer, task, steps))
            line(f"{method}, {name}", runs)


def tail_means(model: nn.Sequential, optimizer: torch.optim.Optimizer, task: Task, steps: int) -> Numbers:
    """Means over the last 100 steps, taken every tenth: the layer that is driven makes single values jump."""
    seen: list[Numbers] = []

    def measure(step: int) -> None:
        if step >= steps - 100 and (steps - step) % 10 == 1:
            correlations = list(hidden_correlations(model, task.x).values())
            named = {f"UC{i + 1}": value for i, value in enumerate(correlations)}
            seen.append(named | {"lowest": min(correlations)} | errors(model, task))

    train(model, optimizer, task, steps, each=measure)
    return {name: sum(one[name] for one in seen) / len(seen) for name in seen[0]}


def main() -> None:
    """Run the parts asked for."""
    parts = {"speeds": speeds, "scale": scale, "adaptive": adaptive}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=f"any of {', '.join(parts)} (default: all; about 15 minutes)")
    parser.add_argument("--quick", action="store_true", help="one seed and few steps: to see that it runs")
    options = parser.parse_args()
    if unknown := set(options.part) - set(parts):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; expected any of {', '.join(parts)}")
    for name in options.part or parts:
        print(f"# {name}")
        parts[name](options.quick)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
