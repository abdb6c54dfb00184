"""Atanasov et al. 2022, Fig. F.1.

How well a kernel that has aligned with one task learns another: theory, simulated regressions, and trained networks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

import featlearn as fl
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import COLORS, GRAY, curve, panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.linear_networks import random_weights, rising


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Inputs N(0, 1) in D dimensions, a new task w . x, |w| = 1, w . beta = overlap; regression without ridge."""

    dimension: int = 60
    samples: tuple[int, ...] = (5, 10, 20, 30, 40, 50, 55)
    """P of panels a, b and d"""
    fixed: int = 20
    """P of panel c, and of comparisons; one of `samples`"""
    spikes: tuple[float, ...] = (0.0, 1.0, 3.0, 10.0, 30.0)
    """A of panels a and c"""
    overlaps: tuple[float, ...] = (0.0, 0.5, 0.75, 1.0)
    """of panels b and c"""
    overlap: float = 0.75
    """of panels a and d"""
    draws: int = 50
    """training sets for each point"""
    depths: tuple[int, ...] = (2, 3, 4)
    """of the linear networks that are trained on beta from small weights"""
    width: int = 120
    sigma: float = 0.03


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Errors: (spikes, P), (overlaps, P), (spikes, overlaps); of final kernels (depths, P), of probes (layers, P)."""
    spectrum = fl.theory.transfer.transfer_spectrum

    def error(samples: int, eigenvalues: Tensor, coefficients: Tensor) -> float:
        """The same training sets for all kernels and tasks, so that differences are theirs."""
        drawn = context.generator(samples)
        return float(
            fl.theory.transfer.simulate(samples, eigenvalues, coefficients, draws=setup.draws, generator=drawn).value
        )

    D = setup.dimension
    found: dict[str, Numbers] = {
        "spikes": [[error(P, *spectrum(D, A, setup.overlap)) for P in setup.samples] for A in setup.spikes],
        "overlaps": [[error(P, *spectrum(D, 1.0, alpha)) for P in setup.samples] for alpha in setup.overlaps],
        "both": [[error(setup.fixed, *spectrum(D, A, alpha)) for alpha in setup.overlaps] for A in setup.spikes],
    }
    context.say("simulated")
    kernels, layers, w = trained(setup, context)
    found["strength"] = torch.stack([spike_strength(M) for M in kernels])
    found["networks"] = [[error(P, *spectrum_of(M, w)) for P in setup.samples] for M in kernels]
    found["probes"] = [[error(P, *spectrum_of(M, w)) for P in setup.samples] for M in layers]
    found["probe_strength"] = torch.stack([spike_strength(M) for M in layers])
    found["probe_theory"] = torch.stack(
        [fl.theory.transfer.learning_curve_general(list(setup.samples), *spectrum_of(M, w)).error for M in layers]
    )
    return found


def trained(setup: Setup, context: Context) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """M (D, D) of the final kernel of each depth, those of the hidden layers of the deepest, and the new task (D,)."""
    generator, size = context.generator(), setup.dimension
    left, _ = torch.linalg.qr(torch.randn(2 * size, size, generator=generator, dtype=torch.float64))
    X = (2 * size) ** 0.5 * left
    beta, across = torch.linalg.qr(torch.randn(size, 2, generator=generator, dtype=torch.float64))[0].T
    kernels = []
    for depth in setup.depths:
        weights = random_weights(size, setup.width, depth, setup.sigma, context.generator(1))
        end = 2.5 * float(fl.theory.deep_linear.half_time(1.0, setup.sigma**depth, depth)) + 10
        path = fl.theory.deep_linear.flow(weights, X, X @ beta, times=[0.0, end], rate=1 / len(X))
        kernels.append(path.metrics(path.times)[1])
        context.say(f"trained L={depth}, loss {float(path.loss[1] / path.loss[0]):.2g}")
    assert path.layers is not None
    features, grams = torch.eye(size, dtype=torch.float64), []
    for layer in path.layers[:-1]:
        features = layer[1] @ features
        grams.append(features.T @ features)
    return kernels, grams, setup.overlap * beta + (1 - setup.overlap**2) ** 0.5 * across


def spectrum_of(M: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, the mean of all but the first 1, and coefficients of the task w, of the kernel x^T M x'."""
    values, vectors = torch.linalg.eigh(M)
    return values.clamp(min=0) / values[:-1].mean(), vectors.T @ w


def spike_strength(M: Tensor) -> Tensor:
    """A: the first eigenvalue over the mean of the others, less 1."""
    values = torch.linalg.eigvalsh(M)
    strength: Tensor = values[-1] / values[:-1].mean() - 1
    return strength


