"""Code shared by figures of Atanasov et al. 2022 that train on images of two classes.

Whitened images of two classes, the kernel along training, three predictors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import featlearn as fl
from featlearn_papers.frame.context import Context

SEEN = 1e-3
"""Share of the largest singular value. Some pixels of MNIST are ink in one training image of a thousand: whitened, they
make test images a thousand times as long as others, and predictions of -80, where those of Fig. 1b lie between -4 and
4. All directions of a thousand images of CIFAR-10 are above."""


@dataclass(frozen=True)
class TwoClasses:
    """Inputs (P, ...) and targets -1 and +1 (P,), to train on and to test."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    exact: Tensor
    """x (P, D) in double, before it was rounded: rounding fills directions that the data do not have"""


def two_classes(
    context: Context,
    data: str,
    samples: int,
    test_samples: int,
    *,
    power: float | None = 0.0,
    mean_eigenvalue: float | None = 1.0,
    pooling: int = 1,
    flatten: bool = True,
    cut: float = SEEN,
    normalization: str = "channel",
    batches: Sequence[int] | None = (1,),
) -> TwoClasses:
    """The first two classes of a data set, whitened by the training points: eigenvalues l of X^T X become as l^power.

    `mean_eigenvalue` is that of X^T X / P over the directions kept. Test points are others of the same files (of
    CIFAR-10 the first), and see the same map. Directions with singular values below `cut` times the largest are dropped
    before. `normalization` is that of the pixels of CIFAR-10, `batches` the files of it that are read, None for all
    five: the first has 1979 images of the two classes, all have 10,000.

    A `power` of None leaves the images as they are, with all directions, but for one factor that gives them the total
    of eigenvalues that whitened ones have; with a `mean_eigenvalue` of None there is no factor either.
    """
    files: dict[str, Any] = {"batches": batches, "normalization": normalization} if data == "cifar10" else {}
    drawn = context.dataset(
        data, classes=(0, 1), samples=samples + test_samples, generator=context.generator(), **files
    )
    pictures, y = torch.nn.functional.avg_pool2d(drawn.x, pooling).double(), drawn.signs().to(context.device)
    rows = pictures.flatten(1)
    if power is None:
        exact = rows if mean_eigenvalue is None else rows * _factor(rows[:samples], mean_eigenvalue)
    else:
        rows = seen_directions(rows, samples, cut)
        exact = fl.steer.whiten(rows[:samples], power, mean_eigenvalue=mean_eigenvalue).transform(rows)
    x = (exact if flatten else exact.view_as(pictures)).float().to(context.device)
    return TwoClasses(x[:samples], y[:samples], x[samples:], y[samples:], exact[:samples])


def _factor(rows: Tensor, mean_eigenvalue: float) -> Tensor:
    """Makes the mean of the min(P, D) eigenvalues of X^T X / P what it should be."""
    found: Tensor = (mean_eigenvalue * min(rows.shape) / (rows.square().sum() / len(rows))).sqrt()
    return found


def seen_directions(rows: Tensor, samples: int, cut: float = SEEN) -> Tensor:
    """Rows (P + P', D), without the directions that the first `samples` of them hardly have."""
    _, sizes, directions = torch.linalg.svd(rows[:samples], full_matrices=False)
    kept = directions[sizes > cut * sizes[0]]
    projected: Tensor = rows @ kept.mT @ kept
    return projected


CURVES = ("steps", "loss", "test_error", "alignment", "centered_alignment", "norm")
UPDATE_CURVES = ("update_alignment", "update_centered_alignment")


@dataclass(frozen=True)
class TrainingPath:
    """A network and its kernel along training, at T moments."""

    steps: Tensor
    loss: Tensor
    """mean of (f - y)^2"""
    test_error: Tensor
    """share of test points on the wrong side of zero"""
    alignment: Tensor
    """as the paper prints it"""
    centered_alignment: Tensor
    """of kernel and targets less their means, as Cortes et al. 2012 define it"""
    norm: Tensor
    """of the kernel, Frobenius"""
    start: "Predictor"
    end: "Predictor"
    update: "Predictor"
    """with the kernel of the optimizer's update at the end (Eq. 91); that of plain descent predicts as `end` does"""
    update_alignment: Tensor | None = None
    """of that kernel along the way, nan before the first step, where an adaptive optimizer has no kernel"""
    update_centered_alignment: Tensor | None = None

    def curves(self) -> dict[str, Tensor]:
        """All that has T numbers."""
        found = {name: getattr(self, name) for name in (*CURVES, *UPDATE_CURVES)}
        return {name: values for name, values in found.items() if values is not None}

    def predictions(self, y: Tensor) -> Tensor:
        """(4, P'): the trained network on the test points, then regression with the last, the first and the optimizer's
        kernel.

        Each regression starts from the network's first outputs: f0(x) + k(x) K^-1 (y - f0) (Theorem 1, corrected).
        """
        fitted = [
            fl.dynamics.kernel_regression(
                each.kernel,
                y.to(each.kernel),
                each.cross,
                f0=self.start.f.to(each.kernel),
                f0_test=self.start.test_f.to(each.kernel),
            )
            for each in (self.end, self.start, self.update)
        ]
        return torch.stack([self.end.test_f.double(), *(each.double() for each in fitted)])


