"""Small perceptrons, trained by any optimizer and in batches of any size, with their features followed.

For what Beaglehole et al. 2024 leave to future work: `optimizers` and `batch`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.paper_003.tracking import FeatureTracker, Pair, Perceptron, shuffled

UNCENTERED, CENTERED = 0, 1
"""of the last axis of correlations, after moments and layers"""

DIGITS = Perceptron(
    data="digits", samples=256, unseen=100, epochs=8, lr=5.0, batch=64, probe=64, growth=1.7, width=32, hidden_layers=2
)
MNIST = Perceptron(
    data="mnist", samples=2000, unseen=1000, epochs=60, lr=5.0, probe=128, growth=1.6, width=128, hidden_layers=3
)


def network(chosen: Perceptron, train: Pair, context: Context) -> MLP:
    """A perceptron as torch initializes it."""
    return MLP(
        train[0][0].numel(),
        train[1].shape[1],
        width=chosen.width,
        hidden_layers=chosen.hidden_layers,
        distribution="uniform",
        weight_variance=1 / 3,
        generator=context.generator(1),
    ).to(context.device)


def followed(
    model: MLP, train: Pair, test: Pair, advance: Callable[[], None], chosen: Perceptron, name: str, context: Context
) -> dict[str, Any]:
    """The features of a network through its training."""
    session = fl.Session(model, train[0][: chosen.probe], dtype=torch.float64)
    judged = {"train": train, "test": test}
    tracker = FeatureTracker(session, {"layers": "hidden.*"}, nn.functional.mse_loss, judged, name, context)
    return tracker.through(advance, chosen.steps, chosen.growth)


def stepping(
    model: MLP, train: Pair, chosen_optimizer: torch.optim.Optimizer, batch: int, steps: int, context: Context
) -> Callable[[], None]:
    """Each call is one step on a batch; the rate falls along half a cosine."""
    x, y = train
    order = shuffled(len(x), batch, context.generator(2), x.device)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        chosen_optimizer, lambda step: (1 + math.cos(math.pi * min(1.0, step / steps))) / 2
    )

    def advance() -> None:
        rows = next(order)
        chosen_optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        chosen_optimizer.step()
        schedule.step()

    return advance
