"""Atanasov et al. 2022, Fig. 1.

On whitened inputs the kernel aligns with the task while it is small, before the loss falls.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLUE, GRAY, GREEN, ORANGE, PINK, SKY, curve, panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.silence import first
from featlearn_papers.paper_002.whitened import OTHERWISE, WHITENED, Setup


def crossing_step(runs: Runs, name: str, curve: str, fraction: float, of: Any = "final") -> Array:
    """(S,): when a curve reaches a fraction of its end, or of its start."""
    return numpy.array(
        [
            first(steps, values, fraction, of)
            for steps, values in zip(runs[f"{name}/steps"], runs[f"{name}/{curve}"], strict=True)
        ]
    )


def at(runs: Runs, name: str, curve: str, when: Array) -> Array:
    """(S,): a curve at a moment of each seed."""
    pairs = zip(when, runs[f"{name}/steps"], runs[f"{name}/{curve}"], strict=True)
    return numpy.array([numpy.interp(moment, steps, values) for moment, steps, values in pairs])


def grown(runs: Runs) -> Array:
    """(S,): when the norm of the residual network's kernel has made a tenth of its way."""
    norms = runs["residual/norm"]
    risen = norms - norms[:, :1]
    return numpy.array([first(t, v, 0.1, "final") for t, v in zip(runs["residual/steps"], risen, strict=True)])


def unsettled(runs: Runs, name: str) -> Array:
    """(S,): largest relative distance of the alignment from its end, once the loss is below 0.95 of its start."""
    moved = crossing_step(runs, name, "loss", 0.95, "initial")
    return numpy.array(
        [
            abs(values[steps >= begin] / values[-1] - 1).max() if (steps >= begin).any() else numpy.nan
            for begin, steps, values in zip(moved, runs[f"{name}/steps"], runs[f"{name}/alignment"], strict=True)
        ]
    )


def numbers(runs: Runs) -> dict[str, Array]:
    """(S,): what each claim is about."""
    aligned = crossing_step(runs, "mnist", "alignment", 0.9)
    mnist, cifar, residual = runs["mnist/error"], runs["cifar/error"], runs["residual/correlation"]
    return {
        "silent": at(runs, "mnist", "loss", aligned) / runs["mnist/loss"][:, 0],
        "separation": crossing_step(runs, "mnist", "loss", 0.5, "initial") / aligned,
        "stays": unsettled(runs, "mnist"),
        "final-kernel": mnist[:, 0],
        "initial-kernel": mnist[:, 1],
        "cifar": cifar[:, 0] / cifar[:, 1],
        "cifar-final-kernel": runs["cifar/correlation"][:, 0],
        "residual-silent": finished(runs, "alignment"),
        "residual-final-kernel": residual[:, 0],
        "residual-initial-kernel": residual[:, 0] - residual[:, 1],
        "residual-adam": residual[:, 2],
    }


def finished(runs: Runs, alignment: str) -> Array:
    """(S,): an alignment of the residual network when its kernel starts to grow, as a share of its end."""
    return at(runs, "residual", alignment, grown(runs)) / runs[f"residual/{alignment}"][:, -1]


def claims(setups: Mapping[str, Setup], runs: Mapping[str, Runs]) -> Iterable[Claim]:
    """The caption, in the order of its panels."""
    found, other = numbers(runs["chosen"]), numbers(runs["otherwise"])
    made = "singular values below 1e-3 of the largest dropped", "channels of mean 0 and deviation 1"
    instead = "a cut of 1e-6", "raw pixels"

    def judged(id: str) -> dict[str, Any]:
        """The numbers of a claim, and those under the other choice: the cut on MNIST, pixels on CIFAR-10."""
        which = int(id.startswith(("cifar", "residual")))
        return {
            "id": id,
            "values": found[id],
            "choices": [Choice(made=made[which], other=instead[which], values=other[id])],
            "least": Scale.SMOKE if id == "silent" else Scale.LAPTOP,
        }

    yield from _perceptrons(judged)
    yield from _residual(judged, runs["chosen"], setups["chosen"].residual.samples)


