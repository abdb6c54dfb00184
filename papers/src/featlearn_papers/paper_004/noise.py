"""Full-batch descent and SGD from good and from poor starts, in the latent-variable model and on images.

The experiments behind 004/sgd: Xu & Ziyin 2024, end of Sec. 3.2, leave the comparison open.
"""

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

import featlearn as fl
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.runs import Numbers
from featlearn_papers.frame.scale import Scale
from featlearn_papers.frame.schedule import growing_steps
from featlearn_papers.paper_004.fig5 import scaling
from featlearn_papers.paper_004.two_layers import TwoLayerNetworks, drawn, loaded

STARTS = ("small", "large", "parallel", "antiparallel", "saddle")
"""small independent weights; large ones, of the kernel phase; large ones with w = u or w = -u up to a tenth; w = -u"""
METHODS = ("full batch", "single samples")


@dataclass(frozen=True, kw_only=True)
class LineSetup:
    """Inputs a n on a line, targets 2 a with noise, and f = u . W x / sqrt(width)."""

    width: int = 100
    samples: int = 100
    noise: float = 1.0
    """standard deviation of the targets around 2 a"""
    small: float = 0.2
    """standard deviation of the small start"""
    directions: int = 10
    """orthogonal to the line, in which there are no data"""
    lr: float = 0.02
    steps: int = 200_000
    growth: float = 1.1
    """from one step that is measured to the next"""


def measure_line(setup: LineSetup, context: Context) -> dict[str, Numbers]:
    """By method and start (2, 5, ...), at the moments: zeta, loss, and the squared output off the line.

    A step multiplies p by 1 - c and q by 1 + c, so p q by 1 - c^2. `spent` is the sum of c^2 up to a moment,
    `product` the norm of p q relative to its start (nan at the saddle, where p is 0). `theory` (4, T) is zeta of the
    exact solution from all starts but the saddle, where rounding would decide.
    """
    generator = context.generator()
    a, error = torch.randn(2, setup.samples, generator=generator, dtype=torch.float64)
    y = 2 * a + setup.noise * error
    u, w, off = started(setup, generator)
    order = torch.randint(setup.samples, (setup.steps + 1,), generator=context.generator(1))
    found = []
    for method in METHODS:
        rows = None if method == METHODS[0] else order
        found.append(descended(setup, u.clone(), w.clone(), off, a, y, rows))
        context.progress(len(found), len(METHODS), loss=float(found[-1]["loss"][1, -1]))
    numbers = {name: torch.stack([one[name] for one in found]) for name in found[0]}
    steps = torch.tensor(growing_steps(setup.steps, setup.growth))
    return {"steps": steps, **numbers, "theory": solved(setup, u, w, a, y, steps)}


