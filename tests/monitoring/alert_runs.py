"""Trainings for the tests of alerts: healthy ones of many kinds, and ones with a fault that begins at a known step."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.record import Run


@dataclass
class Training:
    """A network with its data, optimizer and loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Any = "cross-entropy"
    task: str = "digits"
    steps: int = 400
    batch: int = 64
    probe: int = 100
    before: Callable[["Training", int], None] = lambda training, step: None
    """Called before every step."""


def data(task: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if task == "tokens":  # each token depends on the one before
        table = torch.randint(11, (11, 3), generator=generator)
        tokens = [torch.randint(11, (700,), generator=generator)]
        for _ in range(8):
            choice = torch.randint(3, (700,), generator=generator)
            tokens.append(table[tokens[-1], choice])
        ids = torch.stack(tokens, 1)
        return ids[:, :-1], ids[:, 1:]
    if task == "regression":
        x = torch.randn(700, 12, generator=generator)
        return x, (x[:, :1] * x[:, 1:2] + x[:, 2:3].tanh())
    digits = fl.data.digits()
    x, labels = digits.x[:700].float(), digits.labels[:700]
    if task == "images":
        return x.reshape(-1, 1, 8, 8), labels
    if task == "one-hot":
        return x, nn.functional.one_hot(labels, 10).float() - 0.1
    if task == "odd":
        return x, (labels % 2).float()[:, None]
    return (x, x) if task == "itself" else (x, labels)


def objective(training: Training, outputs: Any, y: Tensor) -> Tensor:
    if training.task == "tokens":
        return nn.functional.cross_entropy(outputs.flatten(0, 1), y.flatten())
    return fl.losses.function(training.loss)(outputs, y)


def watched(training: Training, path: Path, **options: Any) -> Run:
    """Train, and return the run."""
    x, y = data(training.task)
    loss = None if training.task == "tokens" else training.loss
    given = {"alerts": lambda alert: None, "optimizer": training.optimizer, "loss": loss, "pictures": False, **options}
    order = torch.Generator().manual_seed(1)
    with fl.watch(training.model, (x[-training.probe :], y[-training.probe :]), out=path, **given) as watch:
        for step in range(1, training.steps + 1):
            training.before(training, step)
            rows = torch.randint(600, (training.batch,), generator=order)
            value = objective(training, training.model(x[rows]), y[rows])
            training.optimizer.zero_grad()
            value.backward()
            training.optimizer.step()
            watch.step(loss=value)
    return watch.run


def alerts(run: Run) -> list[dict[str, Any]]:
    return [event for event in run.events if "action" in event]


class Residual(nn.Module):
    """Blocks behind gates that begin at zero."""

    def __init__(self, width: int, normalized: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) if normalized else nn.Identity() for _ in range(3))
        self.gates = nn.Parameter(torch.zeros(3))
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for gate, norm, block in zip(self.gates, self.norms, self.blocks, strict=True):
            h = h + gate * block(norm(h)).relu()
        out: Tensor = self.last(h)
        return out


class Tokens(nn.Module):
    """A small transformer, or a GRU."""

    def __init__(self, body: str, width: int = 24) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, width), nn.Linear(width, 11)
        self.positions = nn.Embedding(8, width)
        block = nn.TransformerEncoderLayer(width, 2, 48, 0.1, "gelu", batch_first=True, norm_first=True)
        self.body: nn.Module = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        if body == "gru":
            self.body = nn.GRU(width, width, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        if isinstance(self.body, nn.GRU):
            h = self.body(h)[0]
        else:
            h = self.body(h, mask=nn.Transformer.generate_square_subsequent_mask(ids.shape[1]), is_causal=True)
        out: Tensor = self.head(h)
        return out


def perceptron(*widths: int, activation: type[nn.Module] = nn.ReLU, norm: bool = False, drop: float = 0.0) -> Any:
    layers: list[nn.Module] = []
    for i, (wide, to) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(wide, to))
        if i < len(widths) - 2:
            layers += [nn.BatchNorm1d(to)] if norm else []
            layers.append(activation())
            layers += [nn.Dropout(drop)] if drop else []
    return nn.Sequential(*layers)


def convolutions(norm: bool = False) -> nn.Module:
    between = [nn.BatchNorm2d(8)] if norm else []
    head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(nn.Conv2d(1, 8, 3), *between, nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), *head)


def sgd(model: nn.Module, lr: float, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, **options)


def adam(model: nn.Module, lr: float = 2e-3, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr, **options)


def rates(rate: Callable[[int], float]) -> Callable[[Training, int], None]:
    def set_rate(training: Training, step: int) -> None:
        for group in training.optimizer.param_groups:
            group["lr"] = rate(step)

    return set_rate


def of(model: nn.Module, optimizer: Callable[..., Any], *arguments: Any, **options: Any) -> Training:
    names = ("weight_decay", "momentum", "nesterov")
    settings = {name: options.pop(name) for name in names if name in options}
    return Training(model, optimizer(model, *arguments, **settings), **options)


def small_start() -> nn.Module:
    model: nn.Module = perceptron(64, 50, 50, 10, activation=nn.Tanh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    return model


def fine_tuned() -> nn.Module:
    model = perceptron(64, 60, 60, 10)
    optimizer, (x, y) = adam(model), data("digits")
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (y + 3) % 10).backward()
        optimizer.step()
    return model


