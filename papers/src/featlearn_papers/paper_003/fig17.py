"""Beaglehole et al. 2024, Fig. 17: with limited speeds a network learns features of SVHN from large initial weights."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import BLUE, ORANGE, WIDTH, curve
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003.tracking import Pair, shuffled

STANDARD, SLO = 0, 1
METHODS = ("standard", "SLO")
"""axis 1 of all numbers, after the seeds"""
UNCENTERED, CENTERED = 0, 1
"""of the last axis of correlations (S, methods, T, L, 2)"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """App. I. Batch size, loss and the speeds of the last two weights, C3 and C4, are not in the paper."""

    data: str = "svhn"
    samples: int = 4000
    unseen: int = 2000
    pooling: int = 1
    """images are averaged over squares of so many pixels"""
    width: int = 256
    hidden_layers: int = 4
    epochs: int = 3000
    every: int = 50
    """epochs from one measurement to the next"""
    batch: int | None = None
    """None for all samples: an epoch is one step"""
    lr: float = 0.2
    slo_lr: float = 0.3
    eps: float = 0.2
    fast: float = 2.5
    """speed of the first layer, C0"""
    slow: float = 0.4
    """of all others, C1 to C4"""
    probe: int = 1000
    """samples, the first ones, on which features are measured"""


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Both methods from the same weights; correlations along training, diagonals of the first layer at its end."""
    train, test = standardized(setup, context)
    found = [trained(setup, method, train, test, context) for method in (STANDARD, SLO)]
    return {"epochs": moments(setup), **{name: [one[name] for one in found] for name in found[0]}}


def moments(setup: Setup) -> list[int]:
    """Epochs after which features are measured."""
    return list(range(setup.every, setup.epochs + 1, setup.every))


def standardized(setup: Setup, context: Context) -> tuple[Pair, Pair]:
    """Images whose pixels have mean 0 and deviation 1 over the training set, and one-hot targets less 1/C."""
    sets = [
        context.dataset(setup.data, split=split, samples=samples)
        for split, samples in (("train", setup.samples), ("test", setup.unseen))
    ]
    inputs = fl.data.standardize(*(nn.functional.avg_pool2d(one.x, setup.pooling) for one in sets))
    pairs = [
        (x.to(context.device), one.one_hot(centered=True).to(context.device))
        for x, one in zip(inputs, sets, strict=True)
    ]
    return pairs[0], pairs[1]


def trained(setup: Setup, method: int, train: Pair, test: Pair, context: Context) -> dict[str, Numbers]:
    """One network; cosine and pearson (T, L, 2), share and change (T, L), losses (T,), diagonals (channels, h, w)."""
    (x, y), (unseen, wanted) = train, test
    model = MLP(
        x[0].numel(),
        y.shape[1],
        width=setup.width,
        hidden_layers=setup.hidden_layers,
        distribution="uniform",
        weight_variance=1 / 3,
        generator=context.generator(1),
    ).to(context.device)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    session = fl.Session(model, x[: setup.probe], dtype=torch.float64)
    rows: dict[str, list[Any]] = {}
    epoch = descent(model, train, setup, method, context)
    for count in range(1, setup.epochs + 1):
        epoch()
        if count % setup.every:
            continue
        found = session.neural_features(initial=initial, layers="hidden.*")
        for name, value in numbers(found).items():
            rows.setdefault(name, []).append(value)
        with torch.no_grad():
            for name, inputs, targets in (("train", x, y), ("test", unseen, wanted)):
                rows.setdefault(name, []).append(float(nn.functional.mse_loss(model(inputs), targets)))
        first = found["hidden.0"]
        context.say(f"{METHODS[method]} epoch={count} train={rows['train'][-1]:.4g} uc={first.uncentered:.3f}")
    shape = x.shape[1:]
    return {**rows, "nfm": first.nfm.diagonal().view(shape).cpu(), "agop": first.agop.diagonal().view(shape).cpu()}


