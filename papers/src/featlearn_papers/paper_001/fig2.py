"""Shan & Bordelon 2021b, Fig. 2.

Dividing the output of a wide residual network makes its kernel turn faster and further.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

import featlearn as fl
from featlearn.models import WideResNet
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import COLORS, GRAY, panels, seed_curves
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.frame.schedule import growing_steps

LEVELS = (0.7, 0.6, 0.4)
"""losses at which networks of different gamma are compared"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """App. E.1: two classes of CIFAR-10, y = -1 and +1, loss P^-1 sum (y - g)^2 with g = (f - f0) / gamma."""

    data: str = "cifar10"
    samples: int = 100
    pooling: int = 1
    """images are averaged over squares of so many pixels"""
    k: float = 3.0
    b: int = 2
    gammas: tuple[float, ...] = (1.0, 3.0, 10.0)
    """divisors of the output"""
    speed: float = 0.05
    """eta0 in units of 1 / largest eigenvalue of the first kernel: 2 would be the limit of stability"""
    steps: int = 1000
    growth: float = 1.35
    """from one measured step to the next"""

    @property
    def moments(self) -> list[int]:
        """The steps at which kernels are measured."""
        return growing_steps(self.steps, self.growth)


def task(setup: Setup, context: Context) -> tuple[Tensor, Tensor]:
    """Images (P, channels, height, width), less their mean over the training set, and y (P,)."""
    options: dict[str, Any] = {"batches": (1,), "normalization": "channel"} if setup.data == "cifar10" else {}
    # in the order of the files, which is random: the same images for all seeds
    data = context.dataset(setup.data, classes=(0, 1), samples=setup.samples, **options)
    images = torch.nn.functional.avg_pool2d(data.x, setup.pooling)
    return images.to(context.device), data.signs().to(context.device)


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """For each gamma, from the same weights: the run, and optimal feature evolution with its feature rate."""
    x, y = task(setup, context)
    found: dict[str, list[Numbers]] = {}
    for i, gamma in enumerate(setup.gammas):
        network = WideResNet(
            setup.k, setup.b, inputs=x.shape[1], parametrization="ntk", generator=context.generator(1)
        ).to(context.device)
        first = fl.ntk(network, x, dtype=torch.float64)
        # of df/dt = -rate K (f - y), for the first kernel of f: the same for all gamma
        rate = setup.speed / float(torch.linalg.eigvalsh(first)[-1])
        outputs, kernels = trained(network, gamma, x, y, rate, setup, context)
        numbers = compared(setup, first, y, outputs, gamma**2 * kernels, rate)
        for name, value in numbers.items():
            found.setdefault(name, []).append(value)
        context.progress(i + 1, len(setup.gammas), gamma=gamma, loss=float((outputs[-1] - y).square().mean()))
    return {"steps": setup.moments, **{name: torch.stack(list(values)) for name, values in found.items()}}


def trained(
    network: torch.nn.Module, gamma: float, x: Tensor, y: Tensor, rate: float, setup: Setup, context: Context
) -> tuple[Tensor, Tensor]:
    """Outputs (T, P) and kernels (T, P, P) of gradient descent on the scaled output at the moments."""
    model, first = fl.steer.scale_output(network, 1 / gamma), network(x).detach()
    moments, lr = set(setup.moments), model.rate_factor * rate * setup.samples / 2
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    with tempfile.TemporaryDirectory(dir=context.folder) as folder:
        with fl.watch(
            model, (x, y), out=Path(folder) / "run", every=moments.__contains__, budget=None, quantities=["kernel"]
        ) as watch:
            for _ in range(setup.steps):
                optimizer.zero_grad()
                # model(x), without running the first weights again in every step
                ((network(x) - first) / gamma - y).square().mean().backward()
                optimizer.step()
                watch.step()
        run = watch.run
        outputs = [run.array("outputs", step)["f"][:, 0] for step in setup.moments]
        kernels = [run.array("kernel", step)["mean"] for step in setup.moments]
    found = [torch.as_tensor(numpy.stack(each)).to(y.device) for each in (outputs, kernels)]
    return found[0], found[1]


def compared(
    setup: Setup, first: Tensor, y: Tensor, outputs: Tensor, kernels: Tensor, rate: float
) -> dict[str, Tensor]:
    """A network's curves, and those of optimal feature evolution from its first kernel.

    The feature rate is the one at which the final kernel is aligned as the network's (Shan & Bordelon 2021a, Eq. 20,
    corrected); where the alignment fell there is none, and the kernel stays.
    """
    target, kernels = y.double(), kernels.double()
    feature_rate = fl.metrics.feature_rate(first, kernels[-1], target)
    times = torch.tensor(setup.moments, dtype=torch.float64)
    theory = fl.theory.ofe.solve(first, target, max(float(feature_rate), 0.0), times, rate=rate)
    evolved = theory.kernel(times)
    return {
        "loss": (outputs.double() - target).square().mean(1),
        "alignment": fl.metrics.alignment(kernels, target),
        "norm": torch.linalg.matrix_norm(kernels),
        "moved": fl.metrics.kernel_distance(kernels, first),
        "apart": fl.metrics.kernel_distance(kernels, evolved),
        "ofe/loss": theory.loss / setup.samples,
        "ofe/alignment": theory.alignment,
        # in units of |K0| / |y|^2, in which it compares between networks
        "feature_rate": feature_rate * target.square().sum() / first.norm(),
    }


def rises(values: Any) -> Any:
    """(S,): whether numbers (S, gammas) grow with gamma."""
    return (numpy.diff(values, axis=1) > 0).all(1)


def speeds_up(steps: Any) -> Any:
    """Return for each seed whether steps (S, gammas) to a level fall with gamma.

    NaN stands for a level that is never reached, and ranks last. The largest gamma must reach it.
    """
    ranked = numpy.where(numpy.isnan(steps), numpy.inf, steps)
    pairs = zip(ranked.T[:-1], ranked.T[1:], strict=True)
    falling = numpy.all([(after < before) | numpy.isinf(before) for before, after in pairs], axis=0)
    return falling & numpy.isfinite(ranked[:, -1])


def first_fall(runs: Runs) -> Any:
    """(S, gammas): how far the loss falls in the first step, as a share of it."""
    return 1 - runs["loss"][:, :, 1] / runs["loss"][:, :, 0]


def fastest_rise(runs: Runs, name: str) -> Any:
    """(S, gammas): the largest rise of a curve per step between moments."""
    return (numpy.diff(runs[name], axis=2) / numpy.diff(runs["steps"][:, None], axis=2)).max(2)


def half_time(runs: Runs, name: str) -> Any:
    """(S,): the step at which the largest gamma has half of its rise."""
    found = []
    for steps, values in zip(runs["steps"], runs[name][:, -1], strict=True):
        risen = torch.as_tensor(values - values[0])
        found.append(fl.metrics.time_to(torch.as_tensor(steps).double(), risen, 0.5) if risen[-1] > 0 else numpy.nan)
    return numpy.array(found)


def likeness(runs: Runs) -> Any:
    """(S,): correlation of the logarithms of loss, network and OFE, over the moments, at the largest gamma."""
    pairs = zip(runs["loss"][:, -1], runs["ofe/loss"][:, -1], strict=True)
    return numpy.array([numpy.corrcoef(numpy.log(ours), numpy.log(theirs))[0, 1] for ours, theirs in pairs])


def reached(runs: Runs, level: float, name: str) -> Any:
    """(S, gammas): a curve, or the steps themselves, when the loss first is at a level; nan where it never is."""
    found = numpy.full(runs["loss"].shape[:2], numpy.nan)
    for seed, gamma in numpy.ndindex(*found.shape):
        loss = runs["loss"][seed, gamma]
        values = runs["steps"][seed] if name == "steps" else runs[name][seed, gamma]
        if (below := loss <= level).any():
            end = int(below.argmax())
            share = (loss[end - 1] - level) / (loss[end - 1] - loss[end])
            found[seed, gamma] = values[end - 1] + share * (values[end] - values[end - 1])
    return found


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The caption, Sec. 4.2, and the kernels themselves."""
    falls = first_fall(runs)
    yield Claim(
        id="same-start",
        claim="The loss begins to fall alike for all gamma (A): first step, largest over smallest",
        paper=1.0,
        values=falls[:, -1] / falls[:, 0],
        band=(0.8, 1.25),
        band_from="theory",
        check=True,
        why="1 for infinitely small steps: the rate was made so.",
    )
    yield from _gammas(runs)
    yield from _alignments(runs)
    yield from _evolution(runs)


