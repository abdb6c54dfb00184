"""Networks whose neural features are measured through training: perceptrons, VGG-11 and GPT.

See Beaglehole et al. 2024, Fig. 2.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.papers.context import Context
from featlearn.papers.models import GPT, MLP, VGG11
from featlearn.papers.runs import Numbers
from featlearn.papers.schedule import growing_steps

Batches = Iterator[tuple[Tensor, Tensor]]
Objective = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Images:
    """A data set and how it is trained on: SGD for the mean, over samples and classes, of squared errors.

    Targets are one-hot less 1/C, as in the authors' code; pixels are from 0 to 1.
    """

    data: str
    samples: int
    """the first ones"""
    drawn: bool = False
    """in place of the first ones, for files that are in the order of their classes"""
    epochs: int
    lr: float
    batch: int = 128
    momentum: float = 0.0
    pooling: int = 1
    """images are averaged over squares of so many pixels"""
    batches: tuple[int, ...] = (1,)
    """files of CIFAR-10"""
    probe: int = 256
    """the samples, the first ones again, on which features are measured"""

    @property
    def steps(self) -> int:
        """Of SGD."""
        return self.epochs * (self.samples // self.batch)


@dataclass(frozen=True, kw_only=True)
class Language:
    """GPT on the characters of Shakespeare: Adam, warm-up over a tenth of the steps, gradients clipped at 1."""

    data: str = "shakespeare"
    """or "cycle", a made-up text for which no file is needed"""
    blocks: int = 3
    width: int = 384
    heads: int = 6
    context: int = 256
    batch: int = 64
    lr: float = 5e-3
    steps: int = 1000
    probe: int = 32
    probes: int = 4
    """random directions for the sum over the logits of all places"""


def images(chosen: Images, context: Context) -> tuple[Tensor, Tensor]:
    """x (P, channels, height, width) and targets (P, C)."""
    options: dict[str, Any] = {"batches": chosen.batches} if chosen.data == "cifar10" else {}
    if chosen.drawn:
        options["generator"] = context.generator(4)
    data = context.dataset(chosen.data, samples=chosen.samples, **options)
    x = nn.functional.avg_pool2d(data.x, chosen.pooling)
    return x.to(context.device), data.one_hot(centered=True).to(context.device)


def shuffled(x: Tensor, y: Tensor, chosen: Images, generator: torch.Generator) -> Batches:
    """Batches of epochs without end; what does not fill the last batch waits for the next epoch."""
    while True:
        order = torch.randperm(len(x), generator=generator).to(x.device)
        for rows in order[: len(x) // chosen.batch * chosen.batch].split(chosen.batch):
            yield x[rows], y[rows]


def perceptron(chosen: Images, width: int, hidden_layers: int, context: Context) -> dict[str, Numbers]:
    """An MLP as torch initialises it ("large scale"), its hidden layers followed."""
    x, y = images(chosen, context)
    model = MLP(
        x[0].numel(), y.shape[1], width=width, hidden_layers=hidden_layers, distribution="uniform",
        weight_variance=1 / 3, generator=context.generator(1),
    ).to(context.device)  # fmt: skip
    return _classifier(model, x, y, chosen, context)


def convolutional(chosen: Images, width: int, head: int, context: Context) -> dict[str, Numbers]:
    """VGG-11 without BatchNorm and dropout, its convolutions followed.

    Initialised by Kaiming's rule (fan-in), as torchvision does for this network (fan-out there): by the rule of
    nn.Conv2d the signal nearly vanishes over eleven layers, and nothing is learned for hundreds of steps. The small
    readout gives outputs the size that they have in torchvision, whose linear layers have weights of deviation 0.01.
    """
    x, y = images(chosen, context)
    if x.shape[-1] < 32:  # for the small images of a quick look
        x = nn.functional.interpolate(x, size=(32, 32))
    model = VGG11(
        y.shape[1], inputs=x.shape[1], width=width, head=head, weight_variance=(2.0, 2.0, 0.02),
        generator=context.generator(1),
    ).to(context.device)  # fmt: skip
    return _classifier(model, x, y, chosen, context)


def _classifier(model: nn.Module, x: Tensor, y: Tensor, chosen: Images, context: Context) -> dict[str, Numbers]:
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen.lr, momentum=chosen.momentum)
    batches = shuffled(x, y, chosen, context.generator(2))
    tracker = FeatureTracker(
        model, x[: chosen.probe], {"layers": "hidden.*"}, f"{type(model).__name__} {chosen.data}", context
    )
    return tracker.through(batches, nn.functional.mse_loss, optimizer, chosen.steps)


def language_model(chosen: Language, context: Context) -> dict[str, Numbers]:
    """GPT, the query, key and value layers of its blocks followed."""
    text = _cycle() if chosen.data == "cycle" else fl.data.shakespeare(context.data_root)
    model = GPT(
        len(text.vocabulary), context=chosen.context, blocks=chosen.blocks, heads=chosen.heads, width=chosen.width,
        generator=context.generator(1),
    ).to(context.device)  # fmt: skip
    # the default Adam, betas as nanoGPT has them
    optimizer = torch.optim.Adam(model.parameters(), lr=chosen.lr, betas=(0.9, 0.99))
    probe, _ = text.windows(chosen.probe, chosen.context, generator=context.generator(3))
    options = {
        "layers": [f"blocks.*.attention.{part}" for part in ("query", "key", "value")],
        "readout": lambda logits: logits.flatten(1),
    }
    tracker = FeatureTracker(model, probe.to(context.device), options, "GPT", context, chosen.probes)
    warm = max(1, chosen.steps // 10)
    return tracker.through(_windows(text, chosen, context), _cross_entropy, optimizer, chosen.steps, warm, clip=1.0)


def _cycle() -> "fl.data.Text":
    """A text with a period of seven: enough to see that everything runs."""
    return fl.data.Text(torch.arange(5000) % 7, "abcdefg", "cycle")


def _windows(text: "fl.data.Text", chosen: Language, context: Context) -> Batches:
    generator = context.generator(2)
    while True:
        x, y = text.windows(chosen.batch, chosen.context, generator=generator)
        yield x.to(context.device), y.to(context.device)


def _cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class FeatureTracker:
    """Measures the neural features of a network as it trains: rows of numbers at steps ever further apart."""

    def __init__(
        self, model: nn.Module, probe: Tensor, options: dict[str, Any], name: str, context: Context,
        probes: int | None = None,
    ) -> None:  # fmt: skip
        self.model, self.probe, self.options, self.name, self.context = model, probe, options, name, context
        self.probes = probes
        self.initial = {key: value.clone() for key, value in model.state_dict().items()}
        self.rows: dict[str, list[Any]] = {"steps": [], "loss": [], "cosine": [], "pearson": [], "change": []}

    def through(
        self, batches: Batches, objective: Objective, optimizer: torch.optim.Optimizer, steps: int, warm: int = 1,
        clip: float | None = None,
    ) -> dict[str, Numbers]:  # fmt: skip
        """Train, measuring after steps 1, 2 ... : the C-NFC has no value before the first.

        Returns steps and loss (T,); cosine and pearson (T, L, 2), uncentred and centred; change (T, L), |W - W0| / |W|.
        """
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
        wanted = set(growing_steps(steps, 1.6)) - {0}
        for step, (x, y) in zip(range(1, steps + 1), batches, strict=False):
            optimizer.zero_grad()
            loss = objective(self.model(x), y)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            optimizer.step()
            schedule.step()
            if step in wanted:
                self._measure(step, float(loss.detach()))
        return dict(self.rows)

    def _measure(self, step: int, loss: float) -> None:
        # the same directions at every step: their noise does not move the curves
        outputs = None if self.probes is None else fl.Probes(self.probes, torch.Generator().manual_seed(0))
        found = fl.neural_features(self.model, self.probe, initial=self.initial, outputs=outputs, **self.options)
        layers = list(found.values())
        self.rows["steps"].append(step)
        self.rows["loss"].append(loss)
        for kind in ("cosine", "pearson"):
            values = [layer.correlations(kind) for layer in layers]
            self.rows[kind].append([[each.uncentered, each.centered] for each in values])
        self.rows["change"].append([layer.weight_change for layer in layers])
        both = self.rows["cosine"][-1]
        means = [sum(pair[i] for pair in both) / len(both) for i in (0, 1)]
        self.context.say(f"{self.name} step={step} loss={loss:.4g} uc={means[0]:.3f} c={means[1]:.3f}")
