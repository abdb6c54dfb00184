"""Networks whose neural features are measured through training: perceptrons, VGG-11 and GPT.

See Beaglehole et al. 2024, Fig. 2, 13, 14 and 15.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.models import GPT, MLP, VGG11
from featlearn_papers import data
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Numbers
from featlearn_papers.frame.schedule import growing_steps

Objective = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[Tensor, Tensor]
FILE = 10_000
"""images in a file of CIFAR-10"""
TOGETHER = 20
"""batches of text that are drawn at a time"""


@dataclass(frozen=True, kw_only=True)
class Images:
    """A data set and how it is trained on: SGD for the mean, over samples and classes, of squared errors.

    As in the authors' code targets are one-hot less 1/C, and the rate is multiplied by C / 10.
    """

    data: str
    samples: int
    """the first ones"""
    unseen: int
    """of the test set, the first ones as well"""
    drawn: bool = False
    """in place of the first ones, for files that are in the order of their classes"""
    epochs: int
    lr: float
    """for ten classes"""
    batch: int = 128
    momentum: float = 0.0
    warm: int = 0
    """steps over which the rate rises to its value"""
    pooling: int = 1
    """images are averaged over squares of so many pixels"""
    probe: int = 256
    """the samples, the first ones again, on which features are measured"""
    growth: float = 1.3
    """of the step, from one measurement to the next"""
    standardized: bool = False
    """by channel, with mean and deviation of the training images, as in the authors' code; else pixels are in [0, 1]"""

    @property
    def steps(self) -> int:
        """Of SGD."""
        return self.epochs * (self.samples // self.batch)


@dataclass(frozen=True, kw_only=True)
class Perceptron(Images):
    """App. I: five hidden layers of 256, initialized as torch does ("large scale")."""

    width: int = 256
    hidden_layers: int = 5


@dataclass(frozen=True, kw_only=True)
class Convolutional(Images):
    """VGG-11: channels of the first layer, and units of the two linear layers."""

    width: int = 64
    head: int = 4096


@dataclass(frozen=True, kw_only=True)
class Language:
    """GPT on the characters of Shakespeare, by nanoGPT's schedule.

    Adam with betas 0.9 and 0.99, gradients clipped at 1; the rate rises over `warm` steps, then falls to `last_lr`
    along a cosine.
    """

    data: str = "shakespeare"
    """or "cycle", a made-up text for which no file is needed"""
    blocks: int = 3
    width: int = 384
    heads: int = 6
    context: int = 256
    batch: int = 64
    lr: float = 5e-3
    last_lr: float = 1e-4
    warm: int = 100
    steps: int = 5000
    probe: int = 32
    probes: int = 4
    """random directions for the sum over the logits of all places"""
    judged: int = 256
    """stretches of the text, and of the part that is kept apart, on which the loss is measured"""
    growth: float = 1.45

    def rate(self, step: int) -> float:
        """Share of `lr` at a step, counted from 0."""
        if step < self.warm:
            return (step + 1) / self.warm
        done = min(1.0, (step - self.warm) / max(1, self.steps - self.warm))
        low = self.last_lr / self.lr
        return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2


def image_pairs(chosen: Images, context: Context) -> tuple[Pair, Pair]:
    """Return training and test images, standardized where the set-up says so."""
    (x, y), (test_x, test_y) = images(chosen, context), images(chosen, context, "test")
    if chosen.standardized:
        x, test_x = fl.data.standardize(x, test_x, by="channel")
    return (x, y), (test_x, test_y)


def images(chosen: Images, context: Context, split: str = "train") -> Pair:
    """Return x (P, channels, height, width) and targets (P, C) of one split, pixels in [0, 1]."""
    train = split == "train"
    options: dict[str, Any] = {}
    if chosen.data == "cifar10" and train:
        options["batches"] = range(1, 1 + -(-chosen.samples // FILE))
    if chosen.drawn:
        options["generator"] = context.generator(4 if train else 5)
    samples = chosen.samples if train else chosen.unseen
    data = context.dataset(chosen.data, split=split, samples=samples, **options)
    x = nn.functional.avg_pool2d(data.x, chosen.pooling)
    return x.to(context.device), data.one_hot(centered=True).to(context.device)


def perceptron(chosen: Perceptron, context: Context) -> dict[str, Numbers]:
    """An MLP as torch initializes it, its hidden layers followed.

    In double: in single precision some gate in some of the many measurements is too near to zero to be told.
    """
    train, test = image_pairs(chosen, context)
    model = MLP(
        train[0][0].numel(),
        train[1].shape[1],
        width=chosen.width,
        hidden_layers=chosen.hidden_layers,
        distribution="uniform",
        weight_variance=1 / 3,
        generator=context.generator(1),
    ).to(context.device)
    return _classifier(model, train, test, chosen, context, torch.float64)


def convolutional(chosen: Convolutional, context: Context) -> dict[str, Numbers]:
    """VGG-11 without BatchNorm and dropout, its convolutions followed.

    Initialized by Kaiming's rule (fan-in), as torchvision does for this network (fan-out there): by the rule of
    nn.Conv2d the signal nearly vanishes over eleven layers, and nothing is learned for hundreds of steps. The small
    readout gives outputs the size that they have in torchvision, whose linear layers have weights of deviation 0.01.
    """
    pairs = image_pairs(chosen, context)
    if pairs[0][0].shape[-1] < 32:  # for the small images of a quick look
        train, test = ((nn.functional.interpolate(x, size=(32, 32)), y) for x, y in pairs)
    else:
        train, test = pairs
    model = VGG11(
        train[1].shape[1],
        inputs=train[0].shape[1],
        width=chosen.width,
        head=chosen.head,
        weight_variance=(2.0, 2.0, 0.02),
        generator=context.generator(1),
    ).to(context.device)
    return _classifier(model, train, test, chosen, context)


def _classifier(
    model: nn.Module, train: Pair, test: Pair, chosen: Images, context: Context, dtype: torch.dtype | None = None
) -> dict[str, Numbers]:
    session = fl.Session(model, train[0][: chosen.probe], dtype=dtype)
    judged = {"train": tuple(part[:FILE] for part in train), "test": test}
    products = "highest" if isinstance(model, MLP) else "high"
    tracker = FeatureTracker(
        session, {"layers": "hidden.*"}, nn.functional.mse_loss, judged, chosen.data, context, products
    )
    return tracker.through(descent(model, train, chosen, context), chosen.steps, chosen.growth)


def descent(model: nn.Module, train: Pair, chosen: Images, context: Context) -> Callable[[], None]:
    """Each call is one step of SGD. On a GPU, at a constant rate, it is one launch of a recorded graph."""
    x, y = train
    lr = chosen.lr * y.shape[1] / 10
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=chosen.momentum)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, chosen.warm)))
    rows = torch.zeros(chosen.batch, dtype=torch.int64, device=x.device)
    order = shuffled(len(x), chosen.batch, context.generator(2), x.device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()

    constant = chosen.warm == 0 and chosen.momentum == 0
    launch = recorded(step, model) if constant and x.is_cuda else step

    def advance() -> None:
        rows.copy_(next(order))
        launch()
        if not constant:
            schedule.step()

    return advance


def shuffled(samples: int, batch: int, generator: torch.Generator, device: torch.device) -> Iterator[Tensor]:
    """Rows of batches, epochs without end; what does not fill the last batch waits for the next epoch."""
    while True:
        order = torch.randperm(samples, generator=generator)[: samples // batch * batch]
        yield from order.to(device).view(-1, batch)


def recorded(step: Callable[[], None], model: nn.Module) -> Callable[[], None]:
    """A training step as a CUDA graph: steps of small networks wait for launches of kernels more than for arithmetic.

    Steps that are made to record it are undone.
    """
    before = [parameter.detach().clone() for parameter in model.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # libraries choose and allocate in their first calls
            step()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    return graph.replay


def language_model(chosen: Language, context: Context) -> dict[str, Numbers]:
    """GPT, the query, key and value layers of its blocks followed."""
    train, test = (_text(chosen, context, split) for split in ("train", "test"))
    model = GPT(
        len(train.vocabulary),
        context=chosen.context,
        blocks=chosen.blocks,
        heads=chosen.heads,
        width=chosen.width,
        generator=context.generator(1),
    ).to(context.device)
    probe, _ = train.windows(chosen.probe, chosen.context, generator=context.generator(3))
    session = fl.Session(model, probe.to(context.device), readout=lambda logits: logits.flatten(1))
    judged = {
        name: _windows(text, chosen.judged, chosen.context, context.generator(5), context.device)
        for name, text in (("train", train), ("test", test))
    }
    options = {"layers": [f"blocks.*.attention.{part}" for part in ("query", "key", "value")], "probes": chosen.probes}
    tracker = FeatureTracker(session, options, _cross_entropy, judged, chosen.data, context, "high")
    return tracker.through(language_descent(model, train, chosen, context), chosen.steps, chosen.growth)


def language_descent(model: nn.Module, text: "data.Text", chosen: Language, context: Context) -> Callable[[], None]:
    """Each call is one step of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=chosen.lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, chosen.rate)
    batches = _stretches(text, chosen, context)

    def advance() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        _cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return advance


def _text(chosen: Language, context: Context, split: str) -> "data.Text":
    """Or a text with a period of seven: enough to see that everything runs."""
    if chosen.data == "cycle":
        return data.Text(torch.arange(5000) % 7, "abcdefg", "cycle")
    return data.shakespeare(context.data_root, split)  # type: ignore[arg-type]


def _stretches(text: "data.Text", chosen: Language, context: Context) -> Iterator[Pair]:
    """Batches without end, some at a time on the device: a copy for each would make it wait."""
    generator = context.generator(2)
    while True:
        x, y = _windows(text, TOGETHER * chosen.batch, chosen.context, generator, context.device)
        yield from zip(x.split(chosen.batch), y.split(chosen.batch), strict=True)


def _windows(text: "data.Text", samples: int, length: int, generator: torch.Generator, device: str) -> Pair:
    x, y = text.windows(samples, length, generator=generator)
    return x.to(device), y.to(device)


def _cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@contextmanager
def matrix_products(device: str, precision: str) -> Iterator[None]:
    """Training of large networks on a GPU rounds factors to ten bits ("high"), as nanoGPT does; measuring does not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision if device.startswith("cuda") else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class FeatureTracker:
    """Measures the neural features of a network as it trains: rows of numbers at steps ever further apart.

    `products` is the precision of matrix products on a GPU while training, see `matrix_products`.
    """

    def __init__(
        self,
        session: "fl.Session",
        options: dict[str, Any],
        objective: Objective,
        judged: dict[str, Any],
        name: str,
        context: Context,
        products: str = "highest",
    ) -> None:
        self.session, self.options, self.objective, self.judged = session, dict(options), objective, judged
        self.probes = self.options.pop("probes", None)
        self.name, self.context, self.products = f"{type(session.model).__name__} {name}", context, products
        self.initial = {key: value.clone() for key, value in session.model.state_dict().items()}
        self.rows: dict[str, list[Any]] = {}

    def through(self, advance: Callable[[], None], steps: int, growth: float = 1.6) -> dict[str, Numbers]:
        """Train, measuring after steps 1, 2 ... : the C-NFC has no value before the first.

        Returns steps, and losses train and test, (T,); cosine and pearson (T, L, 2), uncentered and centered; change
        (T, L), |W - W0| / |W|; share (T, L), how much of the agreement of weights and gradients the change has made.
        """
        for before, now in pairwise(growing_steps(steps, growth)):
            with matrix_products(self.context.device, self.products):
                for _ in range(now - before):
                    advance()
            self._measure(now)
        return dict(self.rows)

    def _measure(self, step: int) -> None:
        # the same directions at every step: their noise does not move the curves
        outputs = None if self.probes is None else fl.Directions(self.probes, torch.Generator().manual_seed(0))
        found = self.session.neural_features(initial=self.initial, outputs=outputs, **self.options)
        layers = list(found.values())
        row: dict[str, Any] = {"steps": step} | {name: self._loss(*pair) for name, pair in self.judged.items()}
        for kind in ("cosine", "pearson"):
            values = [layer.correlations(kind) for layer in layers]
            row[kind] = [[each.uncentered, each.centered] for each in values]
        row["change"] = [layer.weight_change for layer in layers]
        row["share"] = [layer.centered_share for layer in layers]
        for name, value in row.items():
            self.rows.setdefault(name, []).append(value)
        means = [sum(pair[i] for pair in row["cosine"]) / len(layers) for i in (0, 1)]
        self.context.say(
            f"{self.name} step={step} train={row['train']:.4g} test={row['test']:.4g} uc={means[0]:.3f} "
            f"c={means[1]:.3f}"
        )

    @torch.no_grad()
    def _loss(self, x: Tensor, y: Tensor) -> float:
        """In parts of a few hundred samples, weighted by their size."""
        parts = zip(x.split(500), y.split(500), strict=True)
        total = sum(self.objective(self.session.model(some), wanted) * len(some) for some, wanted in parts)
        return float(total) / len(x)