@dataclass(frozen=True)
class Predictor:
    """A kernel (P, P), with test points (P', P), and the outputs of its network on both."""

    kernel: Tensor
    cross: Tensor
    f: Tensor
    test_f: Tensor


def predictor(model: torch.nn.Module, task: TwoClasses, **options: Any) -> Predictor:
    """That of a network as it is; `options` are those of `fl.ntk`."""
    with torch.no_grad():
        f, test_f = model(task.x), model(task.test_x)
    return Predictor(fl.ntk(model, task.x, **options), fl.ntk(model, task.test_x, x2=task.x, **options), f, test_f)


def train_and_measure(
    model: torch.nn.Module,
    task: TwoClasses,
    optimizer: torch.optim.Optimizer,
    context: Context,
    *,
    steps: int,
    stride: int,
    dense: int | None = None,
    dtype: torch.dtype | None = None,
    along: torch.dtype | None = None,
    updates: bool = False,
) -> TrainingPath:
    """Train on 1/(2P) sum (f - y)^2, all points at every step, and measure every `stride` steps, and the first `dense`.

    None for as many as the stride. `dtype` is that of the kernels that predict, `along` of those along the way; None
    for the network's. With `updates` the kernel of the optimizer's update is measured along the way, too.
    """
    found: dict[str, list[float]] = {name: [] for name in (*CURVES, *(UPDATE_CURVES if updates else ()))}
    start, session = predictor(model, task, dtype=dtype), fl.Session(model, task.x, dtype=along)
    dense = stride if dense is None else dense
    for step in range(steps + 1):
        residual = model(task.x) - task.y
        if step % stride == 0 or step < dense:
            kernel = session.ntk()
            with torch.no_grad():
                wrong = (model(task.test_x) * task.test_y <= 0).double().mean()
            loss = residual.detach().square().mean()
            values = [step, loss, wrong, *alignments(kernel, task.y), torch.linalg.matrix_norm(kernel)]
            if updates and step == 0:
                values += [math.nan, math.nan]
            elif updates:
                values += alignments(session.ntk(optimizer=optimizer), task.y)
            for row, value in zip(found.values(), values, strict=True):
                row.append(float(value))
            context.progress(step, steps, loss=found["loss"][-1], alignment=found["alignment"][-1])
        if step < steps:
            (residual.square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()  # a gradient that is left would count twice in the kernel of the update
    curves = {name: torch.tensor(row, dtype=torch.float64) for name, row in found.items()}
    end = predictor(model, task, dtype=dtype)
    plain = isinstance(optimizer, torch.optim.SGD)
    update = end if plain else predictor(model, task, dtype=dtype, optimizer=optimizer)
    return TrainingPath(**curves, start=start, end=end, update=update)


def alignments(kernel: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Raw and centered."""
    return fl.metrics.alignment(kernel, y), fl.metrics.centered_alignment(kernel, y)


def agreements(predictions: Tensor) -> tuple[Tensor, Tensor]:
    """Relative error and correlation, (3,) each, of the three regressions of `TrainingPath.predictions`."""
    pairs = [fl.metrics.agreement(each, predictions[0]) for each in predictions[1:]]
    errors = torch.stack([pair.relative_error for pair in pairs])
    return errors, torch.stack([pair.correlation for pair in pairs])


def settled(steps: Any, values: Any, share: float = 0.1) -> float:
    """From when on a curve stays within `share` of its last value: the first measured step of that time."""
    off = abs(values / values[-1] - 1) > share
    return float(steps[int(off.nonzero()[0].max()) + 1]) if off.any() else float(steps[0])


def first(times: Any, values: Any, fraction: float, of: Any) -> float:
    """`fl.metrics.time_to` for arrays."""
    return fl.metrics.time_to(torch.as_tensor(times), torch.as_tensor(values), fraction, of)
