"""A network with two hidden layers on MNIST beside its frozen first kernel.

The experiment behind Fig. 1, 4A and 5 of Shan & Bordelon 2021a, and Fig. 1, 3A and 7C-D of 2021b, on one-hot targets;
with other labels, behind Fig. 1 of 2021b.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

import featlearn as fl
from featlearn.data import Labeled
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.runs import Numbers
from featlearn_papers.frame.scale import Scale
from featlearn_papers.frame.schedule import growing_steps

CHANNEL = 3
"""the output whose kernel Fig. 1F and Fig. 5 of 2021a, and Fig. 7C-D of 2021b, follow"""
PARTS = ("network", "readout", "hidden")
"""first axis of class alignments after the moments: the whole kernel, K_V, and K_W of all hidden layers"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Shan & Bordelon 2021b, App. E.2, with the same network.

    Full batch, loss averaged over samples and outputs.
    """

    data: str = "mnist"
    labels: str = "classes"
    """one-hot targets; or "parity": one output, 1 for odd digits and -1 for even ones, on squared error alone"""
    samples: int = 1000
    test_samples: int = 300
    width: int = 500
    hidden_layers: int = 2
    lr: float = 20.0
    steps: int = 10_000
    growth: float = 1.35
    """from one measured step to the next"""
    few: int = 50
    """samples on which the kernel between all pairs of outputs is followed"""

    @property
    def window(self) -> tuple[int, int]:
        """First and last k of the power laws: 10 to 300 for 1000 samples."""
        return 10, 3 * self.samples // 10

    @property
    def moments(self) -> list[int]:
        """The steps at which kernels are measured."""
        return growing_steps(self.steps, self.growth)


@dataclass(frozen=True, kw_only=True)
class ClassificationTask:
    """Inputs and targets (P, C), for training and held out, on the device; and how fast outputs move."""

    x: Tensor
    y: Tensor
    test: tuple[Tensor, Tensor]
    rate: float


def task(setup: Setup, context: Context) -> ClassificationTask:
    """Drawn by the seed."""
    parts = [
        context.dataset(setup.data, split=split, samples=count, flatten=True, generator=context.generator(stream))
        for stream, (split, count) in enumerate((("train", setup.samples), ("test", setup.test_samples)))
    ]
    (x, y), test = ((each.x.to(context.device), targets(each, setup.labels).to(context.device)) for each in parts)
    rate = fl.dynamics.rate(setup.lr, "mean-over-outputs", setup.samples, y.shape[1])
    return ClassificationTask(x=x, y=y, test=test, rate=rate)


def targets(data: Labeled, labels: str) -> Tensor:
    """(P, C) one-hot, or (P, 1) the sign of the parity."""
    if labels == "parity":
        return 2.0 * (data.labels % 2)[:, None] - 1
    return data.one_hot()


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """The same network, from the same weights, on squared error and on cross-entropy, beside its frozen kernels."""
    given = task(setup, context)
    x, y, rate = given.x, given.y, given.rate
    # cross-entropy has the learning rate that moves outputs as fast as squared error does
    losses: dict[str, tuple[Callable[..., Tensor], float]] = {
        "mse": (mse_loss, setup.lr),
        "ce": (cross_entropy, rate * setup.samples),
    }
    if y.shape[1] == 1:  # classes are told apart by their sign
        del losses["ce"]
    found: dict[str, Numbers] = {}
    for name, (loss, lr) in losses.items():
        model = MLP(
            x.shape[1],
            y.shape[1],
            width=setup.width,
            hidden_layers=setup.hidden_layers,
            parametrization="ntk",
            weight_variance=(1.0, 2.0, 1.0),
            generator=context.generator(2),
        ).to(context.device)
        first = fl.ntk(model, x, outputs="full")
        with tempfile.TemporaryDirectory(dir=context.folder) as folder:
            run, classes = trained(model, given, loss, lr, setup, context, Path(folder) / name)
            steps, f = torch.as_tensor(run.arrays["outputs"]), outputs(run).to(context.device)
            numbers = curves(run) | classes | (frozen(first, run, given) if name == "mse" else {})
        if name == "mse":
            numbers["late_error"], _ = predicted(fl.ntk(model, x, outputs="full"), y, steps, f, rate, faster=1.0)
        else:
            path = fl.dynamics.kernel_descent(
                first, y, times=steps, rate=rate, f0=f[0], discrete=True, loss="cross-entropy"
            )
            numbers["kgd"] = path.loss / len(y)
        found |= {f"{name}/{key}": value for key, value in numbers.items()}
    return found


def trained(
    model: torch.nn.Module,
    given: ClassificationTask,
    loss: Callable[..., Tensor],
    lr: float,
    setup: Setup,
    context: Context,
    out: Path,
) -> tuple[Any, dict[str, Tensor]]:
    """The run of gradient descent with kernels at the moments, and class alignments (T, PARTS, C, C)."""

    matrices: dict[str, list[Tensor]] = {"classes": [], "centered_classes": []}

    def classes(view: Any) -> dict[str, float]:
        """How the kernel of each output is aligned with each target, by parts; how much outputs interfere."""
        readout = view.layer_kernels["readout"]
        kernels = torch.stack([view.kernel_each, readout, view.kernel_each - readout])
        matrices["classes"].append(fl.metrics.class_alignment(kernels, view.targets))
        matrices["centered_classes"].append(fl.metrics.class_alignment(kernels, view.targets, centered=True))
        full = fl.ntk(view.model, view.x[: setup.few], outputs="full")
        test = fl.ntk(view.model, given.test[0]), given.test[1]
        return {
            "interference": float(fl.metrics.interference(full).off_diagonal_share),
            "test_alignment": float(fl.metrics.alignment(*test)),
            "test_centered_alignment": float(fl.metrics.centered_alignment(*test)),
        }

    moments, optimizer = set(setup.moments), torch.optim.SGD(model.parameters(), lr=lr)
    with fl.watch(
        model,
        (given.x, given.y),
        out=out,
        every=moments.__contains__,
        budget=None,
        test=given.test,
        quantities=["kernel", "test", classes],
    ) as watch:
        for step in range(1, setup.steps + 1):
            optimizer.zero_grad()
            value = loss(model(given.x), given.y)
            value.backward()
            optimizer.step()
            watch.step(loss=value.detach())
            if step in moments:
                context.progress(step, setup.steps, loss=float(value.detach()))
    return watch.run, {name: torch.stack(values) for name, values in matrices.items()}


def outputs(run: Any) -> Tensor:
    """(T, P, C) on the training samples."""
    return torch.stack([torch.as_tensor(run.array("outputs", step)["f"]).double() for step in run.arrays["outputs"]])


def curves(run: Any) -> dict[str, Numbers]:
    """Numbers at the moments, both losses, and the spectra (T, P) of the kernel."""
    f, y = outputs(run), torch.as_tensor(run.array("targets", 0)["y"]).double()
    spectra = [run.array("spectrum", step) for step in run.arrays["outputs"]]
    found: dict[str, Numbers] = {
        "steps": run.arrays["outputs"],
        "loss": (f - y).square().mean((1, 2)),
        "interference": run.scalar("interference")[1],
        "eigenvalues": numpy.stack([one["eigenvalues"] for one in spectra]),
        "task_power": numpy.stack([one["task_power"] for one in spectra]),
    }
    if y.shape[1] > 1:
        found["cross_entropy"] = -(y * f.log_softmax(2)).sum(2).mean(1)
        found["accuracy"] = run.scalar("test/accuracy")[1]
    for name in ("alignment", "centered_alignment", "norm"):
        found[name] = run.scalar(f"ntk/{name}")[1]
    for name in ("alignment", "centered_alignment"):
        found[f"test/{name}"] = run.scalar(f"test_{name}")[1]
    return found


def frozen(full: Tensor, run: Any, given: ClassificationTask) -> dict[str, Numbers]:
    """Losses of kernel gradient descent with the first kernel (KGD), also at the rate of the last norm (aKGD).

    Once with the whole kernel between all outputs (P, P, C, C), which is what the network would do if nothing moved,
    and once with one kernel for all outputs, their mean, as is the custom.
    """
    steps, f = torch.as_tensor(run.arrays["outputs"]), outputs(run).to(full.device)
    first, last = (torch.as_tensor(run.array("kernel", int(steps[i]))["mean"]).to(full.device) for i in (0, -1))
    faster = float(last.norm() / first.norm())
    found: dict[str, Numbers] = {"stability": given.rate * float(torch.linalg.eigvalsh(last)[-1])}
    found["early_error"], losses = predicted(full, given.y, steps, f, given.rate, faster)
    found["kgd"], found["akgd"] = losses
    for name, rate in (("mean_kgd", given.rate), ("mean_akgd", faster * given.rate)):
        path = fl.dynamics.kernel_descent(first, given.y, times=steps, rate=rate, f0=f[0])
        found[name] = path.loss / given.y.numel()
    return found


def predicted(
    full: Tensor, y: Tensor, steps: Tensor, f: Tensor, rate: float, faster: float
) -> tuple[list[float], list[Tensor]]:
    """What a frozen kernel (P, P, C, C) makes of the outputs f (T, P, C) that the network had at `steps`.

    The flow of Shan & Bordelon 2021a, Eq. 3, from f in place of 0. First the errors: started at each moment but the
    last, how far the loss at the end is off, |ln of their ratio|. Then its losses from the start, at the rate and at
    `faster` times the rate.
    """
    size = y.numel()
    matrix, targets = full.transpose(1, 2).reshape(size, size), y.reshape(size, 1).double()
    left = (steps[-1] - steps).double()
    times, places = torch.cat([left, steps.double(), faster * steps.double()]).unique(return_inverse=True)
    # every start is a column of its own: the kernel is decomposed once
    starts = f.reshape(len(steps), size).T
    path = fl.dynamics.kernel_descent(matrix, targets.expand_as(starts), times=times, rate=rate, f0=starts).outputs
    to_the_end, own, rescaled = places.view(3, -1).to(path.device)
    column = torch.arange(len(steps), device=path.device)
    ends, own, rescaled = (  # (T,) losses
        (path[at, :, start] - targets[:, 0]).square().mean(1)
        for at, start in ((to_the_end, column), (own, 0), (rescaled, 0))
    )
    return (ends / ends[-1]).log().abs()[:-1].tolist(), [own, rescaled]


MNIST = Experiment(
    id="000/mnist",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(data="digits", samples=60, test_samples=40, width=50, steps=100, growth=1.6, few=10),
            seeds=1,
            seconds=3,
            mebibytes=50,
        ),
        Scale.LAPTOP: Size(setup=Setup(samples=200, test_samples=150, steps=2000), seeds=5, seconds=80, mebibytes=400),
        Scale.PAPER: Size(setup=Setup(growth=1.5), seeds=5, seconds=150, mebibytes=8000, device="cuda"),
    },
    measure=measure,
    paper_seeds=5,
)
