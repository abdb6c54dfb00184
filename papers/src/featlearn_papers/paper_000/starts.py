"""Not in the papers: from which start is a network faster than its first kernel at the rate of the last norm?

Shan & Bordelon 2021a, Fig. 1A, shows it ahead of that kernel (aKGD), and from the start that we took for Fig. 1 it is
not. The paper leaves open the variances of the weights, how inputs are scaled, how large the readout begins, whether
outputs begin at zero, and how long it trains. Each is tried alone, then the last three choices of the start together.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.nn.functional import mse_loss

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, YELLOW, curve, panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_000 import mnist


@dataclass(frozen=True, kw_only=True)
class Start:
    """What differs from Fig. 1; as the paper may have had it."""

    centered: bool = False
    """whether the mean image is subtracted from the inputs"""
    readout: float = 1.0
    """multiplies the readout's first weights"""
    variances: tuple[float, float, float] = (1.0, 2.0, 1.0)
    """of the weights: first layer, hidden layers, readout"""
    zero: bool = False
    """whether the network's first outputs are subtracted, as infinitely wide networks have none on average"""


STARTS = {
    "as in Fig. 1": Start(),
    "variances 1": Start(variances=(1.0, 1.0, 1.0)),
    "centered inputs": Start(centered=True),
    "small readout": Start(readout=0.1),
    "zero outputs": Start(zero=True),
    "all three": Start(centered=True, readout=0.1, zero=True),
}
COLORS = dict(zip(STARTS, (ORANGE, YELLOW, SKY, GREEN, PINK, BLUE), strict=True))


@dataclass(frozen=True, kw_only=True)
class Setup(mnist.Setup):
    """That of Fig. 1 with more steps."""

    steps: int = 20_000
    growth: float = 1.25


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """From each start: losses of the network, of KGD and of aKGD at the moments, and how the kernel grew and turned."""
    found: dict[str, Numbers] = {"steps": setup.moments}
    for name, start in STARTS.items():
        found |= {f"{name}/{key}": value for key, value in trained(setup, start, context).items()}
    return found


def trained(setup: Setup, start: Start, context: Context) -> dict[str, Numbers]:
    """Full-batch gradient descent from one start."""
    given = mnist.task(setup, context)
    y, x = given.y, given.x - given.x.mean(0) * start.centered
    network = MLP(
        x.shape[1],
        y.shape[1],
        width=setup.width,
        hidden_layers=setup.hidden_layers,
        parametrization="ntk",
        weight_variance=start.variances,
        generator=context.generator(2),
    ).to(context.device)
    fl.steer.scale_init(network, start.readout, layers=["readout"])
    model = fl.steer.scale_output(network, 1.0) if start.zero else network
    session, moments = fl.Session(model, x), set(setup.moments)
    full, optimizer = session.ntk(outputs="full"), torch.optim.SGD(network.parameters(), lr=setup.lr)
    outputs, norms, alignments = [], [], []
    for step in range(setup.steps + 1):
        f = model(x)
        loss = mse_loss(f, y)
        if step in moments:
            kernel = session.ntk()
            outputs.append(f.detach().double())
            norms.append(float(kernel.norm()))
            alignments.append(float(fl.metrics.centered_alignment(kernel, y)))
            context.progress(step, setup.steps, loss=float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    steps, f = torch.tensor(setup.moments), torch.stack(outputs)
    _, (kgd, akgd) = mnist.predicted(full, y, steps, f, given.rate, norms[-1] / norms[0])
    return {
        "loss": (f - y).square().mean((1, 2)),
        "kgd": kgd,
        "akgd": akgd,
        "norm": norms,
        "output": outputs[0].std(),
        "centered_alignment": alignments,
        "stability": given.rate * float(torch.linalg.eigvalsh(kernel.double())[-1]),
    }


EXPERIMENT = Experiment(
    id="000/starts",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(data="digits", samples=40, test_samples=10, width=30, steps=60, growth=1.6, few=10),
            seeds=1,
            seconds=3,
            mebibytes=50,
        ),
        Scale.LAPTOP: Size(setup=Setup(samples=200, test_samples=150, steps=3000), seeds=3, seconds=200, mebibytes=500),
        Scale.PAPER: Size(setup=Setup(), seeds=3, seconds=150, mebibytes=8000, device="cuda"),
    },
    measure=measure,
)


