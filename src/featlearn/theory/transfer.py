"""Learning curves of kernel regression: what aligned features do for another task (Atanasov et al. 2022, App. F).

A kernel with eigenvalues lambda_k, <K(x, x') phi_k(x)> = lambda_k phi_k(x'), is trained on P samples of a target sum_k
a_k phi_k with label noise of variance s^2, the predictor being k(x)^T (K + ridge I)^-1 y: the ridge is added to the
Gram matrix, which is not divided by P. The average error on new inputs, without their noise, is

    E = [sum_k a_k^2 r_k^2 + s^2 g] / (1 - g),   r_k = kappa / (lambda_k P + kappa),   g = (1 / P) sum_k (1 - r_k)^2

with kappa the solution of kappa = ridge + kappa sum_k lambda_k / (lambda_k P + kappa). An average over training sets
that is exact as P and the number of modes grow together; about a percent off at a few hundred modes, up to ten percent
near P = rank or where one mode holds the task.

Errata: Atanasov et al. 2022, Eq. 67 and 70 leave out kappa^2; Eq. 68 leaves out A. Noise is not in the paper.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.linalg.estimate import Estimate
from featlearn.palette import BLUE, ORANGE
from featlearn.theory.arguments import Numbers, checked_count, checked_generator, checked_number, checked_numbers

__all__ = ["LearningCurve", "learning_curve", "learning_curve_general", "simulate", "transfer_spectrum"]


@dataclass(frozen=True, eq=False)
class LearningCurve:
    """Errors of kernel regression and their parts; all of one shape, that of the broadcast arguments."""

    samples: Tensor
    """P"""
    error: Tensor
    """The average squared error on new inputs, without their noise."""
    effective_ridge: Tensor
    """kappa: what the ridge amounts to; modes with lambda_k P far above it are learned."""
    variance_share: Tensor
    """g (gamma in Atanasov et al. 2022): the error is amplified by 1 / (1 - g), noise enters with the factor g."""

    def overlay(self, measured: Any = None, *, ax: Any = None) -> Any:
        """Draw error over samples as a line and, over it, measured errors as points; returns the matplotlib axes.

        `measured` is (samples, errors) or (samples, errors, standard errors). A curve over another parameter has no
        line: `samples` must be (P,).
        """
        if self.error.dim() != 1:
            raise InputValueError(f"the curve has shape {tuple(self.error.shape)}, expected (P,): one line at a time")
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.subplots(figsize=(3.25, 2.5), layout="constrained")[1]
        ax.plot(self.samples.tolist(), self.error.tolist(), color=BLUE, label="theory")
        if measured is not None:
            lists = [[float(v) for v in column] for column in measured]
            bars = lists[2] if len(lists) > 2 else None
            ax.errorbar(lists[0], lists[1], bars, fmt="o", color=ORANGE, markersize=3, label="measured")
        ax.set_xlabel("samples $P$")
        ax.set_ylabel("error on new inputs")
        ax.legend()
        return ax


def learning_curve(
    samples: Numbers, dimension: Numbers, spike: Numbers, overlap: Numbers, ridge: Numbers = 0.0, noise: Numbers = 0.0
) -> LearningCurve:
    """Error on a new task w of a kernel K = x^T (A beta beta^T + I) x' that has learned beta.

    See Atanasov et al. 2022, App. F, Eq. 65, 68, Fig. F.1.

    x ~ N(0, I_D); the new target is w . x with |w| = 1 and w . beta = overlap. Eigenvalues: 1 + A once, 1 for the other
    D - 1. For overlap 1 the error falls with A, for overlap 0 it rises. Without ridge and noise it is 0 for P >= D.

    All arguments are numbers or tensors that broadcast.

    Args:
        samples: P >= 0, not necessarily whole.
        dimension: D >= 1; for D = 1 the overlap must be 1 or -1.
        spike: A > -1, the strength of the learned direction; A = L - 1 for a linear network of L weight layers that has
            been trained on beta from small weights.
        overlap: -1 <= w . beta <= 1.
        ridge: >= 0, added to the diagonal of the Gram matrix.
        noise: >= 0, the variance of the label noise s^2.

    Infinite for P = D with noise and without a ridge.
    """
    P, D, A, alpha, ridge_, noise_ = torch.broadcast_tensors(
        checked_numbers(samples, "samples", least=0.0),
        checked_numbers(dimension, "dimension", least=1.0),
        checked_numbers(spike, "spike", above=-1.0),
        checked_numbers(overlap, "overlap", least=-1.0, most=1.0),
        checked_numbers(ridge, "ridge", least=0.0),
        checked_numbers(noise, "noise", least=0.0),
    )
    if bool(((D == 1) & (alpha.abs() < 1)).any()):
        raise InputValueError(f"overlap={overlap!r} in one dimension, expected 1 or -1: there is no other direction")
    values = torch.stack([1 + A, torch.ones_like(A)], -1)
    counts = torch.stack([torch.ones_like(D), D - 1], -1)
    power = torch.stack([alpha.square(), (1 - alpha) * (1 + alpha)], -1)
    return _curve(P, values, counts, power, ridge_, noise_)


def learning_curve_general(
    samples: Numbers,
    eigenvalues: Tensor,
    coefficients: Tensor,
    ridge: Numbers = 0.0,
    noise: Numbers = 0.0,
    *,
    counts: Tensor | None = None,
) -> LearningCurve:
    """Error of kernel regression for any spectrum (Atanasov et al. 2022, Eq. 66, 67, corrected).

    `samples`, `ridge` and `noise` broadcast against each other and give the shape of the result.

    Args:
        samples: P >= 0, not necessarily whole.
        eigenvalues: (M,): lambda_k >= 0. Modes of eigenvalue 0 are never learned and act as noise.
        coefficients: (M,): a_k, the target's coefficients in the orthonormal eigenfunctions; the root of the sum of
            squares for a level of several modes.
        ridge: >= 0, added to the diagonal of the Gram matrix.
        noise: >= 0, the variance of the label noise.
        counts: (M,): how many modes share each eigenvalue, one by default; M levels then stand for a spectrum of any
            size.
    """
    values, size = checked_numbers(eigenvalues, "eigenvalues", least=0.0), checked_numbers(coefficients, "coefficients")
    many = torch.ones_like(values) if counts is None else checked_numbers(counts, "counts", least=0.0)
    if values.dim() != 1 or values.shape != size.shape or values.shape != many.shape or len(values) == 0:
        raise InputValueError(
            f"eigenvalues have shape {tuple(values.shape)}, coefficients {tuple(size.shape)}, "
            f"counts {tuple(many.shape)}, expected all (M,)"
        )
    P, ridge_, noise_ = torch.broadcast_tensors(
        checked_numbers(samples, "samples", least=0.0),
        checked_numbers(ridge, "ridge", least=0.0),
        checked_numbers(noise, "noise", least=0.0),
    )
    return _curve(P, values, many, size.square(), ridge_, noise_)


def transfer_spectrum(dimension: int, spike: float, overlap: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues and coefficients (D,) of the setting of `learning_curve`, as the general functions take them.

    See Atanasov et al. 2022, App. F, Eq. 69.
    """
    dimension = checked_count(dimension, "dimension")
    alpha = checked_number(overlap, "overlap", least=-1.0, most=1.0)
    if dimension == 1 and abs(alpha) < 1:
        raise InputValueError(f"overlap={overlap!r} in one dimension, expected 1 or -1: there is no other direction")
    values = torch.ones(dimension, dtype=torch.float64)
    values[0] += checked_number(spike, "spike", above=-1.0)
    coefficients = torch.zeros(dimension, dtype=torch.float64)
    coefficients[0] = alpha
    coefficients[1:2] = math.sqrt((1 - alpha) * (1 + alpha))
    return values, coefficients


