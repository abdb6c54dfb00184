"""A two-layer linear network that learns a linear teacher, from weights of several sizes.

The experiment behind Fig. 3 and 7 of Shan & Bordelon 2021a.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.runs import Numbers
from featlearn_papers.frame.scale import Scale
from featlearn_papers.frame.schedule import growing_steps


@dataclass(frozen=True, kw_only=True)
class Start:
    """Entries of V and W are N(0, deviation^2); the penalty is decay / 2 (|V|^2 + |W|^2)."""

    deviation: float
    decay: float = 0.0


SMALL, MEDIUM, LARGE, DECAYING = range(4)
"""places in `Setup.starts`"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """r = V^T W x / N with V (N,) and W (N, N), Gaussian inputs, a teacher of length 1, loss P^-1 sum (r - y)^2."""

    width: int = 40
    samples: int = 80
    starts: tuple[Start, ...] = (
        Start(deviation=0.05),
        Start(deviation=0.3),
        Start(deviation=1.0),
        Start(deviation=1.0, decay=1e-3),
    )
    lr: float = 2.0
    steps: int = 4000
    growth: float = 1.2
    """from one measured step to the next"""

    @property
    def moments(self) -> list[int]:
        """The steps at which kernels are measured."""
        return growing_steps(self.steps, self.growth)


def task(setup: Setup, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """X (P, N) and the teacher s (N,)."""
    X = torch.randn(setup.samples, setup.width, generator=generator, dtype=torch.float64)
    s = torch.randn(setup.width, generator=generator, dtype=torch.float64)
    return X, s / s.norm()


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Starts first; `followed` along training, `compared` after it. `best` is the limit of small weights."""
    X, s = task(setup, context.generator())
    found: dict[str, list[Any]] = {}
    for i, start in enumerate(setup.starts):
        # in this parametrization of variance 1 each layer has a factor 1 / sqrt(N)
        model = MLP(
            setup.width,
            None,
            width=setup.width,
            hidden_layers=1,
            activation="linear",
            parametrization="ntk",
            weight_variance=1.0,
            generator=context.generator(1),
        ).double()
        fl.steer.scale_init(model, start.deviation)
        first = fl.ntk(model, X)
        numbers = followed(model, X, s, setup, start) | compared(model, X, s, first, start)
        for name, value in numbers.items():
            found.setdefault(name, []).append(value)
        context.progress(i + 1, len(setup.starts), deviation=start.deviation, loss=numbers["loss"][-1])
    best = fl.theory.deep_linear.max_alignment(X, X @ s, weight_layers=2)
    return {"steps": setup.moments, "best": best, **found}


def followed(model: torch.nn.Module, X: Tensor, s: Tensor, setup: Setup, start: Start) -> dict[str, list[float]]:
    """At the moments of gradient descent: loss, cosines of weights and of the top eigenvector, alignment."""
    V, W = readout_and_first(model)
    y, session = X @ s, fl.Session(model, X)
    found: dict[str, list[float]] = {"loss": [], "teacher": [], "alignment": [], "top": []}
    moments, kept = set(setup.moments), 1 - setup.lr * start.decay
    moment = 2 * setup.lr / (setup.samples * setup.width) * X.T @ X
    for step in range(setup.steps + 1):
        learned = V @ W / setup.width
        if step in moments:
            kernel: Any = session.ntk()
            vectors = torch.linalg.eigh(kernel).eigenvectors
            found["loss"].append(float((X @ learned - y).square().mean()))
            found["teacher"].append(float(fl.metrics.correlation(learned, s)))
            found["alignment"].append(float(fl.metrics.alignment(kernel, y)))
            found["top"].append(abs(float(vectors[:, -1] @ y / y.norm())))
        if step == setup.steps:
            break
        # the gradient by hand, and in place: autograd takes ten times as long for weights as few as these
        pull = moment @ (s - learned)
        change = W @ pull
        W.mul_(kept).addr_(V, pull)
        V.mul_(kept).add_(change)
    return found


def readout_and_first(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """V (N,) and W (N, N), which go on with the model."""
    W, V = (weight.detach() for weight in model.parameters())
    return V[0], W


def compared(model: torch.nn.Module, X: Tensor, s: Tensor, first: Tensor, start: Start) -> dict[str, Any]:
    """The last kernel, Eq. 12, beside Eq. 14: y y^T / |V|^2 + |V|^2 X X^T / N^2.

    Spectra (2, N), exact and approximate; relative errors of Eq. 14, of its second form, in which the first kernel
    stands for alpha_K X X^T / N^2, and of that as it is printed; what is left of W across V, as a share of W.
    """
    V, W = readout_and_first(model)
    y, size, width = X @ s, V.square().sum(), len(s)
    covariance, task = X @ X.T / width**2, torch.outer(y, y) / size
    scale = fl.theory.deep_linear.initial_kernel_scale(width, start.deviation**2, start.deviation**2)
    kernel = fl.ntk(model, X)
    forms = {
        "error": task + size * covariance,
        "error/first-kernel": task + size * first / scale,
        "error/printed": task + size * first / scale**2,
    }
    spectra: list[Any] = [fl.metrics.spectrum(each, y) for each in (kernel, forms["error"])]
    across = W - torch.outer(V, V @ W) / size
    return {
        "eigenvalues": [one.eigenvalues[:width].tolist() for one in spectra],
        "task_power": [(one.task_power[:width] / y.square().sum()).tolist() for one in spectra],
        "across": float(across.norm() / W.norm()),
        "first-kernel": float((first - scale * covariance).norm() / first.norm()),
        **{name: float((form - kernel).norm() / kernel.norm()) for name, form in forms.items()},
    }


LINEAR = Experiment(
    id="000/linear",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(
                width=15,
                samples=30,
                steps=1000,
                growth=1.5,
                starts=(*Setup.starts[:DECAYING], Start(deviation=1.0, decay=4e-3)),
            ),
            seeds=1,
            seconds=2,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=5, seconds=10, mebibytes=50),
        Scale.PAPER: Size(setup=Setup(), seeds=10, seconds=10, mebibytes=50),
    },
    measure=measure,
)