def _perceptrons(judged: Callable[[str], dict[str, Any]]) -> Iterable[Claim]:
    yield Claim(
        **judged("silent"),
        claim="The kernel aligns before the loss moves (a): loss left when the alignment has nine tenths of its end",
        paper="about 1",
        band=(0.9, 1.01),
        band_from="choice",
        why="In the paper alignment is there at t = 50, and the loss moves at 300.",
    )
    yield Claim(
        **judged("separation"),
        claim="Half-loss time over the time of alignment (a)",
        paper=6.0,
        band=(2, None),
        band_from="choice",
        why="300 / 50 read off the curves; it grows with ln(1 / sigma), and sigma is not given.",
    )
    yield Claim(
        **judged("stays"),
        claim="Then it stays fixed (a): largest relative change of the alignment while the loss falls",
        paper="about 0",
        band=(None, 0.1),
        band_from="choice",
        why="With ReLU it rises a second time, by about a fifth, while the loss falls, and comes back slowly.",
    )
    yield Claim(
        **judged("final-kernel"),
        claim="The network is regression with the final kernel, MNIST (b): relative error",
        paper="well described",
        band=(None, 0.15),
        band_from="trial",
        why="0.03 on 8 x 8 digits.",
    )
    yield Claim(
        **judged("initial-kernel"),
        claim="Regression with the initial kernel is not a good model, MNIST (b): relative error",
        paper="not good",
        band=(0.2, None),
        band_from="trial",
        why="0.31 on 8 x 8 digits.",
    )
    yield Claim(
        **judged("cifar"),
        claim="The same on CIFAR-10 (c): error of the final kernel over that of the initial one",
        paper="small",
        band=(None, 0.5),
        band_from="choice",
    )
    yield Claim(
        **judged("cifar-final-kernel"),
        claim="Final kernel, CIFAR-10 (c): correlation with the network",
        paper="about 1",
        band=(0.95, 1),
        band_from="choice",
    )


def _residual(judged: Callable[[str], dict[str, Any]], runs: Runs, samples: int) -> Iterable[Claim]:
    silent = judged("residual-silent")
    centered = Choice(
        made="the raw alignment, as the paper prints it",
        other="the centered one, as it cites it",
        values=finished(runs, "centered_alignment"),
    )
    ends = runs["residual/alignment"][:, -1].mean()
    yield Claim(
        **{**silent, "choices": [centered, *silent["choices"]]},
        claim="Residual network: when the kernel starts to grow the alignment has finished (d), as a share of its end",
        paper="about 1",
        band=(0.9, 1.1),
        band_from="choice",
        why=f"When its norm has made a tenth of its way, the dashed line of Fig. J.2. The raw alignment ends at "
        f"{ends:.3f}, where 1 / sqrt(P), that of the identity, is {samples**-0.5:.3f}: the first eigenvector of the "
        "kernel is the constant.",
    )
    yield Claim(
        **judged("residual-final-kernel"),
        claim="Predictions of the final kernel are strongly correlated with it (e)",
        paper="strongly",
        band=(0.8, 1),
        band_from="choice",
    )
    yield Claim(
        **judged("residual-initial-kernel"),
        claim="More than those of the initial kernel (J.2, J.3): difference",
        paper="> 0",
        band=(0, None),
        band_from="print",
    )
    yield Claim(
        **judged("residual-adam"),
        claim="Beyond the print: so are those of the kernel of Adam's update (Eq. 91)",
        paper=None,
        band=(0.8, 1),
        band_from="choice",
        why="The paper leaves it to the future; same band as above.",
    )


def plot(setups: Mapping[str, Setup], every: Mapping[str, Runs]) -> Any:
    """Panels a to e: dynamics to the left, predictions on test points of the first seed beside them."""
    runs = every["chosen"]
    figure, axes = panels(
        2, 3, height=2.3, titles=("a  MNIST", "b  MNIST", "c  CIFAR-10", "d  Wide ResNet", "e  Wide ResNet", "")
    )
    bound = ("largest, linear", float(runs["mnist/best"].mean()))
    dynamics(axes[0], runs, "mnist", bound)
    axes[3].axvline(grown(runs).mean(), color=ORANGE, linestyle="--", label="kernel grows")
    dynamics(axes[3], runs, "residual", (r"$1/\sqrt{P}$", setups["chosen"].residual.samples ** -0.5))
    for ax, name in ((axes[1], "mnist"), (axes[2], "cifar"), (axes[4], "residual")):
        predictions(ax, runs, name)
    errors(axes[5], runs)
    for ax in (axes[1], axes[2], *axes[4:6]):
        ax.legend()
    return figure