def _curve(P: Tensor, values: Tensor, counts: Tensor, power: Tensor, ridge: Tensor, noise: Tensor) -> LearningCurve:
    """P, ridge, noise (...); values, counts, power (M,) or (..., M)."""
    kappa = _effective_ridge(P, values, counts, ridge)
    positive = values > 0
    below = values * P[..., None] + kappa[..., None]
    # kappa = 0: what has an eigenvalue is learned, what has none is not
    empty = below == 0
    below = torch.where(empty, 1.0, below)
    left = torch.where(empty, 1.0, kappa[..., None] / below)  # r_k
    learned = torch.where(empty, 0.0, values / below)  # (1 - r_k) / P
    share = P * (counts * learned.square()).sum(-1)
    # 1 - g with the equation for kappa put in: a sum of positive terms
    rank = (counts * positive).sum(-1)
    remaining = (counts * left * learned).sum(-1) + torch.where(
        kappa > 0, ridge / torch.where(kappa > 0, kappa, 1.0), 0.0
    )
    unspent = torch.where(P > 0, (P - rank) / torch.where(P > 0, P, 1.0), 1.0).clamp_min(0.0)
    remaining = torch.where((kappa == 0) & (rank > 0), unspent, torch.where(kappa == 0, 1.0, remaining))
    wrong = (power * left.square()).sum(-1) + noise * share
    error = torch.where(wrong == 0, 0.0, wrong / remaining)
    return LearningCurve(P, error, kappa, share)


