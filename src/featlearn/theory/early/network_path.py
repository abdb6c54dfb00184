"""The first moments of training, predicted from the network itself."""

from typing import Any

import torch
from torch import Tensor, nn

from featlearn.dynamics.rate import rate as descent_rate
from featlearn.errors import InputValueError
from featlearn.losses import Loss
from featlearn.shapes import ratio
from featlearn.theory.arguments import checked_time_axis
from featlearn.theory.early.derivative import checked_ptk
from featlearn.theory.network_path import NetworkPath, assumption, checked_data

MOVED = 0.1
"""Largest relative change of the kernel for which a prediction to first order counts."""


def from_network(
    model: nn.Module, x: Tensor, y: Tensor, *, rate: float = 1.0, loss: Loss = "sum-half", times: Any = None
) -> NetworkPath:
    """Predict the first moments of training of any network: outputs, kernel, and how neural features begin.

    See Beaglehole et al. 2024, Sec. 3.1, Eq. 6; Shan & Bordelon 2021a, Sec. 2.2 for dK/dt.

    The kernel moves along its exact derivative, K(t) = K(0) + t dK/dt, and the outputs descend along K(0). Both are
    first order in time: the assumption is that K has changed by at most 10 %.

    Args:
        model: Any module that `fl.ntk` measures.
        x: Inputs (P, ...).
        y: Targets (P,) or (P, C).
        rate: Learning rate of full-batch gradient descent; one unit of time is then one step.
        loss: Loss of the training: a squared error of `fl.losses`.
        times: (T,); by default 33 times until the kernel has changed by 10 %.

    Returns:
        A path with `.times .outputs .loss .kernel(t) .kernel_norm .alignment .assumptions`; its
        `.readings["correlations"]` maps each layer whose inputs are rows to the centered neural feature correlation
        with which its training starts, and `"horizon"` is the time at which K has changed by 10 %.
    """
    from featlearn.network.raw_outputs import raw_outputs
    from featlearn.quantities import ntk_velocity
    from featlearn.session import Session

    _, targets = checked_data(x, y)
    session = Session(model, x)
    start = session.ntk(outputs="full").double()  # (P, P, C, C)
    samples, outputs = start.shape[0], start.shape[2]
    columns = targets.reshape(samples, -1)
    if columns.shape[1] != outputs:
        raise InputValueError(
            f"targets have shape {tuple(targets.shape)}, expected (P, C) = {(samples, outputs)}; pass one-hot targets"
        )
    speed = descent_rate(rate, loss, samples, outputs)
    f0 = raw_outputs(model, x, None).reshape(samples, outputs).double()
    # under gradient flow of 1/2 |f - y|^2, so that the rate multiplies it
    velocity = speed * ntk_velocity(model, x, columns, loss="sum-half").double()
    kernel = torch.einsum("pqcc->pq", start) / outputs
    pace = velocity.norm() / kernel.norm()
    horizon = float(MOVED / pace) if float(pace) > 0 else torch.inf
    values, vectors = torch.linalg.eigh(start.permute(0, 2, 1, 3).reshape(samples * outputs, -1))
    end = horizon if horizon < torch.inf else 1 / (speed * float(values[-1]))
    moments = torch.linspace(0, end, 33, dtype=torch.float64) if times is None else checked_time_axis(times)
    modes = vectors.T @ (f0 - columns).flatten()
    decay = torch.exp(-speed * moments[:, None] * values)
    path = (columns.flatten() + (decay * modes) @ vectors.T).reshape(len(moments), *targets.shape)
    moved = float(moments.max()) * float(pace)
    return NetworkPath(
        theory="early",
        times=moments,
        outputs=path,
        targets=targets,
        kernels=lambda at: kernel + at[:, None, None] * velocity,
        assumptions=[
            assumption("the kernel has hardly changed", moved, MOVED * (1 + 1e-9), "relative change by the last time")
        ],
        readings={"correlations": _correlations(session, model, x, f0 - columns), "horizon": horizon},
    )


def _correlations(session: Any, model: nn.Module, x: Tensor, residual: Tensor) -> dict[str, float]:
    """Return layer -> cosine of X^T L calK L X and X^T L calK^2 L X, from Gram matrices alone."""
    from featlearn.quantities import ptk

    result = {}
    grams = session.representation_kernels(of="input")
    slopes = residual.flatten()
    for name, gram in grams.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear) or ptk(model, x[:2], layer=name, positions=True).shape[1] > 1:
            continue  # positions that share a weight do not factorize
        inner = checked_ptk(ptk(model, x, layer=name, outputs="full"), slopes[:, None], residual.shape[1])
        rows = gram.double().repeat_interleave(residual.shape[1], 0).repeat_interleave(residual.shape[1], 1)
        first, second = (slopes[:, None] * power * slopes @ rows for power in (inner, inner @ inner))
        overlap, sizes = (first * second.T).sum(), ((first * first.T).sum() * (second * second.T).sum()).sqrt()
        result[name] = float(ratio(overlap, sizes))
    return result