def _gammas(runs: Runs) -> Iterable[Claim]:
    faster = [speeds_up(reached(runs, level, "steps")) for level in LEVELS]
    yield Claim(
        id="faster",
        claim="Larger gamma makes training faster (A): steps to losses of 0.7, 0.6 and 0.4 fall with it",
        paper="yes",
        values=numpy.all(faster, axis=0),
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[
            Choice(made="steps to three losses", other="the losses at the end", values=rises(-runs["loss"][:, :, -1])),
            Choice(made="steps to three losses", other="to 0.7 and 0.6", values=numpy.all(faster[:2], axis=0)),
        ],
        why="A loss that is never reached ranks last: at paper scale gamma = 1 and 3 end at 0.44 to 0.58, above 0.4.",
    )
    yield Claim(
        id="aligns-faster",
        claim="Larger gamma aligns more quickly (B): the fastest rise per step grows with gamma",
        paper="yes",
        values=rises(fastest_rise(runs, "alignment")),
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="lazy",
        claim="At gamma = 1 no significant feature evolution occurs (Sec. 4.2): distance of the last kernel "
        "from the first",
        paper="small",
        values=runs["moved"][:, 0, -1],
        band=(None, 0.05),
        band_from="choice",
        least=Scale.PAPER,
        why="1 - cosine. Of wide networks only: narrower ones, as at laptop scale, are richer at the same gamma.",
    )