def _effective_ridge(P: Tensor, values: Tensor, counts: Tensor, ridge: Tensor) -> Tensor:
    """kappa = ridge + kappa sum_k n_k lambda_k / (lambda_k P + kappa), the root that is not negative.

    Divided by kappa the right side falls from infinity (or rank / P) to 0: one root, or kappa = 0 where ridge = 0 and
    P >= rank. Bisection in the logarithm, between the ridge and ridge + sum_k n_k lambda_k.
    """
    rank, trace = (counts * (values > 0)).sum(-1), (counts * values).sum(-1)
    top = ridge + trace
    solvable = (top > 0) & ((ridge > 0) | (rank > P))
    high = torch.where(solvable, top, 1.0).log()
    low = torch.where(ridge > 0, ridge, torch.where(solvable, top, 1.0) * 1e-300).clamp_min(1e-307).log()
    safe = torch.where(P > 0, P, 1.0)

    def excess(kappa: Tensor) -> Tensor:
        """Return the right side divided by kappa, less 1: two forms, each with the digits that the other loses."""
        below = values * P[..., None] + kappa[..., None]
        few = (counts * values / below).sum(-1) - 1
        many = (rank - P) / safe - (counts * (values > 0) * kappa[..., None] / below).sum(-1) / safe
        return torch.where(rank > 2 * P, few, many) + ridge / kappa

    for _ in range(60):
        middle = (low + high) / 2
        above = excess(middle.exp()) > 0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    kappa = ((low + high) / 2).exp()
    # the logarithm of a very small kappa has fewer digits than kappa: one step of Newton's method gives them back
    slope = (counts * values / (values * P[..., None] + kappa[..., None]).square()).sum(-1) + ridge / kappa / kappa
    return torch.where(solvable, kappa + excess(kappa) / slope, ridge)


def simulate(
    samples: int,
    eigenvalues: Tensor,
    coefficients: Tensor,
    ridge: float = 0.0,
    noise: float = 0.0,
    *,
    draws: int = 100,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Return the same error from kernel ridge regressions on `draws` random training sets, as an `fl.Estimate`.

    A check of Atanasov et al. 2022, App. F, that shares nothing with its formula. The eigenfunctions are M independent
    standard normal features x_k, the kernel sum_k lambda_k x_k x'_k, the target sum_k a_k x_k plus normal noise; the
    error on new inputs is then |a - a_hat|^2 exactly, without test points. Without a ridge the pseudo-inverse is taken,
    as gradient descent would.

    Args:
        samples: P, a whole number >= 1.
        eigenvalues: (M,): lambda_k >= 0, all of them: no levels.
        coefficients: (M,): a_k.
        ridge: >= 0, added to the diagonal of the Gram matrix.
        noise: >= 0, the variance of the label noise.
        draws: how many training sets.
        generator: where randomness comes from; by default the same draws at every call.
    """
    values, target = (
        checked_numbers(eigenvalues, "eigenvalues", least=0.0),
        checked_numbers(coefficients, "coefficients"),
    )
    if values.dim() != 1 or values.shape != target.shape or len(values) == 0:
        raise InputValueError(
            f"eigenvalues have shape {tuple(values.shape)} and coefficients {tuple(target.shape)}, expected both (M,)"
        )
    samples, draws = checked_count(samples, "samples"), checked_count(draws, "draws")
    size, spread = checked_number(ridge, "ridge", least=0.0), checked_number(noise, "noise", least=0.0)
    source = checked_generator(generator, seed=0)  # the data are drawn here too: nothing to be independent of
    errors = []
    for _ in range(draws):
        drawn = torch.randn(samples, len(values) + 1, dtype=torch.float64, generator=source, device=source.device)
        x = drawn[:, :-1].to(values.device)
        y = x @ target + math.sqrt(spread) * drawn[:, -1].to(values.device)
        dual = _regression(x * values.sqrt(), y, size)
        errors.append((target - values * (x.T @ dual)).square().sum())
    return Estimate.from_samples(torch.stack(errors))


def _regression(features: Tensor, y: Tensor, ridge: float) -> Tensor:
    """(P,): (K + ridge I)^-1 y for K = features features^T; the pseudo-inverse without a ridge."""
    if ridge > 0:
        gram = features @ features.T
        gram.diagonal().add_(ridge)
        solved: Tensor = torch.linalg.solve(gram, y)
        return solved
    # of the features, not of K, whose singular values are squared
    least: Tensor = torch.linalg.pinv(features.T) @ (torch.linalg.pinv(features) @ y)
    return least
