"""Shan & Bordelon 2021a, Fig. 1.

A network learns faster than its first kernel, because its kernel aligns with the task.
"""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

import featlearn as fl
from featlearn.papers.claims import Claim
from featlearn.papers.context import Context
from featlearn.papers.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, curve, panels
from featlearn.papers.models import MLP
from featlearn.papers.paper_000 import acceleration
from featlearn.papers.reproduction import Reproduction, Size
from featlearn.papers.runs import Numbers, Runs
from featlearn.papers.scale import Scale

CHANNEL = 3
"""the output whose kernel panel F follows"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Shan & Bordelon 2021b, App. E.2, with the same network.

    One-hot targets, full batch, loss averaged over samples and outputs.
    """

    data: str = "mnist"
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
        found = [0, 1]
        while found[-1] < self.steps:
            found.append(min(self.steps, max(found[-1] + 1, round(found[-1] * self.growth))))
        return found


@dataclass(frozen=True, kw_only=True)
class ClassificationTask:
    """Inputs and one-hot targets, for training and held out, on the device; and how fast outputs move."""

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
    (x, y), test = ((each.x.to(context.device), each.one_hot().to(context.device)) for each in parts)
    rate = fl.dynamics.rate(setup.lr, "mean-over-outputs", setup.samples, y.shape[1])
    return ClassificationTask(x=x, y=y, test=test, rate=rate)


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """The same network, from the same weights, on squared error and on cross-entropy, beside its frozen kernels."""
    given = task(setup, context)
    x, y, rate = given.x, given.y, given.rate
    # cross-entropy has the learning rate that moves outputs as fast as squared error does
    losses: dict[str, tuple[Callable[..., Tensor], float]] = {
        "mse": (mse_loss, setup.lr),
        "ce": (cross_entropy, rate * setup.samples),
    }
    found: dict[str, Numbers] = {}
    for name, (loss, lr) in losses.items():
        model = MLP(
            x.shape[1], y.shape[1], width=setup.width, hidden_layers=setup.hidden_layers, parametrization="ntk",
            weight_variance=(1.0, 2.0, 1.0), generator=context.generator(2),
        ).to(context.device)  # fmt: skip
        first = fl.ntk(model, x, outputs="full")
        with tempfile.TemporaryDirectory(dir=context.folder) as folder:
            run = trained(model, given, loss, lr, setup, context, Path(folder) / name)
            steps, f = torch.as_tensor(run.arrays["outputs"]), outputs(run).to(context.device)
            numbers = curves(run) | (frozen(first, run, given) if name == "mse" else {})
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
    model: torch.nn.Module, given: ClassificationTask, loss: Callable[..., Tensor], lr: float, setup: Setup,
    context: Context, out: Path,
) -> Any:  # fmt: skip
    """The run of gradient descent, with kernels at the moments."""

    def classes(view: Any) -> dict[str, float]:
        """How the kernel of one output is aligned with each target, and how much outputs interfere."""
        aligned = fl.metrics.class_alignment(view.kernel_each, view.targets)[CHANNEL]
        centered = fl.metrics.class_alignment(view.kernel_each, view.targets, centered=True)[CHANNEL]
        full = fl.ntk(view.model, view.x[: setup.few], outputs="full")
        return {
            **{f"channel/{target}": float(value) for target, value in enumerate(aligned)},
            **{f"centered_channel/{target}": float(value) for target, value in enumerate(centered)},
            "interference": float(fl.metrics.interference(full).off_diagonal_share),
        }

    moments, optimizer = set(setup.moments), torch.optim.SGD(model.parameters(), lr=lr)
    with fl.watch(
        model, (given.x, given.y), out, every=moments.__contains__, budget=None, test=given.test,
        quantities=["kernel", "test", classes],
    ) as watch:  # fmt: skip
        for step in range(1, setup.steps + 1):
            optimizer.zero_grad()
            value = loss(model(given.x), given.y)
            value.backward()
            optimizer.step()
            watch.step(loss=value.detach())
            if step in moments:
                context.progress(step, setup.steps, loss=float(value.detach()))
    return watch.run


def outputs(run: Any) -> Tensor:
    """(T, P, C) on the training samples."""
    return torch.stack([torch.as_tensor(run.array("outputs", step)["f"]).double() for step in run.arrays["outputs"]])


