"""Gradient flow of a linear network, integrated: any data, any weights, any depth."""

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from featlearn.errors import FeatlearnError, InputValueError
from featlearn.theory.arguments import Numbers, checked_numbers, checked_rows
from featlearn.theory.deep_linear.linear_network import checked_outputs, checked_path_times, checked_weights
from featlearn.theory.deep_linear.path import LinearPath, Task


def flow(weights: Sequence[Tensor], X: Tensor, y: Tensor, *, times: Any, rate: Numbers = 1.0) -> LinearPath:
    """Return the path of f = W^L ... W^1 x under gradient flow of 1/2 |f - y|^2, by numerical integration.

    See Atanasov et al. 2022, Eq. 4, 9, 37.

    The closed forms converge to it for small weights. It also covers cases without a closed form: inputs that are not
    whitened, weights that are not small, unequal learning rates. DOP853 with relative tolerance 1e-12.

    Args:
        weights: [W^1 (N1, D), ..., W^L (C, N)], first layer first, as in nn.Linear; a last one (N,) is (1, N).
        X, y: inputs (P, D) and targets (P,) or (P, C).
        times: (T,), increasing, with df/dt = -rate K (f - y).
        rate: learning rate, one or one for each layer; 1/P is that of Atanasov et al. 2022. With unequal rates the
            kernel of the path stays the plain one, sum_l K_l.
    """
    layers = checked_weights(weights)
    rows = checked_rows(X, columns=layers[0].shape[1]).to(layers[0].device)
    targets = checked_outputs(y, rows)
    if layers[-1].shape[0] != targets.reshape(len(rows), -1).shape[1]:
        raise InputValueError(
            f"the last layer has {layers[-1].shape[0]} outputs and y the shape {tuple(targets.shape)}, expected as "
            "many columns as outputs"
        )
    moments = checked_path_times(times, increasing=True).to(rows.device)
    task, rates = Task.of(rows, targets), _rates(rate, len(layers))
    weights = _integrated(layers, task, moments, rates)
    products = weights[0]
    for layer in weights[1:]:
        products = layer @ products

    def metrics(at: Tensor) -> Tensor:
        states = {time: [part[i] for part in weights] for i, time in enumerate(moments.tolist())}
        new = sorted(set(at.tolist()) - set(states))
        if new:
            parts = _integrated(layers, task, torch.tensor(new).to(moments), rates)
            states |= {time: [part[i] for part in parts] for i, time in enumerate(new)}
        return torch.stack([_traced_metric(states[time]) for time in at.tolist()])

    return task.path(moments, products, metrics, layers=tuple(weights))


def _rates(rate: Any, depth: int) -> list[float]:
    values = checked_numbers(rate, "rate", least=0.0)
    if values.shape not in ((), (depth,)):
        raise InputValueError(f"rate has shape {tuple(values.shape)}, expected one or ({depth},), one for each layer")
    rates: list[float] = values.expand(depth).tolist()
    return rates


def _integrated(layers: list[Tensor], task: Task, times: Tensor, rates: list[float]) -> list[Tensor]:
    from scipy.integrate import solve_ivp

    shapes = [tuple(layer.shape) for layer in layers]
    ends = numpy.cumsum([0, *(layer.numel() for layer in layers)])
    second, moment = task.second.cpu().numpy(), task.moment.cpu().numpy()

    def unpacked(state: Any) -> list[Any]:
        return [state[a:b].reshape(shape) for a, b, shape in zip(ends, ends[1:], shapes, strict=False)]

    def velocity(_: float, state: Any) -> Any:
        parts = unpacked(state)
        before = [numpy.eye(shapes[0][1])]
        for part in parts:
            before.append(part @ before[-1])
        back = moment.T - before.pop() @ second  # (Y - F)^T X, (C, D)
        moves = []
        for part, inputs, eta in zip(reversed(parts), reversed(before), reversed(rates), strict=True):
            moves.append(eta * (back @ inputs.T).ravel())
            back = part.T @ back
        return numpy.concatenate(moves[::-1])

    start = numpy.concatenate([layer.cpu().numpy().ravel() for layer in layers])
    moments = times.cpu().numpy()
    scale = max(float(numpy.abs(start).max()), 1e-300)
    solution = solve_ivp(
        velocity,
        (0.0, max(float(moments[-1]), 1e-300)),
        start,
        method="DOP853",
        t_eval=moments,
        rtol=1e-12,
        atol=1e-12 * scale,
    )
    if not solution.success:
        raise FeatlearnError(f"gradient flow could not be integrated: {solution.message}")
    states = torch.as_tensor(solution.y.T.copy(), device=times.device)
    return [
        states[:, a:b].reshape(-1, *shape)
        for a, b, shape in zip(ends.tolist(), ends[1:].tolist(), shapes, strict=False)
    ]


def _traced_metric(layers: list[Tensor]) -> Tensor:
    """1/C sum_c M^cc: the sum over layers of |W^L ... W^(l+1)|^2 / C times the Gram matrix of W^(l-1) ... W^1."""
    outputs = len(layers[-1])
    back = torch.eye(outputs, dtype=layers[0].dtype, device=layers[0].device)
    sizes = []
    for layer in reversed(layers):
        sizes.append(back.square().sum() / outputs)
        back = back @ layer
    forward = torch.eye(layers[0].shape[1], dtype=layers[0].dtype, device=layers[0].device)
    metric = torch.zeros_like(forward)
    for layer, size in zip(layers, reversed(sizes), strict=True):
        metric = metric + size * forward.T @ forward
        forward = layer @ forward
    return metric
