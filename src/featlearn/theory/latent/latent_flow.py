"""The same network under gradient flow for any samples, by numerical integration."""

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from featlearn.errors import FeatlearnError, InputValueError
from featlearn.theory.arguments import Numbers, checked_number, checked_numbers, checked_time_axis
from featlearn.theory.latent.latent_network import checked_network, checked_points, length
from featlearn.theory.prediction import Prediction


@dataclass(frozen=True, eq=False)
class Flow(Prediction):
    """Weights, outputs and loss along a path. T times, N samples."""

    times: Tensor
    """(T,)"""
    u: Tensor
    """(T, d)"""
    W: Tensor
    """(T, d, d0)"""
    outputs: Tensor
    """(T, N)"""
    loss: Tensor
    """(T,): mean over samples of (f - y)^2"""

    def curves(self) -> dict[str, Tensor]:
        """Loss and the norms of W (first layer) and u (second layer); for one sample also the output."""
        curves = {
            "loss": self.loss,
            "layers/first_norm": length(self.W.flatten(1)),
            "layers/second_norm": length(self.u),
        }
        return curves | ({"output": self.outputs[:, 0]} if self.outputs.shape[1] == 1 else {})


def integrate(
    u: Tensor,
    W: Tensor,
    X: Tensor,
    y: float | Tensor,
    *,
    times: Numbers,
    scale: float | Tensor = 1.0,
    rate_u: float | Tensor = 1.0,
    rate_w: float | Tensor = 1.0,
) -> Flow:
    """Gradient flow of f(x) = scale u . W x on mean_k (f(x_k) - y_k)^2, integrated to 12 digits (DOP853).

    For samples off a line, which have no closed form, and as the independent check of `solve`. See Xu & Ziyin
    2024, Eq. 1 and 2.

    Args:
        u: (d,) readout.
        W: (d, d0) input layer.
        X: (N, d0) samples, or one (d0,).
        y: (N,) targets, or one number.
        times: (T,) finite times >= 0, in any order.
        scale: gamma of the paper.
        rate_u: learning rate of u.
        rate_w: learning rate of W.
    """
    from scipy.integrate import solve_ivp

    readout, weight = checked_network(u, W)
    samples = checked_points(X, weight, "X").reshape(-1, weight.shape[1])
    targets = _targets(y, samples)
    moments = checked_time_axis(times)
    gamma = checked_number(scale, "scale")
    rates = checked_number(rate_u, "rate_u", least=0.0), checked_number(rate_w, "rate_w", least=0.0)
    width, x, t = len(readout), samples.cpu().numpy(), targets.cpu().numpy()

    def velocity(_: float, state: Any) -> Any:
        a, V = state[:width], state[width:].reshape(width, -1)
        drive = (-2 * gamma / len(x)) * ((gamma * (x @ V.T @ a) - t) @ x)  # (d0,)
        return numpy.concatenate([rates[0] * (V @ drive), rates[1] * numpy.outer(a, drive).ravel()])

    first = torch.cat([readout, weight.flatten()]).cpu().numpy()
    order, place = moments.cpu().unique(return_inverse=True)
    tolerance = 1e-15 * max(float(numpy.abs(first).max()), 1e-300)
    path = solve_ivp(
        velocity,
        (0.0, float(order[-1]) if len(order) else 0.0),
        first,
        method="DOP853",
        t_eval=order.numpy(),
        rtol=1e-12,
        atol=tolerance,
    )
    if not path.success:
        raise FeatlearnError(f"integration stopped at t = {path.t[-1] if len(path.t) else 0.0}: {path.message}")
    states = torch.as_tensor(path.y.T)[place].to(readout.device)
    us, Ws = states[:, :width], states[:, width:].reshape(len(states), width, -1)
    outputs = gamma * torch.einsum("ti,tij,nj->tn", us, Ws, samples)
    return Flow(moments.to(readout.device), us, Ws, outputs, (outputs - targets).square().mean(1))


def _targets(y: Any, samples: Tensor) -> Tensor:
    values = checked_numbers(y, "y").to(samples.device)
    targets = values.reshape(-1)
    if len(targets) != len(samples):
        raise InputValueError(
            f"y has shape {tuple(values.shape)}, expected (N,) = ({len(samples)},): one number per sample"
        )
    return targets
