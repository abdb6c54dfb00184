"""Two-layer linear networks along both phases of learning: the experiments behind Atanasov et al. 2022, Fig. 2, C.1.

The kernel is x^T M x'. Its norm of a linear function w . x is w^T M^-1 w, whose level sets the figures show in a plane.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import BLUE, ORANGE, WIDTH
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.silence import first


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Fewer samples than inputs, a linear teacher of length s = 1, loss 1/(2P) sum (f - y)^2."""

    samples: int = 20
    inputs: int = 30
    width: int = 300
    sigma: float = 1e-3
    """weights are N(0, sigma^2 / fan_in)"""
    decay: float = 0.0
    """eigenvalues of X^T X / P go as k^-decay, with mean 1; 0 is whitened"""
    lr: float = 0.01
    time: float = 12.0
    """lr times steps"""
    moments: int = 120
    """at which the network is measured"""
    silence: float = 2.0
    """the moment that stands for the end of phase I, in units of 1 / (s |Sigma beta|)"""

    @property
    def stride(self) -> int:
        """Steps between measurements."""
        return round(self.time / self.lr / self.moments)


@dataclass(frozen=True)
class Task:
    """A training set, and the plane in which level sets are drawn."""

    X: Tensor
    """(P, D)"""
    y: Tensor
    covariance: Tensor
    """Sigma = X^T X / P (D, D)"""
    beta: Tensor
    """(D,), the interpolator of least norm, of length 1"""
    tilted: Tensor
    """(D,), the direction of Sigma beta"""
    plane: Tensor
    """(2, D), orthonormal: beta, and across it that of Sigma beta, or one that no input has where they are equal"""


def task(setup: Setup, generator: torch.Generator) -> Task:
    """The teacher has equally large parts, of random signs, along all principal components of the inputs."""
    count = setup.samples
    left, _, directions = torch.linalg.svd(
        torch.randn(count, setup.inputs, generator=generator, dtype=torch.float64), full_matrices=True
    )
    values = torch.arange(1, count + 1, dtype=torch.float64) ** -setup.decay
    values = values / values.mean()
    X = (left * (count * values).sqrt()) @ directions[:count]
    signs = torch.randint(2, (count,), generator=generator, dtype=torch.float64) * 2 - 1
    beta = signs @ directions[:count] / count**0.5
    covariance = X.T @ X / count
    tilted = covariance @ beta
    tilted = tilted / tilted.norm()
    across = tilted - (tilted @ beta) * beta if setup.decay else directions[count]
    return Task(X, X @ beta, covariance, beta, tilted, torch.stack([beta, across / across.norm()]))


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """The network along training: function, kernel and loss; and what theory says of the kernel at three moments."""
    given = task(setup, context.generator())
    model = MLP(
        setup.inputs,
        None,
        width=setup.width,
        hidden_layers=1,
        activation="linear",
        weight_variance=setup.sigma**2,
        generator=context.generator(1),
    ).double()
    W0, a0 = (weight.detach().clone() for weight in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.lr)
    axes = torch.eye(setup.inputs, dtype=torch.float64)
    found: dict[str, list[Tensor]] = {}
    for step in range(setup.moments * setup.stride + 1):
        residual = model(given.X) - given.y
        if step % setup.stride == 0:
            with torch.no_grad():
                function = model(axes)
            now = {
                "loss": residual.detach().square().sum() / given.y.square().sum(),
                "position": given.plane @ function,
            }
            for name, value in (now | shape(fl.ntk(model, axes, dtype=torch.float64), given)).items():
                found.setdefault(name, []).append(value)
            context.progress(step, setup.moments * setup.stride, loss=float(now["loss"]))
        optimizer.zero_grad()
        (residual.square().mean() / 2).backward()
        optimizer.step()
    times = setup.lr * setup.stride * torch.arange(setup.moments + 1, dtype=torch.float64)
    silent = setup.silence / float((given.covariance @ given.beta).norm())
    theory = torch.stack([shape(M, given)["form"] for M in theory_kernels(W0, a0[0], given, silent)])
    return {
        "times": times,
        "silent": silent,
        "theory": theory,
        "slant": given.beta @ given.tilted,
        "size": (given.covariance @ given.beta).norm(),
        **{name: torch.stack(values) for name, values in found.items()},
    }


def shape(M: Tensor, given: Task) -> dict[str, Tensor]:
    """Of a kernel matrix (D, D), whatever its size.

    `form` (2, 2): M^-1 in the plane, 1 at (beta, beta). `along` and `along_tilted`: cosines of its first eigenvector
    with beta and Sigma beta. `spike`: its first eigenvalue over the mean of the others.
    """
    values, vectors = torch.linalg.eigh(M)
    form = given.plane @ torch.linalg.solve(M, given.plane.T)
    return {
        "form": form / form[0, 0],
        "along": (vectors[:, -1] @ given.beta).abs(),
        "along_tilted": (vectors[:, -1] @ given.tilted).abs(),
        "spike": values[-1] / values[:-1].mean(),
    }