def behind(runs: Runs, start: str, against: str = "akgd") -> Any:
    """(S, T): loss of the network over that of a frozen kernel; below 1 the network is ahead."""
    return runs[f"{start}/loss"] / runs[f"{start}/{against}"]


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The same sentence from every start; then what the start changes."""
    for name in STARTS:
        ratio = behind(runs, name)
        yield Claim(
            id=f"faster-{name.lower().replace(' ', '-').replace('.', '')}",
            claim=f"The network ends below its rescaled first kernel, start: {name}",
            paper="< 1",
            values=ratio[:, -1],
            band=(None, 1.0),
            band_from="print",
            least=Scale.LAPTOP,
            choices=[Choice(made="at the end", other="at the moment that is best for it", values=ratio.min(1))],
        )
    turned = {name: runs[f"{name}/centered_alignment"] for name in ("small readout", "as in Fig. 1")}
    small, usual = (each[:, -1] - each[:, 0] for each in turned.values())
    yield Claim(
        id="turns-more",
        claim="From a small readout the kernel turns further to the task: rise of its centered "
        "alignment over that from the start of Fig. 1",
        paper="not shown",
        values=small / usual,
        band=(1.0, None),
        band_from="theory",
        least=Scale.LAPTOP,
        why="A smaller output is a richer network (Atanasov et al. 2022).",
    )
    yield Claim(
        id="stable",
        claim="Rate times largest eigenvalue at the end, the largest of all starts",
        paper="< 2",
        values=numpy.max([runs[f"{name}/stability"] for name in STARTS], 0),
        band=(None, 2.0),
        band_from="theory",
        check=True,
        why="Else gradient descent would not follow its kernel.",
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """Losses from two starts, the ratio to the rescaled kernel and the alignment from all."""
    figure, axes = panels(2, 2, height=2.2, titles=("as in Fig. 1", "small readout", "ratio", "alignment"))
    steps = runs["steps"][0] + 0.5  # step 0 has a place on a logarithmic axis
    for ax, start in zip(axes, ("as in Fig. 1", "small readout"), strict=False):
        for name, label, color in (("loss", "NN", ORANGE), ("kgd", "KGD", BLUE), ("akgd", "aKGD", GREEN)):
            curve(ax, steps, runs[f"{start}/{name}"], label, color=color)
        ax.set(yscale="log", ylabel="loss")
    for name in STARTS:
        curve(axes[2], steps, behind(runs, name), name, color=COLORS[name])
        curve(axes[3], steps, runs[f"{name}/centered_alignment"], name, color=COLORS[name])
    axes[2].axhline(1.0, color=BLACK, linestyle=":", label="_level")
    axes[2].set(yscale="log", ylabel="loss, NN over aKGD")
    axes[3].set(ylabel="centered alignment")
    for ax in axes:
        ax.set(xscale="log", xlabel="step")
        ax.legend()
    return figure


STARTS_FIGURE = Reproduction(
    id="000/starts",
    about=(
        "Ours. Fig. 1A of Shan & Bordelon 2021a shows a network that learns faster than its first kernel at the rate "
        "of the last kernel's norm (aKGD). In 000/fig1 it does not. The paper leaves open the variances of the "
        "weights, how pixels are scaled, how large the readout begins, whether outputs begin at zero and how long it "
        "trains. Changed alone: variance 1 in every layer, the default of the library that the authors used; the mean "
        "image subtracted; first readout weights divided by 10; first outputs subtracted, as infinitely wide networks "
        "have none on average. The last three are also changed together. Network, data, rate and frozen kernels, "
        "between all pairs of outputs, are those of 000/fig1; 20000 steps (3000, and 200 samples, at laptop scale). "
        "Kernels and alignment with Y Y^T are means over outputs, centered."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
