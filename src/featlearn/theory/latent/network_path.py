"""Training of a two-layer linear network on samples along a line, predicted from the network itself."""

from typing import Any

import torch
from torch import Tensor, nn

from featlearn.dynamics.rate import rate as descent_rate
from featlearn.losses import Loss
from featlearn.theory.latent.line_reduction import reduce_line
from featlearn.theory.latent.trajectory import Latent, solve
from featlearn.theory.network_path import NetworkPath, assumption, path_times
from featlearn.theory.network_weights import network_weights

STRAIGHT = 1e-6
"""Largest distance from the line, over the farthest sample: the rounding of float32 inputs."""


def from_network(
    model: nn.Module, x: Tensor, y: Tensor, *, rate: float = 1.0, loss: Loss = "sum-half", times: Any = None
) -> NetworkPath:
    """Predict the training of a two-layer linear network on samples along one line, exactly and at any width.

    See Xu & Ziyin 2024, Theorem 1 (corrected), Prop. 1.

    Args:
        model: Linear network of two layers and one output, without biases, with any constant factors.
        x: Inputs (P, ...), all multiples of one vector; one sample is a line.
        y: Targets (P,) or (P, 1).
        rate: Learning rate of full-batch gradient descent; one unit of time is then one step.
        loss: Loss of the training: a squared error of `fl.losses`.
        times: (T,); by default 65 times until the loss settles.

    Returns:
        A path with `.times .outputs .loss .kernel(t) .kernel_norm .alignment .assumptions`; its `.readings["latent"]`
        is the solution on the line (`.mechanism .time_scale .layer_alignment .final ...`), in weights that hold the
        factors of the forward pass.
    """
    network = network_weights(model, x, y, None, 2)
    axis = torch.linalg.svd(network.x, full_matrices=False).Vh[0]
    projected = torch.outer(network.x @ axis, axis)
    distance = float((network.x - projected).norm(dim=1).max() / projected.norm(dim=1).max())
    targets = network.targets[:, 0] if network.targets.shape[1:] == (1,) else network.targets
    line = reduce_line(projected if distance <= STRAIGHT else network.x, targets)
    hidden, readout = network.layers
    # df/dt = -speed K (f - y) over P samples is descent on the mean squared error with this rate
    speed = descent_rate(rate, loss, len(network.x), 1) * network.unit * len(network.x) / 2

    def solution(at: Any) -> Latent:
        return solve(readout[0], hidden, line.x, line.y, times=at, rate_u=speed, rate_w=speed)

    first = float(solution([0.0]).loss[0])
    moments = path_times(
        times,
        lambda at: float(solution(at).loss[-1]) / first if first > 0 else 0.0,
        1 / float((2 * solution([0.0]).ntk[0]).clamp_min(1e-300)),
    )
    path = solution(moments)
    outputs = torch.einsum("td,tde,pe->tp", path.u, path.W, network.x)
    return NetworkPath(
        theory="latent",
        times=moments,
        outputs=outputs.reshape(len(moments), *network.targets.shape) + network.offset,
        targets=network.targets + network.offset,
        kernels=lambda at: network.unit / speed * path.kernel(at, network.x),
        assumptions=[
            network.structure,
            assumption("samples lie on a line through 0", distance, STRAIGHT, "largest distance over extent"),
        ],
        readings={"latent": path},
    )
