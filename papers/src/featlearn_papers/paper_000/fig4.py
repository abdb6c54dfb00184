"""Shan & Bordelon 2021a, Fig. 4: outputs of a ReLU network get kernels of their own, those of a linear one do not."""

from collections.abc import Iterable, Mapping
from typing import Any

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLACK, BLUE, ORANGE, curve, panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_000 import depth, linear_outputs, mnist
from featlearn_papers.paper_000.specialization import contrast, draw, own_peaks, span

SAME = 0.02
"""a linear network is not specialized if diagonal and rest of its matrix differ by less"""


def claims(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Iterable[Claim]:
    """The caption and Sec. 6."""
    yield from _nonlinear(runs)
    yield from _linear(setups, runs)


def _nonlinear(runs: Mapping[str, Runs]) -> Iterable[Claim]:
    raw, centered = (runs["relu"][f"mse/{name}"][:, :, 0] for name in ("classes", "centered_classes"))
    shallow = runs["depth"]["classes"][:, 0, :, 0]

    def otherwise(values: Any) -> list[Choice]:
        return [
            Choice(made="raw alignments", other="centered ones", values=values(centered)),
            Choice(made="two hidden layers", other="one", values=values(shallow)),
        ]

    yield Claim(
        id="specialized",
        claim="Diagonal elements are higher than the others (A): mean of the diagonal less that of the rest",
        paper="> 0",
        values=contrast(raw[:, -1]),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=otherwise(lambda classes: contrast(classes[:, -1])),
    )
    yield Claim(
        id="every-output",
        claim="... each of them: share of targets with which their own kernel is aligned best (A)",
        paper=1.0,
        values=own_peaks(raw[:, -1]),
        band=(1.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        why="The caption can also be read as a statement about means; by chance it would be 0.1.",
        choices=otherwise(lambda classes: own_peaks(classes[:, -1])),
    )
    yield Claim(
        id="during-training",
        claim="It becomes so during training (A): the same difference, end less start",
        paper="> 0",
        values=contrast(raw[:, -1]) - contrast(raw[:, 0]),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=otherwise(lambda classes: contrast(classes[:, -1]) - contrast(classes[:, 0])),
    )


def _linear(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Iterable[Claim]:
    gains = setups["linear"].gains
    for name, words in (("linear", "of width 500, as in the caption"), ("narrow", "of width 100")):
        values = contrast(runs[name]["classes"][:, :, -1])
        yield Claim(
            id=f"{name}-alike",
            claim=f"A linear network {words}, is not specialized (B): diagonal less rest",
            paper=0.0,
            values=values[:, 0],
            band=(-SAME, SAME),
            band_from="theory",
            least=Scale.LAPTOP,
            why="Kernels of its outputs differ only in how they weigh the same Gram matrices (App. A.3).",
            choices=[
                Choice(
                    made=f"weights of deviation {gains[0]:g}",
                    other=f"of {setups[name].gains[1]:g}",
                    values=values[:, 1],
                )
            ],
        )
    ranks = [min(setups[name].inputs, setups[name].samples) for name in ("linear", "narrow")]
    rise = runs["linear"]["alignment"][:, :, -1] - runs["linear"]["alignment"][:, :, 0]
    yield Claim(
        id="linear-aligns",
        claim="Its kernel turns to the task all the same (Sec. 5): rise of its alignment",
        paper="> 0",
        values=rise[:, 0],
        band=(0.0, None),
        band_from="print",
        why="A network whose kernel does not move would not be specialized either.",
        choices=[Choice(made=f"weights of deviation {gains[0]:g}", other=f"of {gains[1]:g}", values=rise[:, 1])],
    )
    yield Claim(
        id="symmetry",
        claim="Targets are symmetric (Eq. 44): largest spread over outputs of a layer's weight in their "
        "kernels, over its mean",
        paper=0.0,
        values=runs["linear"]["symmetry"][:, 0].max(1),
        band=(None, 0.1),
        band_from="choice",
        least=Scale.LAPTOP,
        why="The weights follow the length of the teachers, as far as samples show it; over Gaussian teachers its "
        f"square spreads as sqrt(2 / rank), {(2 / ranks[0]) ** 0.5:.2f} for rank {ranks[0]}. This makes rows of the "
        "matrix differ, and does not single out its diagonal.",
        choices=[
            Choice(
                made=f"inputs of rank {ranks[0]}",
                other=f"of rank {ranks[1]}",
                values=runs["narrow"]["symmetry"][:, 0].max(1),
            )
        ],
    )
    yield Claim(
        id="linear-learns",
        claim="Outputs match their targets (B): loss at the end over its start",
        paper=0.0,
        values=(runs["linear"]["loss"][:, :, -1] / runs["linear"]["loss"][:, :, 0]).max(1),
        band=(None, 0.1),
        band_from="choice",
        check=True,
        why="For both initial scales.",
    )


def plot(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Any:
    """Both panels of the paper, the second for two widths; below, the first one centered, and along training."""
    widths = [setups[name].width for name in ("linear", "narrow")]
    titles = ["A", *(f"B: width {width}" for width in widths), "A, centered", "A along training", "B along training"]
    figure, axes = panels(2, 3, height=2.4, titles=titles)
    relu, centered = (runs["relu"][f"mse/{name}"][:, :, 0] for name in ("classes", "centered_classes"))
    linear = [runs[name]["classes"] for name in ("linear", "narrow")]
    colors = span(relu[:, -1])
    draw(axes[0], relu[:, -1], span=colors)
    for ax, classes in zip(axes[1:3], linear, strict=True):
        draw(ax, classes[:, 0, -1], span=colors)
    draw(axes[3], centered[:, -1], span=span(centered[:, -1]))
    steps = runs["relu"]["mse/steps"][0] + 0.5  # step 0 has a place on a logarithmic axis
    for classes, label, color in ((relu, "raw", ORANGE), (centered, "centered", BLUE)):
        curve(axes[4], steps, contrast(classes), label, color=color)
    for name, classes, color in zip(("linear", "narrow"), linear, (ORANGE, BLUE), strict=True):
        for i, (gain, style) in enumerate(zip(setups[name].gains, ("-", "--"), strict=True)):
            curve(
                axes[5],
                runs[name]["steps"][0] / runs[name]["steps"][0, -1],
                contrast(classes[:, i]),
                f"{setups[name].width}, σ = {gain:g}",
                color=color,
                style=style,
            )
    axes[4].set(xscale="log", xlabel="step", ylabel="diagonal less rest")
    axes[5].set(xlabel="share of the steps", ylabel="diagonal less rest")
    axes[4].legend()
    axes[5].legend()
    for sign in (-1, 1):
        axes[5].axhline(
            sign * SAME, color=BLACK, linestyle=":", linewidth=1, label=f"_{'+' if sign > 0 else '-'}{SAME}"
        )
    return figure


FIG_4 = Reproduction(
    id="000/fig4",
    about=(
        "The kernel specialization matrix: the alignment of each output's kernel with each output's target, every "
        "column divided by its mean. A: the ReLU network of Fig. 1 after training on ten classes of MNIST. B: a linear "
        "network of four weight layers with ten linear targets. (Sec. 6 says that linear networks 'develop specialized "
        "kernels'; App. A.3 shows that they cannot.) The caption gives a width of 500, taken here for the inputs too, "
        "with 100 samples (1000 at paper scale); beside it a small network of 25 inputs, width 100 and 60 samples. "
        "Inputs on the unit sphere and Gaussian teachers are those of Shan & Bordelon 2021b, Sec. 5.2. Weights start "
        "in the NTK parametrization with deviation 1, and with a smaller one, from which features move more. From the "
        "smaller one the diagonal lies below the rest for a while as the loss falls; verdicts are about the end. "
        "Colors of A and B are the same. 'Two-layer' is two hidden layers, as 2021b, App. E.2, say; one hidden layer "
        "(three seeds, half as many steps at laptop scale) and centered alignments are the other choices."
    ),
    experiment={
        "relu": mnist.MNIST,
        "linear": linear_outputs.WIDE_LINEAR_OUTPUTS,
        "narrow": linear_outputs.LINEAR_OUTPUTS,
        "depth": depth.DEPTH,
    },
    plot=plot,
    claims=claims,
)