def dynamics(ax: Any, runs: Runs, name: str, bound: tuple[str, float]) -> None:
    """Loss and norm as shares to the left; alignments as they are, with a line to compare them with, to the right."""
    steps, over = runs[f"{name}/steps"][0], ax.twinx()
    curve(ax, steps, runs[f"{name}/loss"] / runs[f"{name}/loss"][:, :1], "loss / start", color=BLUE)
    curve(ax, steps, runs[f"{name}/norm"] / runs[f"{name}/norm"][:, -1:], "|K| / end", color=ORANGE)
    curve(over, steps, runs[f"{name}/alignment"], "alignment", color=GREEN)
    curve(over, steps, runs[f"{name}/centered_alignment"], "centered", color=SKY)
    over.axhline(bound[1], color=GREEN, linestyle=":", label=bound[0])
    over.set(ylim=(0, None), label=f"{name}, alignment")
    over.tick_params(labelcolor=GREEN)
    ax.set(xlabel="step")
    (lines, words), (more, others) = ax.get_legend_handles_labels(), over.get_legend_handles_labels()
    ax.legend(lines + more, words + others)


def predictions(ax: Any, runs: Runs, name: str) -> None:
    """Of the regressions against those of the network."""
    network, *regressions = runs[f"{name}/predictions"][0][:, :150]
    rows = [("initial NTK", GRAY, regressions[1]), ("final NTK", GREEN, regressions[0])]
    if name == "residual":
        rows.append(("Adam's kernel", PINK, regressions[2]))
    for label, color, values in rows:
        ax.scatter(network, values, s=4, color=color, label=label, linewidths=0)
    span = [float(network.min()), float(network.max())]
    ax.plot(span, span, color="black", linewidth=0.6, label="_equal")
    ax.set(xlabel="network", ylabel="regression")


def errors(ax: Any, runs: Runs) -> None:
    """Correlations with the network, mean over seeds, of the three regressions of the three networks."""
    names = ("mnist", "cifar", "residual")
    for i, (label, color) in enumerate((("final NTK", GREEN), ("initial NTK", GRAY), ("Adam's kernel", PINK))):
        shown = names if i < 2 else names[2:]
        places = [names.index(name) + 0.15 * (i - 1) for name in shown]
        found = numpy.array([runs[f"{name}/correlation"][:, i] for name in shown])
        ax.scatter(numpy.repeat(places, found.shape[1]), found.ravel(), s=10, color=color, label=label)
    ax.set(
        ylabel="correlation with network", xticks=range(3), xticklabels=("MNIST", "CIFAR-10", "WRN"), xlim=(-0.5, 2.5)
    )


FIG_1 = Reproduction(
    id="002/fig1",
    about=(
        "Networks that start small, on whitened images of two classes: the kernel-task alignment is at its end before "
        "kernel and loss grow or fall, so that the trained network is kernel regression with its own final kernel. "
        "The paper leaves open, for the MLP on MNIST, width (ours: 100), sigma (0.01) and learning rate (0.03); for "
        "CIFAR-10 (width 100, sigma 0.1 as in the paper) the learning rate (0.03); for the residual network the scale "
        "of the readout (1) and of the inputs (those whose X^T X / P is a projector). Directions below 1/1000 of the "
        "largest singular value are dropped before whitening (see `silence.SEEN`), and channels of CIFAR-10 have mean "
        "0 and deviation 1; all is run again with a cut of 1e-6 and with raw pixels. Alignments are drawn as they are, "
        "raw as in print and centered. Regressions start from the network's first outputs (Theorem 1, corrected). "
        "Beside the paper's predictors stands the kernel of Adam's update (Eq. 91), which it leaves to the future. At "
        "laptop scale CIFAR-10 has 500 images of 16 x 16, and the residual network "
        "1/8 of the width, 50 such images and a learning rate of 0.00005."
    ),
    experiment={"chosen": WHITENED, "otherwise": OTHERWISE},
    plot=plot,
    claims=claims,
)
