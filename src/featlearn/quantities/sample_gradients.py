"""Per-sample gradients of a model, chunk by chunk, and their squared norms: the diagonal of the tangent kernel."""

from collections.abc import Iterator
from typing import Literal, Unpack, overload

import torch
from torch import Tensor, nn

from featlearn.audited_model import AuditedModel, Settings
from featlearn.contraction.factors import Gradients
from featlearn.contraction.kernel_sum import kernel_keys
from featlearn.errors import InputValueError, NotFiniteError
from featlearn.gradients.directions import Directions, Outputs, output_directions
from featlearn.kernel.execution import NOT_FINITE
from featlearn.measurement import Measurement
from featlearn.network.inputs import Inputs
from featlearn.planning.kernel_plan import samples_within
from featlearn.planning.memory import byte_budget
from featlearn.planning.plan import counted
from featlearn.shapes import checked_finite
from featlearn.signatures import name_keywords


@name_keywords()
def gradients(
    model: nn.Module,
    x: Inputs,
    *,
    outputs: int | str | Directions | Tensor = "each",
    by: str = "parameter",
    **settings: Unpack[Settings],
) -> Iterator[tuple[slice, str, Gradients]]:
    """Yield the gradient of every output for every sample, a chunk of samples and a parameter at a time.

    Chunks are as large as the memory budget allows. The model is isolated until the loop ends, and then put back as it
    was, also after a `break` or an error. Random numbers that the loop draws are drawn again after it.

    >>> norms = torch.zeros(len(x), dtype=x.dtype)  # of the gradient of output 0
    >>> for samples, name, part in fl.quantities.gradients(model, x, outputs=0):
    ...     norms[samples] += part.squared_norms()[:, 0]

    Args:
        model, x: As for `fl.ntk`.
        outputs: `"each"` for all C outputs, the number of one of them, `fl.Directions(k)`, or a tensor of K output
            directions, (K, C): `torch.ones(1, C)` gives the gradient of the sum of the outputs.
        by: Name of the gradients: `"parameter"`, or `"layer"`, which has one item for each of its parameters.
        **settings: As for `fl.ntk`, without a `group`.

    Yields:
        Samples as a slice, a name, and gradients: `.tensor()` has shape (samples, K, entries of the parameter), and
        `.squared_norms()` (samples, K) does not form it where that is cheaper. Parameters that no sample of the chunk
        reaches are left out.
    """
    return gradients_of(AuditedModel(model, **settings), x=x, outputs=outputs, by=by)


def gradients_of(
    audited: AuditedModel,
    *,
    x: Inputs | None = None,
    outputs: int | str | Directions | Tensor = "each",
    by: str = "parameter",
) -> Iterator[tuple[slice, str, Gradients]]:
    """Yield per-sample gradients, chunk by chunk: see `fl.quantities.gradients`."""
    audited.request.refuse("gradients", "group")
    if by not in ("parameter", "layer"):
        raise InputValueError(f"by={by!r}, expected 'parameter' or 'layer'")
    if isinstance(outputs, str) and outputs != "each":
        raise InputValueError(
            f"outputs={outputs!r}, expected 'each', an output's number, fl.Directions(k) or directions (K, C); sum or "
            "average what you make of each output"
        )
    with audited.measuring([audited.inputs(x)]) as measurement:
        keys = kernel_keys(measurement.parameters, by)
        directions = _directions(outputs, measurement.classes)
        for samples, name, part in each_chunk(measurement, directions, "gradients", dense=True):
            yield samples, keys[name], part


def each_chunk(
    measurement: Measurement, directions: Tensor, title: str, *, dense: bool = False
) -> Iterator[tuple[slice, str, Gradients]]:
    """Yield the gradients of a measurement under way along output directions (K, C), in chunks that fit into memory.

    `dense`: leave room for the gradient of one parameter to be formed.
    """
    (batch,) = measurement.batches
    budget = byte_budget(measurement.request.memory, measurement.device)
    size = samples_within(measurement, 0.5 * budget, len(directions), dense=dense)
    for samples in counted(title, batch.samples, size):
        chunk = measurement.chunk(batch, samples.start, samples.stop)
        for name, part in measurement.each_gradient(chunk, measurement.parameters, directions, last=True):
            yield samples, name, part
        del chunk  # before the next one is made
    measurement.refuse_no_gradient()


def _directions(outputs: int | str | Directions | Tensor, classes: int) -> Tensor:
    """Return output directions (K, C)."""
    if isinstance(outputs, Tensor):
        directions = checked_finite(outputs, "outputs")
        if directions.dim() != 2 or directions.shape[1] != classes:
            raise InputValueError(
                f"outputs has shape {tuple(outputs.shape)}, expected directions (K, C) with C = {classes}"
            )
        return directions
    selection = output_directions(outputs, classes)  # type: ignore[arg-type]
    return selection.rows(slice(0, selection.count))


class DiagonalOptions(Settings, total=False):
    """Keyword arguments of `ntk_diagonal` that do not change the type of the result."""

    outputs: Outputs


@overload
def ntk_diagonal(
    model: nn.Module, x: Inputs, *, by: Literal["network"] = "network", **options: Unpack[DiagonalOptions]
) -> Tensor: ...
@overload
def ntk_diagonal(
    model: nn.Module, x: Inputs, *, by: Literal["layer", "parameter"], **options: Unpack[DiagonalOptions]
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
    return ntk_diagonal_of(AuditedModel(model, **settings), x=x, outputs=outputs, by=by)  # type: ignore[call-overload,no-any-return]


@overload
def ntk_diagonal_of(
    audited: AuditedModel, *, x: Inputs | None = None, outputs: Outputs = "mean", by: Literal["network"] = "network"
) -> Tensor: ...
@overload
def ntk_diagonal_of(
    audited: AuditedModel, *, x: Inputs | None = None, outputs: Outputs = "mean", by: Literal["layer", "parameter"]
) -> dict[str, Tensor]: ...
def ntk_diagonal_of(
    audited: AuditedModel, *, x: Inputs | None = None, outputs: Outputs = "mean", by: str = "network"
) -> Tensor | dict[str, Tensor]:
    """Compute the diagonal of the kernel: see `fl.quantities.ntk_diagonal`."""
    audited.request.refuse("ntk_diagonal", "group")
    if by not in ("network", "layer", "parameter"):
        raise InputValueError(f"by={by!r}, expected 'network', 'layer' or 'parameter'")
    if outputs == "full":
        raise InputValueError("outputs='full', expected 'mean', 'sum', 'each', an output's number or fl.Directions(k)")
    with audited.measuring([audited.inputs(x)], by_layer=True) as measurement:
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
