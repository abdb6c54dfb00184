"""The pre-activation tangent kernel of one layer: inner products of df/dh, the rows' part of the tangent kernel."""

from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from featlearn.audited_model import AuditedModel, Settings
from featlearn.errors import InputTypeError, InputValueError, MemoryBudgetError
from featlearn.linear_maps.preactivation_gradients import PreactivationGradients, select_layers
from featlearn.linear_maps.weight_matrices import WeightMatrices, weight_matrices
from featlearn.measurement import Measurement
from featlearn.network.inputs import Inputs, ModelWithInputs
from featlearn.planning.kernel_plan import samples_within
from featlearn.planning.memory import byte_budget, readable_bytes
from featlearn.planning.plan import sample_blocks
from featlearn.signatures import name_keywords


@name_keywords()
def ptk(
    model: nn.Module,
    x: Inputs,
    *,
    x2: Inputs | None = None,
    layer: str,
    outputs: int | Literal["sum", "full"] = "sum",
    positions: bool = False,
    **settings: Unpack[Settings],
) -> Tensor:
    """The pre-activation tangent kernel J_h J_h^T of one layer, J_h the rows df/dh of h = W x.

    See Beaglehole et al. 2024, Sec. 2, Prop. 4.

    The tangent kernel of W is sum_{p,q} ptk[a, p, b, q] (x_p . z_q) over pairs of positions: with one
    position the product of the PTK and the layer's input kernel, with several the double sum, which does not factorize.

    Args:
        model, x, x2: As for `fl.ntk`.
        layer: the name of a layer as `fl.neural_features` gives it; a part of a fused one is `"attn.q"`.
        outputs: `"sum"` adds up the outputs' own kernels; `"full"` keeps every pair, (..., C, C); an int for one.
        positions: keep the positions (tokens, places) apart; by default a sample's gradient is that of all of them, and
            equal positions are summed.
        **settings: As for `fl.ntk`, without `parameters` and `group`.

    Returns:
        (P, P2); (P, P2, C, C) for `"full"`; with `positions` (P, T, P2, T2), and (P, T, P2, T2, C, C). No 1/n.
    """
    return ptk_of(AuditedModel(model, **settings), x2, x=x, layer=layer, outputs=outputs, positions=positions)


def ptk_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    layer: str,
    x: Inputs | None = None,
    outputs: int | Literal["sum", "full"] = "sum",
    positions: bool = False,
) -> Tensor:
    """Compute the pre-activation tangent kernel of one layer: see `fl.quantities.ptk`."""
    x = audited.inputs(x)
    audited.request.refuse("ptk", "parameters", "group")
    if not isinstance(layer, str):
        raise InputTypeError(f"layer is {layer!r}, expected the name of one layer, as fl.neural_features gives it")
    if outputs not in ("sum", "full") and (isinstance(outputs, bool) or not isinstance(outputs, int)):
        raise InputValueError(f"outputs={outputs!r}, expected 'sum', 'full' or the number of an output")
    with audited.measuring([x] if x2 is None else [x, x2], keep_weights=True) as measurement:
        measurement.refuse_no_gradient(of_example=True)
        found = weight_matrices(measurement.example())
        names = select_layers(found, [layer])
        if len(names) != 1:
            raise InputValueError(f"layer={layer!r} is {', '.join(names)}; expected one of them")
        classes = range(measurement.classes) if isinstance(outputs, str) else [outputs]
        if isinstance(outputs, int) and not 0 <= outputs < measurement.classes:
            raise InputValueError(f"outputs={outputs}, expected an output between 0 and {measurement.classes - 1}")
        budget = byte_budget(audited.request.memory, measurement.device)
        rows = [_rows(measurement, batch, names[0], classes, budget, found) for batch in measurement.batches]
        first, second = rows[0], rows[-1]
        _refuse_shapes(first, second, outputs, positions, budget)
        places = ("ptk", "qsk") if positions else ("ptk", "qtk")
        kept = "ptqs" if positions else "pq"
        if outputs == "full":
            return torch.einsum(f"c{places[0]},d{places[1]}->{kept}cd", first, second)
        return torch.einsum(f"c{places[0]},c{places[1]}->{kept}", first, second)


def _refuse_shapes(first: Tensor, second: Tensor, outputs: int | str, positions: bool, budget: int) -> None:
    """Positions that do not match, and kernels that do not fit."""
    if not positions and first.shape[2] != second.shape[2]:
        raise InputValueError(
            f"x has {first.shape[2]} positions and x2 {second.shape[2]}, expected as many; or pass positions=True"
        )
    size = first.shape[1] * second.shape[1] * (first.shape[2] * second.shape[2] if positions else 1)
    needed = size * (len(first) * len(second) if outputs == "full" else 1) * first.element_size()
    if needed > 0.5 * budget:
        raise MemoryBudgetError(
            f"the kernel takes {readable_bytes(needed)}, expected at most {readable_bytes(0.5 * budget)}; take fewer "
            "samples, outputs='sum' or positions=False, or raise memory="
        )


def _rows(
    measurement: Measurement,
    batch: ModelWithInputs,
    name: str,
    classes: Sequence[int],
    budget: int,
    like: WeightMatrices,
) -> Tensor:
    """df/dh of every sample: (C, P, T, k)."""
    pieces = []
    for samples in sample_blocks(batch.samples, samples_within(measurement, 0.2 * budget)):
        here = PreactivationGradients(measurement, batch, samples.start, samples.stop, like)
        one = here.weight_matrix(name)
        needed = len(classes) * batch.samples * one.positions * len(one.weight) * measurement.dtype.itemsize
        if needed > 0.4 * budget:
            raise MemoryBudgetError(
                f"the gradients at {name or 'the model'} take {readable_bytes(needed)}, expected at most "
                f"{readable_bytes(0.4 * budget)}; take fewer samples or one output, or raise memory="
            )
        identity = torch.eye(measurement.classes, dtype=torch.float64)
        pieces.append(torch.stack([here.at([name], identity[c])[name] for c in classes]))
    if len({piece.shape[2] for piece in pieces}) > 1:
        raise InputValueError(f"{name or 'the model'} has different numbers of positions for different samples")
    return torch.cat(pieces, 1)