def curves(run: Any) -> dict[str, Numbers]:
    """Numbers at the moments, both losses, and the spectra of the first and of the last kernel."""
    f, y = outputs(run), torch.as_tensor(run.array("targets", 0)["y"]).double()
    ends = [run.array("spectrum", run.arrays["spectrum"][i]) for i in (0, -1)]
    found: dict[str, Numbers] = {
        "steps": run.arrays["outputs"],
        "loss": (f - y).square().mean((1, 2)),
        "cross_entropy": -(y * f.log_softmax(2)).sum(2).mean(1),
        "interference": run.scalar("interference")[1],
        "accuracy": run.scalar("test/accuracy")[1],
        "eigenvalues": numpy.stack([end["eigenvalues"] for end in ends]),
        "task_power": numpy.stack([end["task_power"] for end in ends]),
    }
    for name in ("channel", "centered_channel"):
        found[name] = numpy.stack([run.scalar(f"{name}/{target}")[1] for target in range(y.shape[1])], 1)
    for name in ("alignment", "centered_alignment", "norm", "test/alignment", "test/centered_alignment"):
        found[name] = run.scalar(f"ntk/{name}")[1]
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


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """See `acceleration`."""
    return acceleration.claims(setup.window, CHANNEL, runs)


def plot(setup: Setup, runs: Runs) -> Any:
    """The six panels of the paper, and six beyond the print."""
    titles = ("A", "B", "C", "D", "E", "F", "local exponent", "the late kernel", "held-out kernel", "cross-entropy",
              "its alignment", "interference")  # fmt: skip
    figure, axes = panels(4, 3, height=1.75, titles=titles)
    steps = runs["mse/steps"][0] + 0.5  # step 0 has a place on a logarithmic axis
    _draw_paper(setup, runs, steps, axes)
    _draw_beyond(runs, steps, axes[6:])
    for ax in (*axes[:3], *axes[5:]):
        ax.set(xscale="log", xlabel="step")
    for ax in axes:
        ax.legend(fontsize=6)
    for ax in (axes[1], axes[5], axes[8], axes[10]):  # no place is free: room above the curves
        low, high = ax.get_ylim()
        ax.set_ylim(low, high + 0.4 * (high - low))
        ax.legend(fontsize=6, loc="upper left")
    return figure


def _draw_paper(setup: Setup, runs: Runs, steps: Any, axes: list[Any]) -> None:
    for name, label, colour, style in (
        ("loss", "NN", ORANGE, "-"), ("kgd", "KGD", BLUE, "-"), ("akgd", "aKGD", GREEN, "-"),
        ("mean_kgd", "KGD, mean kernel", BLUE, ":"), ("mean_akgd", "aKGD, mean kernel", GREEN, ":"),
    ):  # fmt: skip
        curve(axes[0], steps, runs[f"mse/{name}"] if style == "-" else runs[f"mse/{name}"].mean(0), label,
              colour=colour, style=style)  # fmt: skip
    axes[0].set(yscale="log", ylabel="loss")
    curve(axes[1], steps, runs["mse/alignment"], "NN", colour=ORANGE)
    curve(axes[1], steps, numpy.full_like(steps, runs["mse/alignment"][:, 0].mean()), "KGD, aKGD", colour=BLUE)
    curve(axes[1], steps, runs["mse/centered_alignment"], "NN, centred", colour=ORANGE, style="--")
    axes[1].set_ylabel("kernel-task alignment")
    curve(axes[2], steps, runs["mse/norm"], r"$|K|_F$", colour=ORANGE)
    axes[2].set_ylabel("norm of the kernel")
    shown = numpy.unique(numpy.geomspace(1, setup.samples, 60).astype(int))
    for ax, name, label in ((axes[3], "eigenvalues", r"$\lambda_k$"), (axes[4], "task_power", r"$(u_k \cdot y)^2$")):
        fits = acceleration.exponents(setup.window, runs, f"mse/{name}").mean(0)
        letter = "b" if name == "eigenvalues" else "a"
        for end, colour in enumerate((BLUE, ORANGE)):
            values = numpy.maximum(runs[f"mse/{name}"][:, end][:, shown - 1], 1e-12)
            curve(ax, shown, values, f"{('before', 'after')[end]}, ${letter}$ = {fits[end]:.2f}", colour=colour)
        ax.set(xscale="log", yscale="log", xlabel="k", ylabel=label)
    targets = runs["mse/channel"].shape[2]
    for target in range(targets):
        own = target == CHANNEL
        values = runs["mse/channel"][:, :, target]
        label = f"target {target}" if own else "other targets" if target == 0 else f"_target {target}"
        curve(axes[5], steps, values if own else values.mean(0), label, colour=ORANGE if own else GREY,
              linewidth=1.5 if own else 0.7)  # fmt: skip
    axes[5].set_ylabel(f"alignment of $K^{{{CHANNEL},{CHANNEL}}}$")


