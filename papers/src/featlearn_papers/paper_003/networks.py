"""Perceptrons, VGG-11 and GPT along training: the experiments behind Fig. 2, 13, 14 and 15 of Beaglehole et al. 2024.

One for each network and data set, so that they can run side by side; a figure draws from as many as it shows.
"""

from typing import Any

from featlearn_papers.frame.experiment import AnyExperiment, Experiment, Size
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003.tracking import (
    Convolutional,
    Language,
    Perceptron,
    convolutional,
    language_model,
    perceptron,
)

LAPTOP: dict[str, Any] = {
    "cifar100": {"lr": 2.0, "pooling": 2},
    "mnist": {"lr": 10.0},
    "svhn": {"lr": 2.0, "pooling": 2},
    "cifar10": {"lr": 2.0, "pooling": 2},
    "gtsrb": {"lr": 1.0, "pooling": 2, "drawn": True},
    "stl10": {"lr": 1.0, "pooling": 6},
}
"""2000 images for 50 epochs, at ten times the paper's rates but for MNIST; in the order of Fig. 13"""
PAPER: dict[str, Any] = {
    "cifar100": {"samples": 20_000, "unseen": 3000, "epochs": 150, "lr": 0.2},
    "mnist": {"samples": 50_000, "unseen": 10_000, "epochs": 50, "lr": 10.0},
    "svhn": {"samples": 20_000, "unseen": 5000, "epochs": 150, "lr": 0.2},
    "cifar10": {"samples": 50_000, "unseen": 10_000, "epochs": 150, "lr": 0.2},
    "gtsrb": {"samples": 12_000, "unseen": 3000, "epochs": 150, "lr": 0.1, "drawn": True},
    "stl10": {"samples": 3001, "unseen": 1000, "epochs": 150, "lr": 0.1, "pooling": 3},
}
"""the paper's epochs and rates; STL-10 at 32 x 32 pixels"""
SECONDS = {"cifar100": 40, "mnist": 24, "svhn": 40, "cifar10": 90, "gtsrb": 30, "stl10": 16}
"""of a seed at paper scale"""


def _perceptron(data: str) -> AnyExperiment:
    smoke = Perceptron(
        data="digits",
        samples=256,
        unseen=100,
        epochs=8,
        lr=10.0,
        batch=64,
        probe=64,
        growth=1.6,
        width=32,
        hidden_layers=3,
        standardized=True,
    )
    laptop = Perceptron(
        data=data, samples=2000, unseen=1000, epochs=50, probe=128, growth=1.5, standardized=True, **LAPTOP[data]
    )
    paper = Perceptron(data=data, probe=1000, standardized=True, **PAPER[data])
    return Experiment(
        id=f"003/perceptron-{data}",
        sizes={
            Scale.SMOKE: Size(setup=smoke, seeds=1, seconds=1, mebibytes=50),
            Scale.LAPTOP: Size(setup=laptop, seeds=3, seconds=20, mebibytes=400),
            Scale.PAPER: Size(setup=paper, seeds=3, seconds=SECONDS[data], mebibytes=3400, device="cuda"),
        },
        measure=perceptron,
        paper_seeds=3,
    )


PERCEPTRONS = {data: _perceptron(data) for data in PAPER}
"""By data set, in the order of Fig. 13."""

VGG = Experiment(
    id="003/vgg",
    sizes={
        Scale.SMOKE: Size(
            setup=Convolutional(
                data="digits",
                samples=48,
                unseen=16,
                epochs=2,
                lr=0.1,
                batch=16,
                momentum=0.9,
                probe=8,
                width=4,
                head=16,
                standardized=True,
            ),
            seeds=1,
            seconds=2,
            mebibytes=50,
        ),
        Scale.LAPTOP: Size(
            setup=Convolutional(
                data="cifar10",
                samples=500,
                unseen=500,
                epochs=40,
                lr=0.1,
                batch=50,
                momentum=0.9,
                probe=64,
                growth=1.6,
                width=8,
                head=64,
                standardized=True,
            ),
            seeds=3,
            seconds=60,
            mebibytes=400,
        ),
        Scale.PAPER: Size(
            setup=Convolutional(
                data="cifar10",
                samples=50_000,
                unseen=10_000,
                epochs=50,
                lr=0.03,
                batch=256,
                momentum=0.9,
                warm=195,
                growth=1.5,
                standardized=True,
            ),
            seeds=3,
            seconds=120,
            mebibytes=8000,
            device="cuda",
        ),
    },
    measure=convolutional,
    paper_seeds=3,
)

GPT = Experiment(
    id="003/gpt",
    sizes={
        Scale.SMOKE: Size(
            setup=Language(
                data="cycle",
                blocks=1,
                width=16,
                heads=2,
                context=8,
                batch=8,
                warm=2,
                steps=20,
                probe=8,
                probes=2,
                judged=8,
            ),
            seeds=1,
            seconds=2,
            mebibytes=50,
        ),
        Scale.LAPTOP: Size(
            setup=Language(width=64, heads=4, context=32, batch=16, warm=40, steps=400, growth=1.6),
            seeds=3,
            seconds=40,
            mebibytes=400,
        ),
        Scale.PAPER: Size(setup=Language(), seeds=3, seconds=90, mebibytes=8000, device="cuda"),
    },
    measure=language_model,
)

NETWORKS: dict[str, AnyExperiment] = {**PERCEPTRONS, "vgg": VGG, "gpt": GPT}
