"""Xu & Ziyin 2024, Fig. 7: the layers of a network that classifies align, stay or disalign as in regression."""

from collections.abc import Iterable

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_004.fig1 import ACTIVATIONS, STARTS, Setup, by_start, measure, plot, rises, vanishing

BEYOND = (None, 0.99)
"""zeta that has left 1: by a hundredth, which can be seen in a picture"""


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """Those of App. B.1, for the four activations of the figure and the linear network."""
    _, feature, orthogonal, near = (by_start(runs, start) for start in STARTS)
    lowest = dict(zip(ACTIVATIONS, numpy.moveaxis(orthogonal.min(2), 1, 0), strict=True))
    yield Claim(
        id="align",
        claim="Layers align for all activations: lowest end in the feature phase",
        paper="yes",
        values=feature[:, :, -1].min(1),
        band=(0.5, None),
        band_from="choice",
        least=Scale.LAPTOP,
        why="A change of order 1 from 0, as in Fig. 1; 0.80 to 0.97 after 1500 steps of an earlier trial.",
    )
    yield from vanishing(setup, runs)
    yield Claim(
        id="disalign",
        claim="And vice versa: near-orthogonal layers disalign for all activations: least fall of zeta",
        paper="yes",
        values=(near[:, :, 0] - near[:, :, -1]).min(1),
        band=(0.005, None),
        band_from="trial",
        least=Scale.LAPTOP,
        why="The band of Fig. 1; from 0.995 to 0.977 and lower in an earlier trial.",
    )
    yield Claim(
        id="monotone",
        claim="They do so monotonically for all activations",
        paper="yes",
        values=numpy.all(rises(-near), axis=1),
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="keeps-falling",
        claim="zeta keeps decreasing even after the loss converges: least fall after it, over activations",
        paper="yes",
        values=later_fall(runs, 0.99).min(1),
        band=(1e-3, None),
        band_from="choice",
        least=Scale.LAPTOP,
        why="Near-orthogonal start; a thousandth is the least that a picture shows.",
        choices=[
            Choice(
                made="converged: 99 % of the fall of the loss are done",
                other="90 %",
                values=later_fall(runs, 0.9).min(1),
            ),
            Choice(made="least over activations", other="mean", values=later_fall(runs, 0.99).mean(1)),
        ],
    )
    yield Claim(
        id="deviates-sigmoid",
        claim="From the orthogonal start zeta deviates from one with sigmoid: lowest",
        paper="below 1",
        values=lowest["sigmoid"],
        band=BEYOND,
        band_from="choice",
        least=Scale.LAPTOP,
        why="0.91 in an earlier trial.",
        choices=[
            Choice(made="weights of variance 10", other=f"variance {variance:g}", values=runs["lowest"][:, i])
            for i, variance in enumerate(setup.variances)
        ],
    )
    yield Claim(
        id="deviates-swish",
        claim="So it does with swish: lowest",
        paper="below 1",
        values=lowest["swish"],
        band=BEYOND,
        band_from="choice",
        least=Scale.LAPTOP,
        why="0.957 in an earlier trial.",
    )
    yield Claim(
        id="deviates-leaky",
        claim="So it does with leaky ReLU: lowest",
        paper="below 1",
        values=lowest["leaky_relu"],
        band=BEYOND,
        band_from="choice",
        known="Leaky ReLU is homogeneous: phi(z) = z phi'(z). Where u = w the gradients scale sum_x r(x) phi(w x) and "
        "scale sum_x r(x) u phi'(w x) x are equal for every loss, and the layers stay equal. Only activations that "
        "are not homogeneous leave 1, so the exception is ReLU and leaky ReLU.",
    )
    yield Claim(
        id="stays",
        claim="It stays at one with ReLU, and in the linear network: lowest",
        paper=1.0,
        values=numpy.minimum(lowest["relu"], lowest["linear"]),
        band=(0.999, 1.0001),
        band_from="theory",
        check=True,
        why="Both layers of a homogeneous unit get the same gradient where they are equal.",
    )


def later_fall(runs: Runs, share: float) -> Array:
    """(S, activations): how far zeta of near-orthogonal layers falls after a share of the fall of the loss is done."""
    near, loss = by_start(runs, "near-orthogonal"), runs["loss"][:, :, STARTS.index("near-orthogonal")]
    left = (loss - loss[..., -1:]) / (loss[..., :1] - loss[..., -1:])
    moment = (left <= 1 - share).argmax(-1)[..., None]
    fall: Array = numpy.take_along_axis(near, moment, axis=-1)[..., 0] - near[..., -1]
    return fall


EXPERIMENT = Experiment(
    id="004/fig7",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(
                task="classification",
                width=100,
                linear_width=100,
                samples=40,
                speed=0.04,
                large_speed=0.02,
                sigmoid_speed=0.2,
                steps=100,
                moments=5,
                law_widths=(50, 200),
            ),
            seeds=1,
            seconds=3,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(
            setup=Setup(task="classification", linear_width=1000, speed=0.02, large_speed=0.02, sigmoid_speed=0.1),
            seeds=3,
            seconds=60,
            mebibytes=50,
        ),
        Scale.PAPER: Size(
            setup=Setup(
                task="classification",
                width=10_000,
                speed=0.02,
                large_speed=0.02,
                sigmoid_speed=0.1,
                law_widths=(1000, 3000, 10_000),
            ),
            seeds=3,
            seconds=200,
            mebibytes=100,
            device="cuda",
        ),
    },
    measure=measure,
)

FIG_7 = Reproduction(
    id="004/fig7",
    about=(
        "The networks and starts of Fig. 1, f = scale u . phi(w x) with zeta = u . w / (|u| |w|), which tell numbers "
        "from N(0, 1) from numbers from N(4, 1) by binary cross-entropy. Above the kernel and the feature phase, below "
        "orthogonal and near-orthogonal layers. The paper shows ReLU, sigmoid, swish and leaky ReLU; the linear "
        "network is ours. It leaves open the number of samples (ours: 100, as in Fig. 1), learning rates and steps: "
        "ours are 0.02 (sigmoid 0.1), times the width where the scale is 1 / width, and 2000 steps, chosen by the loss "
        "alone. There is no bias, as in Fig. 1, so that homogeneous units can only tell positive from negative "
        "numbers. Its text says that zeta leaves 1 for all activations but ReLU. The kernel phase is run at three "
        "widths. At laptop scale the width is 1000, at the paper's 10000."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