def _draw_beyond(runs: Runs, steps: Any, axes: list[Any]) -> None:
    for name, label, colour in (("loss", "NN", ORANGE), ("kgd", "KGD", BLUE), ("akgd", "aKGD", GREEN)):
        curve(axes[0], steps[1:], acceleration.slopes(runs, f"mse/{name}")[:, 1:], label, colour=colour)
    axes[0].set_ylabel("d ln loss / d ln step")
    curve(axes[1], steps[:-1], runs["mse/late_error"], "last kernel", colour=ORANGE)
    curve(axes[1], steps[:-1], runs["mse/early_error"], "first kernel", colour=BLUE)
    axes[1].axhline(acceleration.ENOUGH, color=BLACK, linestyle=":", label="_enough")
    axes[1].set(yscale="log", ylabel="error in ln final loss")
    curve(axes[2], steps, runs["mse/test/alignment"], "held out", colour=PINK)
    curve(axes[2], steps, runs["mse/alignment"], "training", colour=ORANGE)
    axes[2].set_ylabel("kernel-task alignment")
    curve(axes[3], steps, runs["ce/cross_entropy"], "NN", colour=SKY)
    curve(axes[3], steps, runs["ce/kgd"], "KGD", colour=BLUE)
    axes[3].set(yscale="log", ylabel="cross-entropy")
    for name, label, colour in (("mse", "squared error", ORANGE), ("ce", "cross-entropy", SKY)):
        curve(axes[4], steps, runs[f"{name}/alignment"], label, colour=colour)
        curve(axes[5], steps, runs[f"{name}/interference"], label, colour=colour)
    curve(axes[4], steps, runs["ce/test/alignment"], "cross-entropy, held out", colour=SKY, style="--")
    axes[4].set_ylabel("kernel-task alignment")
    axes[5].set_ylabel("share between outputs")


FIG_1 = Reproduction(
    id="000/fig1",
    about=(
        "A network with two hidden layers of 500 ReLUs on MNIST beside gradient descent with its first kernel frozen "
        "(KGD), and the same at the rate of the last kernel's norm (aKGD). Sizes, learning rate and loss are those "
        "that Shan & Bordelon 2021b, App. E.2, give for the same network; the paper says neither how long it trains "
        "nor how weights are parametrised: here in the NTK way with variances 1, 2, 1, without which the rate of 20 "
        "diverges, for 10000 steps (2000, and 200 samples, at laptop scale), pixels from 0 to 1. Frozen kernels start "
        "from the network's own outputs and join all pairs of outputs; dotted, one mean kernel for all outputs, which "
        "leaves the interference of a finite network out. The last six panels are beyond the print: the local exponent "
        "of the loss, the moment from which the last kernel predicts the rest, the kernel of held-out samples, and "
        "cross-entropy from the same weights at the same rate of outputs, with the share of the kernel that lies "
        "between different outputs."
    ),
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(data="digits", samples=60, test_samples=40, width=50, steps=100, growth=1.6, few=10),
            seeds=1, seconds=3, mebibytes=50,
        ),
        Scale.LAPTOP: Size(
            setup=Setup(samples=200, test_samples=150, steps=2000), seeds=3, seconds=80, mebibytes=400
        ),
        Scale.PAPER: Size(setup=Setup(growth=1.5), seeds=5, seconds=150, mebibytes=8000, device="cuda"),
    },
    measure=measure,
    plot=plot,
    claims=claims,
)  # fmt: skip