HEALTHY: dict[str, Callable[[], Training]] = {
    "perceptron, SGD": lambda: of(perceptron(64, 100, 100, 10), sgd, 0.1),
    "perceptron, momentum": lambda: of(perceptron(64, 100, 100, 10), sgd, 0.02, momentum=0.9),
    "perceptron, Nesterov and decay": lambda: of(
        perceptron(64, 100, 10), sgd, 0.02, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "perceptron, Adam": lambda: of(perceptron(64, 100, 100, 10), adam),
    "wide perceptron, Adam": lambda: of(perceptron(64, 400, 10), adam, 2e-3),
    "squared error": lambda: of(perceptron(64, 100, 100, 10), sgd, 0.3, loss="mse", task="one-hot"),
    "squared error, Adam": lambda: of(perceptron(64, 100, 100, 10), adam, loss="mse", task="one-hot"),
    "one output": lambda: of(perceptron(64, 100, 100, 1), sgd, 0.1, loss="bce", task="odd"),
    "regression": lambda: of(perceptron(12, 80, 80, 1), adam, 3e-3, loss="mse", task="regression", steps=600),
    "regression, SGD": lambda: of(
        perceptron(12, 80, 80, 1, activation=nn.Tanh), sgd, 0.05, momentum=0.9, loss="mse", task="regression", steps=600
    ),
    "autoencoder": lambda: of(perceptron(64, 40, 8, 40, 64), adam, loss="mse", task="itself", steps=600),
    "dropout": lambda: of(perceptron(64, 100, 100, 10, drop=0.2), adam),
    "BatchNorm": lambda: of(perceptron(64, 60, 60, 10, norm=True), sgd, 0.1),
    "convolutions": lambda: of(convolutions(), adam, 3e-3, task="images", steps=250),
    "convolutions, BatchNorm": lambda: of(convolutions(True), sgd, 0.1, momentum=0.9, task="images", steps=250),
    "gates from zero": lambda: of(Residual(60), adam),
    "gates from zero, SGD": lambda: of(Residual(60, True), sgd, 0.1),
    "transformer, warm-up": lambda: of(
        Tokens("transformer"), adam, task="tokens", steps=500, before=rates(lambda step: 3e-3 * min(1, step / 100))
    ),
    "GRU": lambda: of(Tokens("gru"), adam, 5e-3, task="tokens", steps=500),
    "small start": lambda: of(small_start(), sgd, 0.3),
    "cosine rate": lambda: of(
        perceptron(64, 100, 100, 10),
        adam,
        before=rates(lambda step: 1e-3 * (1 + float(torch.cos(torch.tensor(torch.pi * step / 400))))),
    ),
    "fine-tuning": lambda: of(fine_tuned(), adam, 1e-3),
    "Tanh": lambda: of(perceptron(64, 100, 100, 10, activation=nn.Tanh), sgd, 0.1),
    "deep linear": lambda: of(perceptron(64, 60, 60, 10, activation=nn.Identity), sgd, 0.3, loss="mse", task="one-hot"),
}


def lazy() -> Training:
    model = fl.steer.scale_output(perceptron(64, 300, 10), 100.0)
    return of(model, sgd, 5e-5, loss="mse", task="one-hot", steps=400)


def dies(training: Training, step: int) -> None:
    if step == 100:
        with torch.no_grad():
            training.model[2].bias.fill_(-1e3)  # type: ignore[index,union-attr]


def stops(training: Training, step: int) -> None:
    if step == 100:
        training.optimizer.param_groups[0]["lr"] = 0.0


def two_groups(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[2:].parameters()}], 2e-3)


FAULTS: dict[str, tuple[str, int, Callable[[], Training]]] = {
    "output scale": ("lazy", 0, lazy),
    "dead layer": ("dead_layer", 100, lambda: of(perceptron(64, 100, 100, 10), adam, before=dies)),
    "forgotten layer": ("frozen_layer", 0, lambda: of(perceptron(64, 100, 100, 10), lambda m: adam(m[2:]))),
    "rate of a layer set to zero": (
        "frozen_layer",
        100,
        lambda: of(perceptron(64, 100, 100, 10), two_groups, before=stops),
    ),
    "detached layer": ("frozen_layer", 0, lambda: of(Detached(), adam)),
    "rate beyond the edge": (
        "unstable",
        0,
        lambda: of(perceptron(64, 100, 100, 10), sgd, 6.0, loss="mse", task="one-hot"),
    ),
    "rate at the edge from step 100": (
        "unstable",
        100,
        lambda: of(
            perceptron(64, 100, 100, 10),
            sgd,
            0.1,
            loss="mse",
            task="one-hot",
            before=rates(lambda step: 0.1 if step < 100 else 8.0),
        ),
    ),
    "rate too large for Adam": ("unstable", 0, lambda: of(perceptron(64, 100, 100, 10), adam, 1.0)),
    "rate too small": ("stalled", 128, lambda: of(perceptron(64, 100, 100, 10), sgd, 1e-6)),
    "dead from the start": ("frozen_layer", 0, lambda: of(negative(), adam)),
    "costly probe": (
        "unaffordable",
        0,
        lambda: of(perceptron(64, 600, 600, 10), sgd, 0.1, batch=1, steps=30, probe=600),
    ),
}
"""Name -> kind of the alert, first step of the fault, training."""


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 50), nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).relu().detach())
        return out


def negative() -> nn.Module:
    model: nn.Module = perceptron(64, 50, 50, 10)
    with torch.no_grad():
        model[0].bias.fill_(-1e3)  # type: ignore[operator,index,union-attr]
    return model