def _alignments(runs: Runs) -> Iterable[Claim]:
    alignment = runs["alignment"]
    for level in LEVELS:
        yield Claim(
            id=f"aligns-more-{level:g}",
            claim=f"Larger gamma aligns more (B): alignment when the loss is at {level:g}",
            paper="yes",
            values=rises(reached(runs, level, "alignment")),
            band=(1, None),
            band_from="print",
            least=Scale.LAPTOP,
            why="At the same loss, as networks of different gamma learn at different speed. At the "
            "largest gamma the alignment peaks when the loss is at 0.6 to 0.7, and may fall again. At paper scale "
            "gamma = 1 and 3 do not reach a loss of 0.4.",
            choices=[
                Choice(made="at the same loss", other="after the same steps", values=rises(alignment[:, :, -1])),
            ],
        )
    gains = {level: (reached(runs, level, "alignment") / alignment[:, :, 0])[:, -1] for level in LEVELS}
    made = "at a loss of 0.6"
    yield Claim(
        id="rich",
        claim="At large gamma the alignment gets high (Sec. 4.2): at a loss of 0.6 over start, largest gamma",
        paper="high",
        values=gains[0.6],
        band=(1.5, None),
        band_from="choice",
        least=Scale.LAPTOP,
        choices=[
            Choice(made=made, other="a loss of 0.7", values=gains[0.7]),
            Choice(made=made, other="a loss of 0.4", values=gains[0.4]),
            Choice(made=made, other="the end of training", values=alignment[:, -1, -1] / alignment[:, -1, 0]),
        ],
    )
    yield Claim(
        id="peaks-higher",
        claim="Beyond the print: the highest alignment on the way grows with gamma",
        paper="not shown",
        values=rises(alignment.max(2)),
        band=(1, None),
        band_from="choice",
        least=Scale.LAPTOP,
    )


