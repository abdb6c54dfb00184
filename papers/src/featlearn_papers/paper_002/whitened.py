"""Networks that start small, on whitened images of two classes: the experiments behind Atanasov et al. 2022, Fig. 1."""

from dataclasses import dataclass, replace

import torch

import featlearn as fl
from featlearn.models import MLP, WideResNet
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.experiment import SEEDS, Experiment, Size
from featlearn_papers.frame.runs import Numbers
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.silence import SEEN, agreements, train_and_measure, two_classes

FINE = 1e-6
"""the other cut of singular values, for which all pixels that have ever had ink are kept"""


@dataclass(frozen=True, kw_only=True)
class Perceptron:
    """A ReLU network with one hidden layer, trained by gradient descent."""

    data: str
    samples: int = 1000
    test_samples: int = 500
    pooling: int = 1
    """images are averaged over squares of so many pixels"""
    cut: float = SEEN
    """directions with singular values below this share of the largest are dropped before whitening"""
    normalization: str = "channel"
    """of the pixels of CIFAR-10"""
    width: int = 100
    sigma: float
    """weights are N(0, sigma^2 / fan_in)"""
    lr: float = 0.03
    steps: int = 800
    stride: int = 10
    """steps between measurements, after the first so many, which are all measured"""


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A wide residual network, trained by Adam (App. J)."""

    data: str = "cifar10"
    samples: int = 100
    test_samples: int = 100
    pooling: int = 1
    normalization: str = "channel"
    power: float | None = 0.0
    """of the eigenvalues of the inputs: 0 whitens, None leaves the images as they are"""
    mean_eigenvalue: float | None = 1.0
    """of X^T X / P; None leaves the pixels their size, where `power` is None"""
    k: float = 4.0
    b: int = 1
    """blocks in each of three groups"""
    sigmas: tuple[float, float, float] = (6.0, 0.3, 1.0)
    """of the first convolution, of all others and of the readout, which the paper does not say"""
    lr: float = 1e-5
    steps: int = 1500
    stride: int = 25
    dense: int | None = None
    """steps at the start that are all measured; None for as many as the stride"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Two classes, y = -1 and +1, inputs whitened: X^T X / P is a projector; loss 1/(2P) sum (f - y)^2."""

    mnist: Perceptron = Perceptron(data="mnist", sigma=0.01, steps=2000, stride=20)
    cifar: Perceptron = Perceptron(data="cifar10", sigma=0.1, steps=400)
    residual: Residual = Residual()


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Curves and predictions on test points, under "mnist/...", "cifar/..." and "residual/..."."""
    found: dict[str, Numbers] = {}
    for name in ("mnist", "cifar", "residual"):
        context.say(name)
        part = getattr(setup, name)
        numbers = residual(part, context) if isinstance(part, Residual) else perceptron(part, context)
        found.update({f"{name}/{key}": value for key, value in numbers.items()})
    return found


def perceptron(part: Perceptron, context: Context) -> dict[str, Numbers]:
    """One of the panels a to c, with the largest alignment that a linear network could have."""
    task = two_classes(
        context,
        part.data,
        part.samples,
        part.test_samples,
        pooling=part.pooling,
        cut=part.cut,
        normalization=part.normalization,
    )
    model = MLP(
        task.x.shape[1],
        None,
        width=part.width,
        hidden_layers=1,
        weight_variance=part.sigma**2,
        generator=context.generator(1),
    ).to(context.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=part.lr)
    # with the fine cut, and with raw pixels, some inputs are much longer than others, too long for single precision
    along = torch.float64 if part.cut < SEEN or part.normalization == "unit" else None
    path = train_and_measure(
        model, task, optimizer, context, steps=part.steps, stride=part.stride, dtype=torch.float64, along=along
    )
    best = fl.theory.deep_linear.max_alignment(task.exact, task.y.double().cpu(), weight_layers=2)
    return {**path.curves(), **compared(path.predictions(task.y)), "best": best}


def residual(part: Residual, context: Context, *, updates: bool = False) -> dict[str, Numbers]:
    """Panels d and e; with `updates` the alignment of the kernel of Adam's update along the way, too."""
    task = two_classes(
        context,
        part.data,
        part.samples,
        part.test_samples,
        power=part.power,
        mean_eigenvalue=part.mean_eigenvalue,
        pooling=part.pooling,
        flatten=False,
        normalization=part.normalization,
    )
    model = WideResNet(
        part.k,
        part.b,
        inputs=task.x.shape[1],
        weight_variance=tuple(sigma**2 for sigma in part.sigmas),
        generator=context.generator(1),
    ).to(context.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=part.lr)
    path = train_and_measure(
        model, task, optimizer, context, steps=part.steps, stride=part.stride, dense=part.dense, updates=updates
    )
    return {**path.curves(), **compared(path.predictions(task.y))}


def compared(predictions: torch.Tensor) -> dict[str, Numbers]:
    """(4, P') predictions, and (3,) each: relative errors and correlations of the regressions."""
    errors, correlations = agreements(predictions)
    return {"predictions": predictions, "error": errors, "correlation": correlations}


SIZES = {
    Scale.SMOKE: Size(
        setup=Setup(
            mnist=Perceptron(
                data="digits", samples=100, test_samples=40, sigma=0.01, width=40, lr=0.1, steps=300, stride=20
            ),
            cifar=Perceptron(
                data="digits", samples=40, test_samples=40, sigma=0.1, width=40, lr=0.1, steps=100, stride=20
            ),
            residual=Residual(data="digits", samples=20, test_samples=20, k=0.125, lr=1e-3, steps=20, stride=10),
        ),
        seeds=1,
        seconds=4,
        mebibytes=50,
    ),
    Scale.LAPTOP: Size(
        setup=Setup(
            cifar=Perceptron(data="cifar10", samples=500, sigma=0.1, pooling=2, steps=400),
            residual=Residual(samples=50, test_samples=50, pooling=2, k=0.5, lr=5e-5, steps=600, stride=15),
        ),
        seeds=3,
        seconds=75,
        mebibytes=300,
    ),
    Scale.PAPER: Size(setup=Setup(), seeds=5, seconds=134, mebibytes=2300, device="cuda"),
}


def otherwise(setup: Setup) -> Setup:
    """The same with what could have been chosen: the fine cut on MNIST, raw pixels of CIFAR-10."""
    return Setup(
        mnist=replace(setup.mnist, cut=FINE),
        cifar=replace(setup.cifar, normalization="unit"),
        residual=replace(setup.residual, normalization="unit"),
    )


WHITENED = Experiment(id="002/whitened", sizes=SIZES, measure=measure)
OTHERWISE = Experiment(
    id="002/whitened-otherwise",
    sizes={
        scale: replace(size, setup=otherwise(size.setup), seeds=min(size.seeds, SEEDS)) for scale, size in SIZES.items()
    },
    measure=measure,
)
