"""Training of a two-layer ReLU network whose gates stay as they are, predicted from the network itself."""

from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from featlearn.dynamics.rate import rate as descent_rate
from featlearn.errors import FeatlearnError
from featlearn.losses import Loss
from featlearn.theory.network_path import NetworkPath, assumption, path_times
from featlearn.theory.network_weights import NetworkWeights, network_weights

FLIPPED = 0.05
"""Largest share of gates that the predicted weights may turn."""


class GatedWeights(NamedTuple):
    """Weights over time: hidden (T, M, D), readout (T, C, M)."""

    hidden: Tensor
    readout: Tensor


def from_network(
    model: nn.Module, x: Tensor, y: Tensor, *, rate: float = 1.0, loss: Loss = "sum-half", times: Any = None
) -> NetworkPath:
    """Predict the training of a two-layer ReLU network with frozen gates, for any inputs and outputs.

    See Shan & Bordelon 2021b, Sec. 6.1, App. D: the theory that `relu.solve` and `relu.growth_rates` solve for
    orthonormal inputs, here without that assumption and without the ansatz.

    With gates D_i^mu fixed, f(x_mu) = sum_i V_i D_i^mu w_i . x_mu is a polynomial in the weights, and its gradient flow
    is integrated (DOP853, relative tolerance 1e-9). What is left to assume is that few gates turn: the share of gates
    that the predicted weights turn is the number of that assumption.

    Args:
        model: Network V relu(W x) without biases, with any constant factors in its forward pass.
        x: Inputs (P, ...).
        y: Targets (P,) or (P, C).
        rate: Learning rate of full-batch gradient descent; one unit of time is then one step.
        loss: Loss of the training: a squared error of `fl.losses`.
        times: (T,); by default 65 times until the loss settles.

    Returns:
        A path with `.times .outputs .loss .kernel(t) .kernel_norm .alignment .assumptions`; its `.readings` hold
        `hidden` and `readout`, the two parts of the kernel along the targets (T,), and `flipped` (T,).
    """
    network = network_weights(model, x, y, torch.relu, 2)
    speed = descent_rate(rate, loss, len(network.x), network.outputs) * network.unit
    gates = (network.x @ network.layers[0].T > 0).double()
    targets = network.targets.reshape(len(network.x), -1)
    parts_at_start = _kernel_parts(GatedWeights(network.layers[0][None], network.layers[1][None]), network.x, gates)

    def weights(at: Tensor) -> GatedWeights:
        return _integrated(network, gates, targets, at, speed)

    first = float((_outputs(weights(torch.zeros(1).double()), network.x, gates)[0] - targets).square().sum())
    largest = float(torch.linalg.eigvalsh((parts_at_start[0] + parts_at_start[1])[0])[-1])
    moments = path_times(
        times,
        lambda at: float((_outputs(weights(at), network.x, gates)[-1] - targets).square().sum()) / max(first, 1e-300),
        1 / (speed * max(largest, 1e-300)),
    )
    path = weights(moments)
    flipped = torch.stack([((network.x @ hidden.T > 0) != gates.bool()).double().mean() for hidden in path.hidden])
    hidden, readout = _kernel_parts(path, network.x, gates)
    size = targets.square().sum()

    def kernels(at: Tensor) -> Tensor:
        order = at.argsort()
        stack = sum(_kernel_parts(weights(at[order]), network.x, gates))
        return network.unit * torch.as_tensor(stack)[order.argsort()]

    return NetworkPath(
        theory="relu",
        times=moments,
        outputs=_outputs(path, network.x, gates).reshape(len(moments), *network.targets.shape) + network.offset,
        targets=network.targets + network.offset,
        kernels=kernels,
        assumptions=[
            network.structure,
            assumption("gates stay as they are", flipped.max(), FLIPPED, "largest share of gates that turn"),
        ],
        readings={
            "flipped": flipped,
            "hidden": network.unit * torch.einsum("pc,tpq,qc->t", targets, hidden, targets) / size,
            "readout": network.unit * torch.einsum("pc,tpq,qc->t", targets, readout, targets) / size,
        },
    )


def _outputs(weights: GatedWeights, x: Tensor, gates: Tensor) -> Tensor:
    """(T, P, C)"""
    return ((x @ weights.hidden.mT) * gates) @ weights.readout.mT


def _kernel_parts(weights: GatedWeights, x: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """K_W and K_V (T, P, P), averaged over outputs."""
    features = (x @ weights.hidden.mT) * gates
    masses = weights.readout.square().mean(1)  # (T, M)
    hidden = (x @ x.T) * ((gates * masses[:, None]) @ gates.T)
    return hidden, features @ features.mT


def _integrated(network: NetworkWeights, gates: Tensor, targets: Tensor, times: Tensor, rate: float) -> GatedWeights:
    from scipy.integrate import solve_ivp

    x, mask, goal = network.x.numpy(), gates.numpy(), targets.numpy()
    shapes = [tuple(layer.shape) for layer in network.layers]
    cut = network.layers[0].numel()

    def velocity(_: float, state: Any) -> Any:
        hidden, readout = state[:cut].reshape(shapes[0]), state[cut:].reshape(shapes[1])
        features = (x @ hidden.T) * mask
        residual = goal - features @ readout.T  # (P, C)
        moves = ((residual @ readout) * mask).T @ x, residual.T @ features
        return rate * numpy.concatenate([move.ravel() for move in moves])

    start = torch.cat([layer.flatten() for layer in network.layers]).numpy()
    last = max(float(times.max()), 1e-300)
    solution = solve_ivp(velocity, (0.0, last), start, "DOP853", times.cpu().numpy(), rtol=1e-9, atol=1e-12)
    if not solution.success:
        raise FeatlearnError(f"gradient flow could not be integrated: {solution.message}")
    states = torch.as_tensor(solution.y.T.copy())
    return GatedWeights(states[:, :cut].reshape(-1, *shapes[0]), states[:, cut:].reshape(-1, *shapes[1]))
