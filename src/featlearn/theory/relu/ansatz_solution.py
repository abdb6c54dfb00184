"""Outputs and kernel together, under the ansatz."""

from typing import Any

import numpy
import torch
from torch import Tensor

from featlearn.errors import FeatlearnError
from featlearn.shapes import ratio
from featlearn.theory.arguments import Numbers, checked_time_axis, checked_vector
from featlearn.theory.relu.kernel_growth import Growth
from featlearn.theory.relu.relu_network import checked_rate, checked_square


def solve(
    K_V: Tensor, K_W: Tensor, y: Tensor, *, times: Numbers, rate: float = 1.0, f0: Tensor | None = None
) -> Growth:
    """Training under the ansatz, from the initial kernel alone: outputs and kernel drive each other.

        df/dt = rate (K_V + K_W)(y - f)
        dK_V/dt = rate / 2 [(y - f) f^T + f (y - f)^T] + rate diag((y - f) f)
        dK_W/dt = rate diag((y - f) f) + rate ((y - f) . f) 1

    The last two are `growth_rates` for every direction at once. Shan & Bordelon 2021b measure f(t); with the
    first equation the system is closed. No closed form: integrated (DOP853, relative tolerance 1e-10).

    Args:
        K_V, K_W: (P, P), at time 0: `split_kernel`, or `fl.ntk(by="layer")`.
        y, f0: targets and initial outputs (P,), f0 zero by default.
        times: (T,), increasing.
        rate: see `fl.dynamics.rate`.
    """
    from scipy.integrate import solve_ivp

    target, moments = checked_vector(y, "y"), checked_time_axis(times, increasing=True)
    first, second = (checked_square(kernel, name, target) for kernel, name in ((K_V, "K_V"), (K_W, "K_W")))
    begin = torch.zeros_like(target) if f0 is None else checked_vector(f0, "f0", len(target)).to(target.device)
    eta, samples, targets = checked_rate(rate), len(target), target.cpu().numpy()
    rest = second - torch.diag(second.diagonal())
    fixed = rest.cpu().numpy()

    def velocity(_: float, state: Any) -> Any:
        f, hidden = state[:samples], state[samples : 2 * samples]
        readout = state[2 * samples :].reshape(samples, samples)
        residual = targets - f
        products = residual * f
        outer = numpy.outer(residual, f)
        moved = (readout + fixed) @ residual + hidden * residual
        grown = (outer + outer.T) / 2 + numpy.diag(products)
        return eta * numpy.concatenate([moved, products + products.sum(), grown.ravel()])

    start = torch.cat([begin, second.diagonal(), first.flatten()]).cpu().numpy()
    last = max(float(moments[-1]), 1e-300)
    solution = solve_ivp(velocity, (0.0, last), start, "DOP853", moments.cpu().numpy(), rtol=1e-10, atol=1e-13)
    if not solution.success:
        raise FeatlearnError(f"the growth of the kernel could not be integrated: {solution.message}")
    states = torch.as_tensor(solution.y.T.copy(), device=target.device)
    return _grown(moments.to(target.device), states, target, rest)


def _grown(times: Tensor, states: Tensor, target: Tensor, rest: Tensor) -> Growth:
    samples = len(target)
    outputs, diagonal, flat = states.split([samples, samples, samples**2], 1)
    readout, hidden = flat.reshape(-1, samples, samples), torch.diag_embed(diagonal) + rest
    kernels, size = readout + hidden, target.square().sum()
    along = [torch.einsum("m,tmn,n->t", target, part, target) / size for part in (readout, hidden, kernels)]
    mean = [part.diagonal(dim1=1, dim2=2).mean(1) for part in (readout, hidden)]
    return Growth(
        times,
        outputs,
        (outputs - target).square().sum(1),
        along[0],
        mean[0],
        along[1],
        mean[1],
        kernels,
        ratio(along[2], torch.linalg.matrix_norm(kernels)),
    )
