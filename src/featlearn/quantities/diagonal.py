"""The diagonal of the tangent kernel: squared norms of per-sample gradients, in time linear in the samples."""

from typing import Literal, Unpack, overload

import torch
from torch import Tensor, nn

from featlearn.audited_model import AuditedModel
from featlearn.contraction.kernel_sum import kernel_keys
from featlearn.errors import InputValueError, NotFiniteError
from featlearn.gradients.directions import Outputs, output_directions
from featlearn.kernel.execution import NOT_FINITE
from featlearn.network.inputs import Inputs
from featlearn.planning.memory import byte_budget
from featlearn.quantities.sample_gradients import each_chunk
from featlearn.request import Settings
from featlearn.signatures import name_keywords


@overload
def ntk_diagonal(
    model: nn.Module,
    x: Inputs,
    *,
    outputs: Outputs = "mean",
    by: Literal["network"] = "network",
    **settings: Unpack[Settings],
) -> Tensor: ...
@overload
def ntk_diagonal(
    model: nn.Module,
    x: Inputs,
    *,
    outputs: Outputs = "mean",
    by: Literal["layer", "parameter"],
    **settings: Unpack[Settings],
) -> dict[str, Tensor]: ...
@name_keywords("The kernel does not depend on targets, so drop `y`.")
def ntk_diagonal(
    model: nn.Module,
    x: Inputs,
    *,
    outputs: Outputs = "mean",
    by: str = "network",
    **settings: Unpack[Settings],
) -> Tensor | dict[str, Tensor]:
    """K(x_i, x_i) for every sample: the diagonal of `fl.ntk` without the rest, in time and memory linear in P.

    Args:
        model, x, by: As for `fl.ntk`.
        outputs: `"mean"`, `"sum"`, an int, `fl.Directions(k)`: (P,); `"each"`: (C, P).
        **settings: As for `fl.ntk`, without a `group`.

    Returns:
        (P,) or (C, P), or a dict of them by layer or parameter; they add up to the network's.
    """
    return ntk_diagonal_of(AuditedModel(model, **settings), x, outputs=outputs, by=by)


def ntk_diagonal_of(
    audited: AuditedModel, x: Inputs, *, outputs: Outputs = "mean", by: str = "network"
) -> Tensor | dict[str, Tensor]:
    """Measure the diagonal of an audited model's kernel: see `fl.quantities.ntk_diagonal`."""
    audited.request.refuse("ntk_diagonal", "group")
    if by not in ("network", "layer", "parameter"):
        raise InputValueError(f"by={by!r}, expected 'network', 'layer' or 'parameter'")
    if outputs == "full":
        raise InputValueError("outputs='full', expected 'mean', 'sum', 'each', an output's number or fl.Directions(k)")
    with audited.measuring([x], by_layer=True) as measurement:
        (batch,) = measurement.batches
        directions = output_directions(outputs, measurement.classes)
        keys = kernel_keys(measurement.parameters, by)
        shape = (batch.samples, directions.count)
        totals = {
            key: torch.zeros(shape, dtype=measurement.dtype, device=measurement.device)
            for key in dict.fromkeys(keys.values())
        }
        scratch = byte_budget(audited.request.memory, measurement.device) // 8
        every = directions.rows(slice(0, directions.count))
        for samples, name, part in each_chunk(measurement, every, "kernel diagonal"):
            totals[keys[name]][samples] += part.squared_norms(scratch)
    for key, total in totals.items():
        if not bool(total.isfinite().all()):
            raise NotFiniteError(f"the diagonal{f' of {key}' if by != 'network' else ''} is not finite: {NOT_FINITE}")
    each = directions.mode == "each"
    found = {key: t.T.contiguous() if each else t.sum(1) / directions.divisor for key, t in totals.items()}
    return found[""] if by == "network" else found
