"""How the two parts of the kernel grow, given the outputs (Shan & Bordelon 2021b, Sec. 6.1, App. D.2)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite, checked_kernel
from featlearn.theory.arguments import Numbers, checked_time_axis, checked_vector
from featlearn.theory.prediction import Prediction
from featlearn.theory.relu.relu_network import checked_outputs, checked_rate, checked_square


class GrowthRates(NamedTuple):
    """d/dt of z^T K z for each part of the kernel, with |z| = 1; the shape is that of f less its last axis."""

    readout_task: Tensor
    """K_V along the target (or along `direction`)."""
    readout_mean: Tensor
    """K_V, averaged over all directions: d Tr K_V / dt / P."""
    hidden_task: Tensor
    """K_W along the target (or along `direction`)."""
    hidden_mean: Tensor
    """K_W, averaged over all directions."""


def growth_rates(
    y: Tensor, f: Tensor, rate: float = 1.0, *, direction: Tensor | None = None, Q: Tensor | None = None
) -> GrowthRates:
    """How fast the parts of the kernel grow along the target and on average.

    See Shan & Bordelon 2021b, Eq. 16, 75-86 (corrected).

        z^T dK_V/dt z = rate {sum_mu (y - f)_mu z_mu^2 f_mu + [(y - f) . z] [z . f]}
        z^T dK_W/dt z = rate {sum_mu (y - f)_mu z_mu^2 f_mu + |z|^2 (y - f) . f}

    and on average 2 rate / P (y - f) . f and rate (1 + 1/P) (y - f) . f. Early, y - f = y, and y = +-1: K grows by
    2 rate y . f along y and by rate y . f along any other direction.

    Args:
        y: targets (P,), of any values.
        f: outputs (..., P), at one time or at many.
        rate: see `fl.dynamics.rate`; 2 lr / P for the loss of Shan & Bordelon 2021b, App. E.4.
        direction: z (P,), of any length (it is normalized); by default y.
        Q: sum_i D_i^mu V_i phi_i^nu (..., P, P), measured, in place of the ansatz: the rates are then exact between
            flips of gates.

    Errata: Eq. 16 has 1/2 rate (y - f) . f for K_W, and leaves the first term of K_V away; Eq. 75 has rate for
    2 rate in its first term; Eq. 60 has the wrong sign; Eq. 71 v for z; the inputs of App. E.4 have variance 1/N.
    """
    target = checked_vector(y, "y")
    outputs = checked_outputs(f, target)
    task = target if direction is None else checked_vector(direction, "direction", len(target)).to(target.device)
    if not task.norm() > 0:
        raise InputValueError("y is 0, expected a direction; pass direction=")
    eta, z, residual, samples = checked_rate(rate), task / task.norm(), target - outputs, len(target)
    if Q is None:
        products, both = residual * outputs, (residual * outputs).sum(-1)
        weighted = (z.square() * products).sum(-1)
        return GrowthRates(
            readout_task=eta * (weighted + (residual @ z) * (outputs @ z)),
            readout_mean=2 * eta / samples * both,
            hidden_task=eta * (weighted + both),
            hidden_mean=eta * (1 + 1 / samples) * both,
        )
    overlaps = checked_finite(checked_kernel(Q, "Q"), "Q").to(target.device)
    if overlaps.shape[-1] != samples:
        raise InputValueError(f"Q has shape {tuple(overlaps.shape)}, expected (..., P, P) with P = {samples}")
    pulled = (overlaps @ residual[..., None])[..., 0]  # sum_nu Q_mu nu (y - f)_nu
    return GrowthRates(
        readout_task=2 * eta * (residual * z * (overlaps @ z)).sum(-1),
        readout_mean=2 * eta / samples * (residual * overlaps.diagonal(dim1=-2, dim2=-1)).sum(-1),
        hidden_task=2 * eta * (z.square() * pulled).sum(-1),
        hidden_mean=2 * eta / samples * pulled.sum(-1),
    )


def weight_growth_rates(
    X: Tensor, W: Tensor, V: Tensor, y: Tensor, rate: float = 1.0, *, direction: Tensor | None = None
) -> GrowthRates:
    """How fast the parts of the kernel of f = V relu(W x) grow, from its weights: for any inputs, without the ansatz.

    See Shan & Bordelon 2021b, Sec. 6.1, App. D.2: `growth_rates` is the same for orthonormal inputs under the ansatz.
    For Gaussian inputs it gives between 0.03 and 0.8 of the true rates.

    With r = y - f, gates D and G = X X^T, dphi_i^mu = rate V_i D_i^mu sum_nu G_mu nu r_nu D_i^nu and dV = rate r . phi;
    K_V = phi phi^T and K_W = G * (D V^2 D^T) follow. Exact between flips of gates.

    Args:
        X: Inputs (P, D).
        W: First layer (M, D).
        V: Readout (M,).
        y: Targets (P,).
        rate: See `fl.dynamics.rate`.
        direction: z (P,), of any length; by default y.
    """
    inputs, first, target = checked_finite(X, "X"), checked_finite(W, "W"), checked_vector(y, "y")
    readout, eta, samples = checked_vector(V, "V", len(first)), checked_rate(rate), len(target)
    if inputs.dim() != 2 or first.dim() != 2 or inputs.shape != (samples, first.shape[1]):
        raise InputValueError(
            f"X has shape {tuple(inputs.shape)} and W {tuple(first.shape)}, expected (P, D) and (M, D) with "
            f"P = {samples}"
        )
    task = target if direction is None else checked_vector(direction, "direction", samples)
    gram, z = inputs @ inputs.T, task / task.norm()
    hidden = inputs @ first.T
    features, gates = hidden.clamp(min=0), (hidden > 0).to(hidden)
    residual = target - features @ readout
    grown = readout * gates * (gram @ (residual[:, None] * gates))  # (P, M): dphi / rate
    moved = residual @ features  # (M,): dV / rate
    readout_part = grown @ features.T
    hidden_part = gram * ((gates * (readout * moved)) @ gates.T)
    return GrowthRates(
        readout_task=2 * eta * (z @ readout_part @ z),
        readout_mean=2 * eta / samples * readout_part.trace(),
        hidden_task=2 * eta * (z @ hidden_part @ z),
        hidden_mean=2 * eta / samples * hidden_part.trace(),
    )


@dataclass(frozen=True, eq=False)
class Growth(Prediction):
    """Parts of the kernel over time, along the target and on average over directions."""

    times: Tensor
    outputs: Tensor
    """(T, P)"""
    loss: Tensor
    """(T,): |f - y|^2"""
    readout_task: Tensor
    """(T,): y^T K_V y / |y|^2"""
    readout_mean: Tensor
    """(T,): Tr K_V / P"""
    hidden_task: Tensor
    """(T,): y^T K_W y / |y|^2"""
    hidden_mean: Tensor
    """(T,): Tr K_W / P"""
    kernels: Tensor | None = None
    """(T, P, P): K_V + K_W, where it is known (`solve`)."""
    alignment: Tensor | None = None
    """(T,): its kernel-task alignment."""

    def curves(self) -> dict[str, Tensor]:
        """Loss and the two parts along the target and on average; alignment and norm where the kernel is known."""
        result = {
            "loss": self.loss,
            "ntk/readout/task": self.readout_task,
            "ntk/readout/mean": self.readout_mean,
            "ntk/hidden/task": self.hidden_task,
            "ntk/hidden/mean": self.hidden_mean,
        }
        if self.kernels is not None and self.alignment is not None:
            result |= {"ntk/alignment": self.alignment, "ntk/norm": torch.linalg.matrix_norm(self.kernels)}
        return result


def growth(
    times: Numbers, f: Tensor, y: Tensor, rate: float = 1.0, *, K_V: Tensor | None = None, K_W: Tensor | None = None
) -> Growth:
    """The kernel's growth along a run whose outputs are known: `growth_rates` summed over time.

    See Shan & Bordelon 2021b, Fig. 6 C to F.

    `times` (T,), `f` (T, P) the outputs measured then, `y` (P,); trapezoids between them, so measure often enough.
    K_V and K_W (P, P) at the first time, by default 0: growth alone. `solve` needs no measured outputs.
    """
    target, moments = checked_vector(y, "y"), checked_time_axis(times, increasing=True)
    outputs = checked_outputs(f, target)
    moments = moments.to(target.device)
    if outputs.shape != (len(moments), len(target)):
        raise InputValueError(
            f"f has shape {tuple(outputs.shape)}, expected (T, P) = ({len(moments)}, {len(target)}), the outputs at "
            "each time"
        )
    start = _starting_values(K_V, K_W, target)
    rates = growth_rates(target, outputs, rate)
    summed = [
        value + torch.cat([moments.new_zeros(1), torch.cumulative_trapezoid(rate_of_growth, moments)])
        for value, rate_of_growth in zip(start, rates, strict=True)
    ]
    return Growth(moments, outputs, (outputs - target).square().sum(-1), *summed)


def _starting_values(K_V: Any, K_W: Any, target: Tensor) -> list[Tensor]:
    """z^T K z along the target and on average, of both parts; 0 for a part not given."""
    values = []
    for kernel, name in ((K_V, "K_V"), (K_W, "K_W")):
        part = (
            torch.zeros(len(target), len(target)).to(target) if kernel is None else checked_square(kernel, name, target)
        )
        values += [target @ part @ target / target.square().sum(), part.trace() / len(target)]
    return values
