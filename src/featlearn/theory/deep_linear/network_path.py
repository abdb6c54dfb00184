"""Training of a linear network of any depth, predicted from the network itself."""

from typing import Any

import torch
from torch import Tensor, nn

from featlearn.dynamics.rate import rate as descent_rate
from featlearn.losses import Loss
from featlearn.theory.deep_linear.conserved_balance import conserved_matrices
from featlearn.theory.deep_linear.gradient_flow import flow
from featlearn.theory.deep_linear.path import LinearPath, Task
from featlearn.theory.deep_linear.solve import solve
from featlearn.theory.network_path import NetworkPath, assumption, path_times
from featlearn.theory.network_weights import NetworkWeights, network_weights

CONDITION = 1 + 1e-6
"""Largest condition of inputs that count as whitened."""
UNBALANCED = 0.1
"""Largest share of the weights that may differ between neighboring layers that count as balanced."""


def from_network(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    rate: float = 1.0,
    loss: Loss = "sum-half",
    times: Any = None,
    closed_form: bool = False,
) -> NetworkPath:
    """Predict the training of a linear network of any depth from its weights.

    See Atanasov et al. 2022, Eq. 4, 9, 37, and App. E.1 for the closed form.

    By default gradient flow is integrated from the network's own weights, for any inputs and any start. The closed
    form solves each mode on its own; it needs whitened inputs and balanced layers, and random weights of three layers
    and more miss it by 10 to 30 %: `.assumptions` has its distance from the flow.

    Args:
        model: Linear network without biases, with any constant factors in its forward pass.
        x: Inputs (P, ...).
        y: Targets (P,) or (P, C).
        rate: Learning rate of full-batch gradient descent; one unit of time is then one step.
        loss: Loss of the training: a squared error of `fl.losses`.
        times: (T,); by default 65 times until the loss settles.
        closed_form: Whether to solve balanced layers on whitened inputs in closed form.

    Returns:
        A path with `.times .outputs .loss .kernel(t) .kernel_norm .alignment .assumptions`; its `.readings` hold
        `strength` (T, R), the modes of the teacher that are learned.
    """
    network = network_weights(model, x, y, None, None)
    speed = descent_rate(rate, loss, len(network.x), network.outputs) * network.unit
    depth = len(network.layers)
    strength = float(Task.of(network.x, network.targets).s[0])
    # the fastest mode at the start, and at the end, where balanced layers have strength^(1/L) each
    size = max(*(float(layer.square().sum()) ** (depth - 1) for layer in network.layers), strength ** (2 - 2 / depth))
    pace = speed * float(torch.linalg.matrix_norm(network.x, 2).square()) * size

    def integrated(at: Any) -> LinearPath:
        return flow(network.layers, network.x, network.targets, times=at, rate=speed)

    first = integrated([0.0]).loss[0]
    moments = path_times(times, lambda at: float(integrated(at).loss[-1] / first), 1 / max(pace, 1e-300))
    condition, unbalance = _condition(network), _unbalance(network)
    assumptions = [network.structure]
    path = integrated(moments)
    if closed_form:
        flowing, path = (
            path,
            solve(
                network.x,
                network.targets,
                times=moments,
                c0=_strengths(network),
                weight_layers=depth,
                rate=speed,
            ),
        )
        error = (path.outputs - flowing.outputs).norm() / (flowing.outputs - flowing.outputs[0]).norm()
        assumptions += [
            assumption("inputs are whitened", condition, CONDITION, "condition of x^T x without zeros"),
            assumption("layers are balanced", unbalance, UNBALANCED, "largest relative difference of neighbors"),
            assumption("the closed form is near the flow", error, UNBALANCED, "relative error of the outputs"),
        ]
    shape = (len(moments), *network.targets.shape)
    return NetworkPath(
        theory="deep_linear",
        times=moments,
        outputs=path.outputs.reshape(shape) + network.offset,
        targets=network.targets + network.offset,
        kernels=lambda at: network.unit * path.kernel(at),
        assumptions=assumptions,
        readings={"strength": path.strength, "condition": condition, "unbalance": unbalance},
    )


def _condition(network: NetworkWeights) -> float:
    """Return the largest eigenvalue of x^T x over the smallest that is not zero."""
    values = torch.linalg.svdvals(network.x).square()
    values = values[values > 1e-10 * values[0]]
    return float(values[0] / values[-1])


def _unbalance(network: NetworkWeights) -> float:
    """Return the largest |W_l W_l^T - W_(l+1)^T W_(l+1)| over the larger of the two."""
    shares = [0.0]
    for matrix, lower, upper in zip(
        conserved_matrices(network.layers), network.layers[:-1], network.layers[1:], strict=True
    ):
        shares.append(float(matrix.norm() / torch.maximum((lower @ lower.T).norm(), (upper.T @ upper).norm())))
    return max(shares)


def _strengths(network: NetworkWeights) -> Tensor:
    """Return the strength of each mode of the teacher at the start: for two layers (q0 + r0) / 2."""
    task = Task.of(network.x, network.targets)
    if len(network.layers) == 2 and network.outputs == 1:
        hidden, readout = network.layers
        v = task.v[0]
        q = ((hidden @ v).square().sum() + readout.square().sum()) / 2
        return ((q + readout[0] @ hidden @ v * task.z[0, 0]) / 2).reshape(1)
    product = network.layers[0]
    for layer in network.layers[1:]:
        product = layer @ product
    return torch.einsum("cr,cd,rd->r", task.z, product, task.v).abs().clamp_min(1e-300)