def theory_kernels(W0: Tensor, a0: Tensor, given: Task, silent: float) -> tuple[Tensor, Tensor, Tensor]:
    """M at the start, in the silent phase with its initial weights, and at the end, s (beta beta^T + 1)."""
    early = fl.theory.deep_linear.early_kernel([0.0, silent], W0, a0, given.beta, 1.0, covariance=given.covariance)
    end = torch.outer(given.beta, given.beta) + torch.eye(len(given.beta), dtype=torch.float64)
    return early[0], early[1], end


def at(runs: Runs, curve: Array, when: Any) -> Array:
    """(S,): curves (S, T) at a time, one for all or one for each seed."""
    moments = numpy.broadcast_to(when, len(runs))
    return numpy.array([numpy.interp(t, runs["times"][0], row) for t, row in zip(moments, curve, strict=True)])


def time_of_loss(runs: Runs, share: float) -> Array:
    """(S,): when so much of the first loss is left."""
    return numpy.array([first(runs["times"][0], row, share, "initial") for row in runs["loss"]])


def silent_index(runs: Runs) -> int:
    """Of the moment nearest to the end of phase I, in the first seed."""
    return int(abs(runs["times"][0] - runs["silent"][0]).argmin())


def gained(curve: Array) -> Array:
    """(S, T): how much of its way from start to end a curve has made."""
    share: Array = (curve - curve[:, :1]) / (curve[:, -1:] - curve[:, :1])
    return share


def elongation(forms: Array) -> Array:
    """(...): longest over shortest axis of the ellipses w^T form w = const, forms (..., 2, 2); 1 for circles."""
    values = numpy.linalg.eigvalsh(forms)
    longest: Array = (values[..., 1] / values[..., 0]) ** 0.5
    return longest


def form_difference(measured: Array, theory: Array) -> Array:
    """(...): of two forms (..., 2, 2), relative to the theory's, Frobenius."""
    difference: Array = numpy.linalg.norm(measured - theory, axis=(-2, -1)) / numpy.linalg.norm(theory, axis=(-2, -1))
    return difference


def ellipse(form: Array, level: float) -> tuple[Array, Array]:
    """The line w^T form w = level^2."""
    angles = numpy.linspace(0, 2 * numpy.pi, 49)
    circle = numpy.stack([numpy.cos(angles), numpy.sin(angles)])
    x, y = level * numpy.linalg.solve(numpy.linalg.cholesky(form).T, circle)
    return x, y


LEVELS = (0.33, 0.67, 1.0, 1.33)
"""of the norm of the solution"""


def plane_panels(titles: Sequence[str], runs: Runs) -> tuple[Any, list[Any], Any]:
    """A figure, three panels with level sets (start, end of phase I, end), and a wide one below them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplot_mosaic([["a", "b", "c"], ["d", "d", "key"]], height_ratios=(5, 4))
    squares = [axes[name] for name in "abc"]
    moments = (0, silent_index(runs), len(runs["times"][0]) - 1)
    for ax, i, theory in zip(squares, moments, runs["theory"][0], strict=True):
        _draw_levels(ax, runs, i, theory)
        ax.plot(*runs["position"][:, i].T, "o", color=BLUE, markersize=4, label="network", zorder=5)
        ax.set(xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), xlabel=r"$w \cdot \beta$", xticks=(-1, 0, 1), yticks=(-1, 0, 1))
        ax.set_aspect("equal")
        ax.set_title(f"t = {runs['times'][0, i]:.2g}", loc="right")
    squares[0].set_ylabel(r"$w \cdot v$")
    axes["key"].set_axis_off()
    for name, title in zip("abcd", titles, strict=True):
        axes[name].set_title(title, loc="left", fontweight="bold")
    return figure, squares, axes["d"]


def add_key(figure: Any, squares: list[Any]) -> None:
    """What the lines of the squares are, in the empty place below the last of them."""
    key = next(ax for ax in figure.axes if ax.get_label() == "key")
    key.legend(*squares[0].get_legend_handles_labels(), loc="upper right")


def _draw_levels(ax: Any, runs: Runs, i: int, theory: Array) -> None:
    """Level sets at the moment i: of every seed, and the theory's of the first."""
    for level in LEVELS:
        last = level == LEVELS[-1]
        for seed, form in enumerate(runs["form"][:, i]):
            label = "norm of kernel, each seed" if last and seed == 0 else f"_norm {level:g}, seed {seed}"
            ax.plot(*ellipse(form, level), color=ORANGE, linewidth=0.9, label=label)
        label = "theory, first seed" if last else f"_theory, norm {level:g}"
        ax.plot(*ellipse(theory, level), color="black", linestyle=(0, (2, 3)), linewidth=1.2, label=label)


EXPERIMENTS = {
    name: Experiment(
        id=f"002/{name}",
        sizes={
            Scale.SMOKE: Size(
                setup=replace(setup, samples=8, inputs=12, width=120, lr=4 * setup.lr, moments=setup.moments // 2),
                seeds=1,
                seconds=3,
                mebibytes=10,
            ),
            Scale.LAPTOP: Size(setup=setup, seeds=3, seconds=10, mebibytes=20),
            Scale.PAPER: Size(setup=replace(setup, lr=setup.lr / 4), seeds=10, seconds=30, mebibytes=20),
        },
        measure=measure,
    )
    for name, setup in {"phases": Setup(), "phases-anisotropic": Setup(decay=1.0, time=36.0, moments=180)}.items()
}