def _evolution(runs: Runs) -> Iterable[Claim]:
    yield Claim(
        id="ofe-loss",
        claim="OFE has a similar loss (C): correlation of the logarithms over time, largest gamma",
        paper="qualitatively",
        values=likeness(runs),
        band=(0.9, None),
        band_from="choice",
        least=Scale.LAPTOP,
        check=True,
        why="Both start at 1 with the same slope and fall: any two such curves correlate.",
    )
    yield Claim(
        id="ofe-order",
        claim="OFE has the same order (C, D): loss falls and alignment rises with gamma",
        paper="yes",
        values=rises(-runs["ofe/loss"][:, :, -1]) & rises(runs["ofe/alignment"][:, :, -1]),
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
        why="OFE is told the last alignment of the network: where that has fallen, so has its own.",
    )
    ratio = half_time(runs, "alignment") / half_time(runs, "ofe/alignment")
    yield Claim(
        id="ofe-time",
        claim="OFE aligns as fast (D): factor between the steps of half the rise, network and OFE, largest gamma",
        paper="qualitatively",
        values=numpy.maximum(ratio, 1 / ratio),
        band=(1, 3),
        band_from="choice",
        least=Scale.LAPTOP,
        why="A factor of three, for 'qualitatively similar'; no value where a network ends less aligned than it began.",
    )
    yield Claim(
        id="ofe-kernel",
        claim="Beyond the print: OFE's last kernel is nearer to the network's than the first kernel is, largest gamma: "
        "ratio of distances",
        paper="not shown",
        values=runs["apart"][:, -1, -1] / runs["moved"][:, -1, -1],
        band=(None, 1.0),
        band_from="choice",
        least=Scale.LAPTOP,
        why="Sec. 4.1 says that OFE 'does not necessarily capture the trajectory of the NTK'.",
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """The four panels of the paper; in the right column alignment against loss, and distances of kernels."""
    titles = ("A", "B", "at equal loss", "C", "D", "kernels")
    figure, axes = panels(2, 3, height=2.2, titles=titles)
    steps = runs["steps"][0] + 0.5  # step 0 has a place on a logarithmic axis
    rates = runs["feature_rate"].mean(0)
    for i, gamma in enumerate(setup.gammas):
        for ax, name in ((axes[0], "loss"), (axes[1], "alignment"), (axes[3], "ofe/loss"), (axes[4], "ofe/alignment")):
            label = rf"$\hat\gamma$ = {rates[i]:.2g}" if name == "ofe/loss" else rf"$\gamma$ = {gamma:g}"
            seed_curves(ax, steps, runs[name][:, i], label, color=COLORS[i])
        for seed in range(len(runs)):
            label = rf"$\gamma$ = {gamma:g}" if seed == 0 else f"_gamma = {gamma:g}: seed {seed}"
            pair = runs["loss"][seed, i], runs["alignment"][seed, i]
            axes[2].plot(*pair, color=COLORS[i], linewidth=0.9, label=label)
        own, other = ("from OFE's", "from the first") if i == 0 else ("_from OFE's", "_from the first")
        seed_curves(axes[5], steps, runs["apart"][:, i], own, color=COLORS[i])
        seed_curves(axes[5], steps, runs["moved"][:, i], other, color=COLORS[i], style=":")
    for ax in (axes[0], axes[1], *axes[3:]):
        ax.set(xscale="log", xlabel="step")
    for level in LEVELS:
        axes[2].axvline(level, color=GRAY, linewidth=0.6, linestyle="--", label=f"_loss {level:g}")
    axes[2].set(xlabel="loss", ylabel="alignment, network")
    axes[2].invert_xaxis()
    for ax, other in ((axes[0], axes[3]), (axes[1], axes[4])):
        low, high = (pick(ax.get_ylim()[i], other.get_ylim()[i]) for i, pick in enumerate((min, max)))
        ax.set_ylim(low, high)
        other.set_ylim(low, high)
    words = {0: "loss, network", 1: "alignment, network", 3: "loss, OFE", 4: "alignment, OFE", 5: "distance"}
    for i, label in words.items():
        axes[i].set_ylabel(label)
    for ax in (axes[0], axes[3], axes[5]):
        ax.legend()
    return figure


EXPERIMENT = Experiment(
    id="001/fig2",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(data="digits", samples=12, k=0.25, b=1, gammas=(0.3, 1.0), steps=20, growth=1.8),
            seeds=1,
            seconds=3,
            mebibytes=50,
        ),
        Scale.LAPTOP: Size(
            setup=Setup(samples=60, pooling=4, k=1.0, b=1, gammas=(0.6, 1.7, 5.8), steps=1500, growth=1.25),
            seeds=3,
            seconds=170,
            mebibytes=300,
        ),
        Scale.PAPER: Size(setup=Setup(speed=0.03, steps=6000), seeds=3, seconds=250, mebibytes=1800, device="cuda"),
    },
    measure=measure,
)

FIG_2 = Reproduction(
    id="001/fig2",
    about=(
        "A wide residual network without normalization on 100 images of two classes of CIFAR-10, its output divided by "
        "gamma and its learning rate multiplied by gamma^2: all start with the same kernel per rate, and the larger "
        "gamma, the further the weights must go. Below, optimal feature evolution (OFE), the exact solution, from the "
        "network's first kernel, with the feature rate read off its first and last alignment (shown in units of "
        "|K0| / |y|^2). The paper gives neither gammas, rate nor steps: here 1, 3 and 10, a step of 0.03 over the "
        "largest eigenvalue of the first kernel, which has room for kernels that grow (at gamma = 10 some 70-fold, to "
        "about the limit of stability), and 6000 of them: after 1000 all losses were still above 0.59, those of gamma "
        "= 1 and 3 within 0.005 of each other and in one seed in the other order; as many claims failed. The output at "
        "the start is subtracted, without which losses would not start alike; channels have mean 0 and deviation 1. At "
        "laptop scale the network is narrower (k = 1, b = 1), and gammas are smaller by the square root of that, as "
        "what a network learns depends on gamma over the root of its width; there are 60 images of 8 x 8 pixels, and "
        "1500 steps of 0.05. Each seed is a line, and networks are compared at losses of 0.7, 0.6 and 0.4, as they "
        "learn at different speed. The right column is beyond the print: alignment against loss, and how far the "
        "network's kernel is from its first one and from OFE's."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