def numbers(found: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Of each layer at one moment."""
    layers = list(found.values())
    pairs = {
        kind: [[one.correlations(kind).uncentered, one.correlations(kind).centered] for one in layers]
        for kind in ("cosine", "pearson")
    }
    return {
        **pairs,
        "share": [one.centered_share for one in layers],
        "change": [one.weight_change for one in layers],
    }


def descent(model: MLP, train: Pair, setup: Setup, method: int, context: Context) -> Callable[[], None]:
    """Each call is one epoch of SGD, or of SLO with a fast first layer."""
    x, y = train
    batch = setup.batch or len(x)
    order = shuffled(len(x), batch, context.generator(2), x.device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=setup.lr)
    if method == SLO:
        groups = fl.steer.speed_groups(model, {"hidden.0": setup.fast, "*": setup.slow})
        optimizer = fl.steer.SLO(groups, setup.slo_lr, eps=setup.eps)

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    def epoch() -> None:
        for _ in range(len(x) // batch):
            rows = next(order)
            step(*((x, y) if setup.batch is None else (x[rows], y[rows])))

    return epoch


def at_end(runs: Runs, name: str, method: int, which: int | None = None, moments: int = 1) -> Array:
    """(S,): a number of the first layer, averaged over the last moments."""
    values = runs[name][:, method, -moments:, 0]
    chosen: Array = (values if which is None else values[..., which]).mean(1)
    return chosen


def gain(runs: Runs, name: str, which: int | None = None, moments: int = 1) -> Array:
    """(S,): what SLO has more than standard training."""
    return at_end(runs, name, SLO, which, moments) - at_end(runs, name, STANDARD, which, moments)


def likeness(runs: Runs, method: int) -> Array:
    """(S,): Pearson's correlation of the diagonals of NFM and AGOP, as in Fig. 16."""
    nfm, agop = (runs[name][:, method].reshape(len(runs), -1) for name in ("nfm", "agop"))
    nfm, agop = (one - one.mean(1, keepdims=True) for one in (nfm, agop))
    found: Array = (nfm * agop).sum(1) / ((nfm**2).sum(1) * (agop**2).sum(1)) ** 0.5
    return found


def claims(setups: Mapping[str, Setup], runs: Mapping[str, Runs]) -> Iterable[Claim]:
    """The caption, and Sec. 5.2 on this figure; of the first layer, at the end."""
    whole, parts = runs["whole"], runs["batches"]
    last = max(1, whole["epochs"].shape[1] // 4)
    made = f"all samples in a step, {setups['whole'].epochs} of them"
    for id, name, which, words in (
        ("uc", "cosine", UNCENTERED, "the UC-NFC"),
        ("c", "cosine", CENTERED, "the C-NFC"),
        ("share", "share", None, "the ratio of the unnormalized C-NFC to the UC-NFC"),
    ):
        choices = [
            Choice(made="the end of training", other="the last quarter", values=gain(whole, name, which, last)),
            Choice(
                made=made,
                other=f"batches of {setups['batches'].batch} for {setups['batches'].epochs} epochs",
                values=gain(parts, name, which),
            ),
        ]
        if name == "cosine":
            choices.append(
                Choice(made="the cosine of the print", other="Pearson's", values=gain(whole, "pearson", which))
            )
        yield Claim(
            id=id,
            claim=f"SLO raises {words} of the first layer: SLO less standard training",
            paper="positive",
            values=gain(whole, name, which),
            band=(0.0, None),
            band_from="print",
            choices=choices,
            least=Scale.SMOKE if id == "share" else Scale.LAPTOP,
        )
    yield Claim(
        id="near-one",
        claim="With SLO the ratio becomes close to 1, as on the chain monomial (Sec. 5.2)",
        paper=1.0,
        values=at_end(whole, "share", SLO),
        band=(0.8, 1.2),
        band_from="choice",
        least=Scale.LAPTOP,
        choices=[
            Choice(
                made=made,
                other=f"batches of {setups['batches'].batch} for {setups['batches'].epochs} epochs",
                values=at_end(parts, "share", SLO),
            )
        ],
    )
    yield Claim(
        id="diagonals",
        claim="SLO improves the features: Pearson's correlation of the diagonals of NFM and AGOP, SLO "
        "less standard training",
        paper="positive",
        values=likeness(whole, SLO) - likeness(whole, STANDARD),
        band=(0.0, None),
        band_from="choice",
        least=Scale.LAPTOP,
        why="The paper shows the diagonals and gives no number; how alike they are is our reading.",
    )


PATHS = (("cosine", UNCENTERED, "UC-NFC"), ("cosine", CENTERED, "C-NFC"), ("share", None, "C / UC"))


def plot(setups: Mapping[str, Setup], runs: Mapping[str, Runs]) -> Any:
    """A: along training; B, C: diagonals of the first layer of the first seed, summed over colors."""
    from matplotlib.figure import Figure

    whole = runs["whole"]
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplot_mosaic([["0", "1", "2", "loss"], ["nfm0", "agop0", "nfm1", "agop1"]])
    epochs = whole["epochs"][0]
    for i, (name, which, title) in enumerate(PATHS):
        ax = axes[str(i)]
        for method, color in ((STANDARD, BLUE), (SLO, ORANGE)):
            values = whole[name][:, method] if which is None else whole[name][:, method, ..., which]
            curve(ax, epochs, values[..., 0], f"{METHODS[method]}, layer 1", color=color)
            curve(ax, epochs, values[..., 1:].mean((0, 2)), f"{METHODS[method]}, others", color=color, style="--")
        ax.set(ylim=(0, 1.05), xlabel="epoch")
        ax.set_title(f"A  {title}" if i == 0 else title, loc="left")
    for method, color in ((STANDARD, BLUE), (SLO, ORANGE)):
        for name, style in (("train", "-"), ("test", "--")):
            label = f"{METHODS[method]}, {name}"
            curve(axes["loss"], epochs, whole[name][:, method], label, color=color, style=style)
    axes["loss"].set(xlabel="epoch", ylim=(0, None))
    axes["loss"].set_title("loss", loc="left")
    axes["1"].legend(loc="lower right")
    axes["loss"].legend()
    for method, panel in ((STANDARD, "B"), (SLO, "C")):
        for kind in ("nfm", "agop"):
            ax, picture = axes[f"{kind}{method}"], whole[kind][0, method].sum(0)
            ax.imshow(picture / picture.max(), cmap="viridis", vmin=0, vmax=1, label=f"{kind}, {METHODS[method]}")
            ax.set_title(f"{panel}  {kind.upper()}, {METHODS[method]}", loc="left")
            ax.set(xticks=[], yticks=[], xlabel=f"Pearson {likeness(whole, method).mean():.2f}")
    return figure


SMOKE = Setup(
    data="digits", samples=200, unseen=100, width=32, hidden_layers=2, epochs=60, every=20, lr=2.0, slo_lr=0.3, probe=50
)
LAPTOP = Setup(samples=1000, unseen=1000, pooling=2, epochs=600, probe=200)
BATCHES = {
    Scale.SMOKE: Size(setup=replace(SMOKE, batch=64, epochs=20), seeds=1, seconds=1, mebibytes=20),
    Scale.LAPTOP: Size(setup=replace(LAPTOP, batch=128, epochs=150), seeds=3, seconds=60, mebibytes=200),
    Scale.PAPER: Size(setup=Setup(batch=128, epochs=300), seeds=3, seconds=40, mebibytes=2000, device="cuda"),
}

WHOLE = Experiment(
    id="003/speed-limits-svhn",
    sizes={
        Scale.SMOKE: Size(setup=SMOKE, seeds=1, seconds=1, mebibytes=20),
        Scale.LAPTOP: Size(setup=LAPTOP, seeds=3, seconds=100, mebibytes=200),
        Scale.PAPER: Size(setup=Setup(), seeds=3, seconds=60, mebibytes=2000, device="cuda"),
    },
    measure=measure,
)
IN_BATCHES = Experiment(id="003/speed-limits-svhn-batches", sizes=BATCHES, measure=measure)

FIG_17 = Reproduction(
    id="003/fig17",
    about=(
        "Four hidden ReLU layers of 256, initialized as torch does, learn 4000 digits of SVHN whose pixels are "
        "standardized, by gradient descent (rate 0.2) and by SLO (rate 0.3, eps 0.2) with speed 2.5 of the first layer "
        "and 0.4 of the others, for 3000 epochs, measured every 50. The paper names C0, C1 and C2 for five weights: "
        "C3 = C4 = 0.4 is ours; so are the loss (squared error to one-hot targets less 1/C, averaged over samples and "
        "classes, as in the code of its Fig. 2) and the batch, all samples in each step: App. J counts such steps as "
        "epochs, and the other choice, batches of 128, is judged beside it (300 epochs). At laptop scale 1000 "
        "digits, averaged to 16 x 16, for 600 epochs (150 in batches). K is measured on 1000 images (200 at laptop "
        "scale). The digits are the first ones, rebuilt from the pictures of whole numbers. In the steps that were "
        "looked at (one seed: the first 200 at laptop scale, the first 31 of 4000 digits) gradients have norms of "
        "0.002 to 0.06, well below eps, where SLO is nearly gradient descent with rates lr C / eps, 3.75 in the first "
        "layer and 0.6 in the others: larger rates, and not their ratio alone, may be what raises the correlations. "
        "Gradient descent at these rates was not run."
    ),
    experiment={"whole": WHOLE, "batches": IN_BATCHES},
    plot=plot,
    claims=claims,
)