def theory(setup: Setup, samples: Any, spike: Any, overlap: Any) -> Array:
    """E_g of the corrected formula."""
    curve = fl.theory.transfer.learning_curve(
        torch.as_tensor(numpy.asarray(samples, float)),
        setup.dimension,
        torch.as_tensor(numpy.asarray(spike, float)),
        torch.as_tensor(numpy.asarray(overlap, float)),
    )
    return numpy.asarray(curve.error)


def formulas(setup: Setup) -> dict[str, Array]:
    """What `measure` gives under the same names, from the formula; networks with A = L - 1."""
    A, alpha, L = (numpy.array(each)[:, None] for each in (setup.spikes, setup.overlaps, setup.depths))
    return {
        "spikes": theory(setup, setup.samples, A, setup.overlap),
        "overlaps": theory(setup, setup.samples, 1.0, alpha),
        "both": theory(setup, setup.fixed, A, setup.overlaps),
        "networks": theory(setup, setup.samples, L - 1, setup.overlap),
    }


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The caption, the sentences of App. F, its formula, and its words on networks and probes."""
    wanted, at = formulas(setup), setup.samples.index(setup.fixed)
    few = [i for i, P in enumerate(setup.samples) if setup.dimension / 3 >= P]
    yield from _overlays(setup, runs, wanted)
    yield Claim(
        id="few-samples",
        claim="At small P larger A gives lower errors on a task with overlap 0.75 (a), up to P = D/3",
        paper="yes",
        values=rising(-runs["spikes"][:, :, few], 1),
        band=(1, None),
        band_from="print",
    )
    yield Claim(
        id="overlap",
        claim="At A = 1 tasks of larger overlap are easier (b), at every P",
        paper="yes",
        values=rising(-runs["overlaps"], 1),
        band=(1, None),
        band_from="print",
    )
    lowest = runs["both"].reshape(len(runs), -1).argmin(1) == runs["both"][0].size - 1
    yield Claim(
        id="lowest",
        claim="The error is lowest where A and the overlap are both largest (c)",
        paper="yes",
        values=lowest,
        band=(1, None),
        band_from="print",
    )
    yield Claim(
        id="same-task",
        claim="If w = beta, increasing A strictly decreases the error (App. F)",
        paper="yes",
        values=rising(-runs["both"][:, :, -1]),
        band=(1, None),
        band_from="print",
    )
    kappa = fl.theory.transfer.learning_curve(setup.fixed, setup.dimension, 1.0, setup.overlap).effective_ridge
    i = setup.spikes.index(1.0)
    yield Claim(
        id="printed",
        claim="Eq. 70 as printed: simulated error over it at A = 1, P = 20",
        paper=1.0,
        values=runs["spikes"][:, i, at] / (wanted["spikes"][i, at] / float(kappa) ** 2),
        band=(0.9, 1.1),
        band_from="print",
        known="Eq. 67 and 70 lost kappa^2: without it the error for P = 0 is not |w|^2.",
    )
    yield from _networks(setup, runs, wanted)


def _overlays(setup: Setup, runs: Runs, wanted: dict[str, Array]) -> Iterable[Claim]:
    for name, panel in (("spikes", "a"), ("overlaps", "b"), ("both", "c")):
        yield Claim(
            id=f"theory-{panel}",
            claim=f"Simulated regressions lie on the formula, corrected ({panel}): largest "
            "difference, where the error without learning is 1",
            paper="overlay",
            values=abs(runs[name] - wanted[name]).max((1, 2)),
            band=(None, 0.05),
            band_from="trial",
            why="2.5 % at P = 20, up to 9 % near P = D are known for D = 60: the formula is that of many dimensions.",
        )


def _networks(setup: Setup, runs: Runs, wanted: dict[str, Array]) -> Iterable[Claim]:
    at, depths = setup.samples.index(setup.fixed), numpy.array(setup.depths)
    yield Claim(
        id="strength",
        claim="Depth sets A (App. F): A of final kernels over L - 1, largest distance from 1",
        paper="A(L)",
        values=abs(runs["strength"] / (depths - 1) - 1).max(1),
        band=(None, 0.05),
        band_from="theory",
        why="Small weights; sigma is 0.03.",
    )
    yield Claim(
        id="networks",
        claim="Regression with the final kernels of networks lies on the formula with A = L - 1: largest difference",
        paper="overlay",
        values=abs(runs["networks"] - wanted["networks"]).max((1, 2)),
        band=(None, 0.05),
        band_from="trial",
        why="As for a.",
    )
    isotropic = runs["spikes"][:, setup.spikes.index(0.0), at]
    yield Claim(
        id="transfer",
        claim="Final kernels of deeper networks transfer better, all better than x . x': at P = 20",
        paper="yes",
        values=rising(-numpy.concatenate([isotropic[:, None], runs["networks"][:, :, at]], axis=1)),
        band=(1, None),
        band_from="print",
    )
    probes = runs["probes"][:, :, at]
    single = theory(setup, setup.fixed, runs["probe_strength"], setup.overlap)
    own = runs["probe_theory"][:, :, at]
    yield Claim(
        id="probes",
        claim="A linear probe on a hidden layer is regression with Eq. 65 and an A of its own: error over "
        "formula at P = 20, largest distance from 1",
        paper="yes",
        values=abs(probes / single - 1).max(1),
        band=(None, 0.1),
        band_from="choice",
        least=Scale.LAPTOP,
        why=f"A of the layers is {runs['probe_strength'].mean(0).round(0).tolist()}: they have rank one but for what "
        "is left of their initial weights, which is not isotropic.",
        choices=[
            Choice(
                made="one A for a layer",
                other="all eigenvalues of the layer (Eq. 67)",
                values=abs(probes / own - 1).max(1),
            )
        ],
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """Panels a to c; d, trained networks, is ours. Lines are the formula, points means over training sets."""
    figure, axes = panels(
        2,
        2,
        height=2.5,
        titles=(f"a  α = {setup.overlap:g}", "b  A = 1", f"c  P = {setup.fixed}", "d  networks (not in the paper)"),
    )
    P = numpy.linspace(1, setup.dimension, 60)
    for i, A in enumerate(setup.spikes):
        curve(axes[0], P, theory(setup, P, A, setup.overlap), f"_formula, A = {A:g}", color=COLORS[i])
        curve(axes[0], setup.samples, runs["spikes"][:, i], f"A = {A:g}", color=COLORS[i], style="o")
    for i, alpha in enumerate(setup.overlaps):
        curve(axes[1], P, theory(setup, P, 1.0, alpha), f"_formula, α = {alpha:g}", color=COLORS[i])
        curve(axes[1], setup.samples, runs["overlaps"][:, i], f"α = {alpha:g}", color=COLORS[i], style="o")
        above = numpy.geomspace(1, 1 + max(setup.spikes), 40)
        formula = theory(setup, setup.fixed, above - 1, alpha)
        curve(axes[2], above, formula, f"_formula, α = {alpha:g}", color=COLORS[i])
        curve(
            axes[2],
            1 + numpy.array(setup.spikes),
            runs["both"][:, :, i],
            f"α = {alpha:g}",
            color=COLORS[i],
            style="o",
        )
    for i, depth in enumerate(setup.depths):
        curve(axes[3], P, theory(setup, P, depth - 1, setup.overlap), f"_formula, L = {depth}", color=COLORS[i])
        curve(axes[3], setup.samples, runs["networks"][:, i], f"final NTK, L = {depth}", color=COLORS[i], style="o")
    for layer in range(runs["probes"].shape[1]):
        label, color = f"probe, layer {layer + 1} of {setup.depths[-1]}", COLORS[len(setup.depths) + layer]
        curve(axes[3], setup.samples, runs["probes"][:, layer], label, color=color, style="s--", linewidth=0.7)
    curve(axes[3], P, theory(setup, P, 0.0, setup.overlap), "x · x'", color=GRAY, style=":")
    for ax in (axes[0], axes[1], axes[3]):
        ax.set(xlabel="P", ylabel=r"$E_g$", xlim=(0, setup.dimension + 1))
    axes[2].set(xscale="log", xlabel="1 + A", ylabel=r"$E_g$")
    for ax in axes:
        ax.legend()
    return figure


EXPERIMENT = Experiment(
    id="002/figF1",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(
                dimension=24,
                samples=(4, 8, 16),
                fixed=8,
                spikes=(0.0, 1.0, 10.0),
                overlaps=(0.0, 0.75, 1.0),
                draws=60,
                depths=(2, 3),
                width=40,
            ),
            seeds=1,
            seconds=3,
            mebibytes=10,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=40, mebibytes=20),
        Scale.PAPER: Size(setup=Setup(draws=400), seeds=5, seconds=120, mebibytes=20),
    },
    measure=measure,
)

FIG_F1 = Reproduction(
    id="002/figF1",
    about=(
        "A kernel x^T (A beta beta^T + 1) x' has learned beta; it is used for regression on another linear task with "
        "overlap alpha. Lines are the formula (with kappa^2, which the print lost), points are regressions on random "
        "training sets. The paper draws the formula alone and names neither D nor the P of panel c nor the ridge: ours "
        "are 60, 20 and none. Panel d, not in the paper, uses the final tangent kernels of linear networks that were "
        "trained on beta from weights of sigma = 0.03 (A = L - 1), and linear probes on the hidden layers of the "
        "deepest, with 120 units, whose kernels have rank one but for what is left of their initial weights."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