def started(setup: LineSetup, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """u and w = W n, (starts, width), and W in the other directions (width, directions)."""
    u, other, little = torch.randn(3, setup.width, generator=generator, dtype=torch.float64)
    off = torch.randn(setup.width, setup.directions, generator=generator, dtype=torch.float64)
    readouts = torch.stack([setup.small * u, u, u, u, u])
    first = torch.stack([setup.small * other, other, u + 0.1 * little, -u + 0.1 * little, -u])
    return readouts, first, off


def descended(
    setup: LineSetup, u: Tensor, w: Tensor, off: Tensor, a: Tensor, y: Tensor, order: Tensor | None
) -> dict[str, Tensor]:
    """Steps on all samples, or on one after the other; all starts see the same."""
    scale, squares, products = setup.width**-0.5, a.square(), a * y
    mean = squares.mean(), products.mean()
    balance, spent, rows = (u.square() - w.square()), torch.zeros(len(u), dtype=torch.float64), []
    moments = {*growing_steps(setup.steps, setup.growth)}
    for step in range(setup.steps + 1):
        slope = scale * (u * w).sum(1)
        if step in moments:
            rows.append(
                {
                    "alignment": (u * w).sum(1) / (u.norm(dim=1) * w.norm(dim=1)),
                    "loss": (slope[:, None] * a - y).square().mean(1),
                    "off": (scale * u @ off).square().mean(1),
                    "product": (u.square() - w.square()).norm(dim=1) / balance.norm(dim=1),
                    "spent": spent.clone(),
                }
            )
        square, product = mean if order is None else (squares[order[step]], products[order[step]])
        c = 2 * setup.lr * scale * (square * slope - product)
        u, w = u - c[:, None] * w, w - c[:, None] * u
        spent += c.square()
    return {name: torch.stack([row[name] for row in rows], 1) for name in rows[0]}


def solved(setup: LineSetup, u: Tensor, w: Tensor, a: Tensor, y: Tensor, steps: Tensor) -> Tensor:
    """zeta by the exact solution of gradient flow, from all starts but the saddle."""
    line = fl.theory.latent.reduce_line(a[:, None], y)
    paths = [
        fl.theory.latent.solve(
            u[i],
            w[i][:, None],
            line.x,
            line.y,
            times=steps.double(),
            scale=setup.width**-0.5,
            rate_u=setup.lr,
            rate_w=setup.lr,
        )
        for i in range(STARTS.index("saddle"))
    ]
    return torch.stack([path.layer_alignment for path in paths]) * line.x.sign()


@dataclass(frozen=True, kw_only=True)
class ImageSetup:
    """Two-layer ReLU networks on ten classes; starts by the exponent c of Fig. 5."""

    data: str = "mnist"
    samples: int = 500
    test_samples: int = 2000
    pooling: int = 2
    """images are averaged over squares of so many pixels"""
    width: int = 200
    exponents: tuple[float, ...] = (-1.0, 0.0, 1.0, 2.0)
    kappa: float = 10.0
    lr: float = 0.02
    batch: int = 10
    steps: int = 3000
    checks: int = 20
    """how often the accuracies are measured; the best counts"""


def measure_images(setup: ImageSetup, context: Context) -> dict[str, Numbers]:
    """By method and c (2, c): best accuracies, and zeta of the two layers at the start and the end."""
    data, test = (
        loaded(setup.data, split, samples, setup.pooling, context)
        for split, samples in (("train", setup.samples), ("test", setup.test_samples))
    )
    found: list[dict[str, Any]] = []
    for batch in (setup.samples, setup.batch):
        schemes = [scaling(c) for c in setup.exponents]
        networks = drawn(
            data[0].shape[1], setup.width, schemes, setup.lr, context, base_width=setup.width, kappa=setup.kappa
        )
        start = alignment(networks)
        epochs = setup.steps * batch // setup.samples
        numbers = networks.train(data, test, context, batch=batch, epochs=epochs, every=max(1, epochs // setup.checks))
        found.append({**numbers, "start": start, "alignment": alignment(networks)})
    return {name: numpy.stack([one[name].numpy() for one in found]) for name in found[0]}


def alignment(networks: TwoLayerNetworks) -> Tensor:
    """(N,): |U W| / (|U| |W|) with Frobenius norms."""
    product = torch.bmm(networks.readout, networks.first).flatten(1).norm(dim=1)
    each = [weight.flatten(1).norm(dim=1) for weight in (networks.readout, networks.first)]
    return torch.Tensor.cpu(product / (each[0] * each[1]))


LINE = Experiment(
    id="004/noise-on-a-line",
    sizes={
        Scale.SMOKE: Size(setup=LineSetup(width=20, steps=2000), seeds=1, seconds=1, mebibytes=10),
        Scale.LAPTOP: Size(setup=LineSetup(), seeds=5, seconds=50, mebibytes=20),
    },
    measure=measure_line,
)
IMAGES = Experiment(
    id="004/noise-on-images",
    sizes={
        Scale.SMOKE: Size(
            setup=ImageSetup(data="digits", samples=100, test_samples=50, pooling=1, width=20, steps=100, checks=2),
            seeds=1,
            seconds=1,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(setup=ImageSetup(), seeds=5, seconds=80, mebibytes=100),
    },
    measure=measure_images,
)
