"""The linearization gap: how much of the change of a network's outputs its linearization at the start misses."""

from collections.abc import Mapping
from typing import Literal, TypedDict, Unpack, overload

from torch import Tensor, nn

from featlearn.audited_model import AuditedModel, Settings
from featlearn.distributed.sharded_model import whole_weights
from featlearn.errors import InputValueError
from featlearn.linalg.estimate import Estimate
from featlearn.linearization.two_states import Gap, TwoStates
from featlearn.network.checks import unwrapped
from featlearn.network.inputs import Inputs, batch_size
from featlearn.planning.memory import refuse_over_budget, weight_bytes
from featlearn.signatures import name_keywords


class LinearizationGap(float):
    """A linearization gap: a number, with its errors and with what it was measured through."""

    estimate: Estimate
    """The number with its standard error for other samples of the same kind, rounding included."""
    plain: float
    """The gap of the outputs themselves, in the parameters themselves."""
    rounding: float
    """Rounding error of the number."""
    link: tuple[str, ...]
    """Nonlinear ops of the output function through which it was measured; empty where there are none."""
    merged: tuple[tuple[str, ...], ...]
    """Parameters whose product stands for one weight, in which the network was linearized."""

    @classmethod
    def of(cls, gap: Gap) -> "LinearizationGap":
        """Return the numbers of a gap on some samples."""
        number = cls(gap.value)
        number.estimate = Estimate(gap.value, gap.error, len(gap.change))
        number.plain, number.rounding = gap.plain.value, gap.relative_rounding
        number.link, number.merged = gap.division.link, tuple(one.parameters for one in gap.division.merged)
        return number


State = Mapping[str, Tensor]
"""A state dict."""


class CallOptions(TypedDict, total=False):
    """Keyword arguments of `Session.linearization_gap` that do not change the type of the result."""

    link: bool
    effective: bool


class GapOptions(Settings, CallOptions, total=False):
    """The same of `fl.linearization_gap`."""


@overload
def linearization_gap(
    model: nn.Module, x: Inputs, initial: State, *, by: Literal["network"] = "network", **options: Unpack[GapOptions]
) -> LinearizationGap: ...
@overload
def linearization_gap(
    model: nn.Module, x: Inputs, initial: State, *, by: Literal["layer"], **options: Unpack[GapOptions]
) -> dict[str, float]: ...
@name_keywords()
def linearization_gap(
    model: nn.Module,
    x: Inputs,
    initial: State,
    *,
    by: str = "network",
    link: bool = True,
    effective: bool = True,
    **settings: Unpack[Settings],
) -> LinearizationGap | dict[str, float]:
    """Measure the share of the change of a network's outputs that its linearization at an earlier state misses.

    It is 0 for lazy training, and near 1 where features were learned:
    ``|f - g(h0 + J0 (theta - theta0))| / |f - f0|``. Here f and f0 are the outputs now and then, and f = g(h). The
    output function g is all that follows the last op with a parameter: a softmax, a sigmoid, a readout that takes a
    log-probability. J0 is the Jacobian of h at the earlier state. So the gap of a linear model behind such a function
    is 0. Where no nonlinear op follows h, it is the gap of the outputs. The same holds where g is not known as an
    output function: ops such as `log_ndtr`, sums of nonlinear ops, and several heads with functions of their own.

    Outputs are centered over the samples, so that a constant that all outputs learn does not count. All terms have the
    buffers of now, so that averages of BatchNorm that settle do not count. No labels, loss, or optimizer are needed.
    Half precision is measured in float32.

    >>> gap = fl.linearization_gap(model, x, initial)
    >>> float(gap), gap.plain, gap.link  # 0.03, 0.48, ("LogSoftmax",)
    >>> fl.linearization_gap(model, x, initial, by="layer")  # {"0": 0.01, "2": 0.02}

    Args:
        model: Module to measure, in eval mode.
        x: Batch with the sample axis first, at least 2 samples.
        initial: The `state_dict()` of an earlier state, cloned when it was taken.
        by: `"network"` for one number, `"layer"` for a dict of parts that add up to it. Layers are moved from `initial`
            to now one after the other. The part of a layer is what its linearization misses of the change that it
            makes, along all that is missed, as a mean over the orders first to last and last to first. This takes
            three more passes for every layer, seven where a nonlinear op follows h.
        link: False linearizes the outputs themselves.
        effective: False linearizes in the parameters themselves. By default products of parameters that stand for one
            weight count as that weight: weights formed before a sample meets them (weight norm, factored weights),
            and adapters beside a frozen map with the same input and output. Layers in sequence are never merged.
        **settings: As for `fl.ntk`, without `parameters` and `group`.

    Returns:
        The gap, a float with `.estimate` (its standard error), `.plain` (with `link=False` and
        `effective=False`), `.rounding`, `.link` (the nonlinear ops of g), and `.merged` (the parameters of each
        effective weight). Units that are added up behind a nonlinear op are hidden units: there g is the
        identity and `.link` is empty. nan where the outputs have not changed by more than rounding.
    """
    audited = AuditedModel(model, **settings)
    return linearization_gap_of(audited, initial, x=x, by=by, link=link, effective=effective)  # type: ignore[call-overload,no-any-return]


@overload
def linearization_gap_of(
    audited: AuditedModel,
    initial: State,
    *,
    x: Inputs | None = None,
    by: Literal["network"] = "network",
    **options: Unpack[CallOptions],
) -> LinearizationGap: ...
@overload
def linearization_gap_of(
    audited: AuditedModel,
    initial: State,
    *,
    x: Inputs | None = None,
    by: Literal["layer"],
    **options: Unpack[CallOptions],
) -> dict[str, float]: ...
def linearization_gap_of(
    audited: AuditedModel,
    initial: State,
    *,
    x: Inputs | None = None,
    by: str = "network",
    link: bool = True,
    effective: bool = True,
) -> LinearizationGap | dict[str, float]:
    """Measure what the linearization at an earlier state misses: see `fl.linearization_gap`."""
    x = audited.inputs(x)
    if by not in ("network", "layer"):
        raise InputValueError(f"by={by!r}, expected 'network' or 'layer'")
    if batch_size(x) < 2:
        raise InputValueError("x has 1 sample, expected at least 2: outputs are centered over the samples")
    request, model = audited.request, unwrapped(audited.model)
    request.refuse("linearization_gap", "parameters", "group")
    refuse_over_budget(request.memory, weight_bytes(model), "a copy of the weights")
    with whole_weights(unwrapped(audited.model)):
        states = TwoStates(audited, initial, link=link, effective=effective)
        return states.parts(x) if by == "layer" else LinearizationGap.of(states.gap(x))
