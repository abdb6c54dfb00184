"""The empirical tangent kernel of any network, exactly."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn.audited_model import AuditedModel, Settings
from featlearn.contraction.kernel_sum import Kernels
from featlearn.contraction.tensor_sketch import Sketch
from featlearn.distributed.sharded_model import whole_tensors
from featlearn.errors import ChangedOutputsError, InputValueError
from featlearn.gradients.directions import Outputs, output_directions
from featlearn.kernel.execution import checked_rates, measured_kernels
from featlearn.linalg.estimate import Estimate
from featlearn.linalg.stored_kernel import StoredKernel
from featlearn.measurement import Measurement
from featlearn.network.inputs import Inputs
from featlearn.network.isolation import collector_paused
from featlearn.planning.plan import KernelCall
from featlearn.signatures import name_keywords

AnyKernel = Tensor | Estimate | StoredKernel


class CallOptions(TypedDict, total=False):
    """Keyword arguments of `Session.ntk` that do not change the type of the result."""

    outputs: Outputs
    optimizer: Optimizer | None
    verify: bool


class KernelOptions(Settings, CallOptions, total=False):
    """The same of `fl.ntk`."""

    x2: Inputs | None


@overload
def ntk(
    model: nn.Module, x: Inputs, *, by: Literal["network"] = "network", **options: Unpack[KernelOptions]
) -> Tensor: ...
@overload
def ntk(
    model: nn.Module, x: Inputs, *, by: Literal["layer", "parameter"], **options: Unpack[KernelOptions]
) -> Kernels: ...
@overload
def ntk(
    model: nn.Module, x: Inputs, *, by: Literal["network"] = "network", sketch: Sketch, **options: Unpack[KernelOptions]
) -> Estimate: ...
@overload
def ntk(
    model: nn.Module, x: Inputs, *, by: Literal["layer", "parameter"], sketch: Sketch, **options: Unpack[KernelOptions]
) -> dict[str, Estimate]: ...
@overload
def ntk(
    model: nn.Module,
    x: Inputs,
    *,
    by: Literal["network"] = "network",
    out: str | Path,
    out_dtype: torch.dtype | None = None,
    **options: Unpack[KernelOptions],
) -> StoredKernel: ...
@overload
def ntk(
    model: nn.Module,
    x: Inputs,
    *,
    by: Literal["layer", "parameter"],
    out: str | Path,
    out_dtype: torch.dtype | None = None,
    **options: Unpack[KernelOptions],
) -> dict[str, StoredKernel]: ...
@name_keywords("The kernel does not depend on targets, so drop `y`.")
def ntk(
    model: nn.Module,
    x: Inputs,
    *,
    x2: Inputs | None = None,
    outputs: Outputs = "mean",
    by: str = "network",
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: Sketch | None = None,
    out: str | Path | None = None,
    out_dtype: torch.dtype | None = None,
    **settings: Unpack[Settings],
) -> AnyKernel | Mapping[str, AnyKernel]:
    """The empirical neural tangent kernel K = J J^T of a network, exact for every trainable parameter.

    See Shan & Bordelon 2021a, Eq. 2, 15; 2021b, Eq. 2, 8; Atanasov et al. 2022, Eq. 91 (with `optimizer`).

    A `fl.Session` used once. Loops that measure a network again and again hold a Session, which audits it once.

    Args:
        model: any `nn.Module`, measured in eval mode and left as it was, bit for bit.
        x: a tensor, a tuple (called as `model(*x)`) or a mapping (`model(**x)`), batch first, P samples.
        x2: a second probe with P2 samples for a cross kernel; None for the kernel of `x` with itself.
        outputs: `"mean"` (1/C sum_c K^cc) and `"sum"`: (P, P2); `"each"`: (C, P, P2); `"full"`: (P, P2, C, C) with axes
            K_{mu nu c c'}; one backward pass for each of the C outputs. An int c: K^cc. `fl.Directions(k)`: an unbiased
            estimate of `"sum"` from k random directions, for large C.
        readout: Map from the model's output to (P,) or (P, C): `readout(output)` or `readout(output, x)`. By default
            the output or its logits. For logits (P, T, V) of a language model it is `fl.readouts.next_token()`, the
            mean log-probability of a sequence's targets: `labels` or `targets` in x, or the ids shifted by one. This
            is printed.
        by: `"network"`: one tensor; `"layer"`: a dict by `named_modules()` name; `"parameter"`: a dict by
            `named_parameters()` name. The parts add up to the network.
        parameters: a glob such as `"layers.*.weight"`, or a list of them; only matching parameters count.
        optimizer: the kernel of the update it is about to make, sum_j eta_j d_j f d_j f' (Atanasov et al. 2022, Eq.
            91), for SGD, Adam, AdamW, RMSprop and Adagrad: learning rates and second moments are inside; momentum and
            weight decay are not. Adaptive ones must have made a step.
        dtype: `torch.float64` measures a copy of the network in double. Without it the network is measured in its own
            precision, and kernels of half-precision networks are accumulated in float32.
        memory: a byte budget such as `"2GiB"`; by default half of what is free. Chunks follow from it. What torch's own
            ops take while they run (tens of MiB on a CPU) comes on top.
        verify: compare v^T K w with (J^T v) . (J^T w) from independent backward passes, parameter by parameter and for
            every 64 samples, and raise if they differ. Two forward and three backward passes for each output.
        sketch: `fl.Sketch(k=4096, repeats=4)` estimates the kernel from k random sums of each gradient's entries, for
            networks and numbers of samples where the exact kernel takes too long: `outputs` `"mean"`, `"sum"` or an
            int. Two standard errors hold an entry in about 95 of 100 draws.
        out: path of a `.npy` file to write the kernel to, for kernels larger than memory. Tiles are computed one after
            the other, and a call that was killed goes on where it stopped when it is made again. `outputs` is
            `"mean"`, `"sum"`, an int or `fl.Directions`; ranks of a `group` write their tiles into one file.
        out_dtype: precision in the file; None for that of the kernel. `torch.float16` halves the file:
            `StoredKernel.rounding` says what that changed.
        group: `"world"` or a process group of `torch.distributed` whose ranks divide the samples. Every rank makes the
            same call with all samples, and gets a DTensor, `Shard(0)`, that holds the rows of its own ones (of `"each"`
            the kernels of some outputs): `.to_local()` has them, `.full_tensor()` gathers all. None divides nothing.

    Returns:
        A tensor on the outputs' device, or a dict of them; parameters of the root module itself are the layer `""`.
        With `sketch` an `fl.Estimate` whose value and stderr are (P, P2), or a dict of them. With `out` an
        `fl.StoredKernel`, or a dict of them.

    Raises:
        FeatlearnError: for anything that cannot be measured exactly, with what to do about it.
    """
    return ntk_of(  # type: ignore[call-overload,misc,no-any-return]
        AuditedModel(model, **settings),
        x2,
        x=x,
        outputs=outputs,
        by=by,
        optimizer=optimizer,
        verify=verify,
        sketch=sketch,
        out=out,
        out_dtype=out_dtype,
    )


@overload
def ntk_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    by: Literal["network"] = "network",
    **options: Unpack[CallOptions],
) -> Tensor: ...
@overload
def ntk_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    by: Literal["layer", "parameter"],
    **options: Unpack[CallOptions],
) -> Kernels: ...
@overload
def ntk_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    by: Literal["network"] = "network",
    sketch: Sketch,
    **options: Unpack[CallOptions],
) -> Estimate: ...
@overload
def ntk_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    by: Literal["layer", "parameter"],
    sketch: Sketch,
    **options: Unpack[CallOptions],
) -> dict[str, Estimate]: ...
@overload
def ntk_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    by: Literal["network"] = "network",
    out: str | Path,
    out_dtype: torch.dtype | None = None,
    **options: Unpack[CallOptions],
) -> StoredKernel: ...
@overload
def ntk_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    by: Literal["layer", "parameter"],
    out: str | Path,
    out_dtype: torch.dtype | None = None,
    **options: Unpack[CallOptions],
) -> dict[str, StoredKernel]: ...
def ntk_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    outputs: Outputs = "mean",
    by: str = "network",
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: Sketch | None = None,
    out: str | Path | None = None,
    out_dtype: torch.dtype | None = None,
) -> AnyKernel | Mapping[str, AnyKernel]:
    """Compute the tangent kernel: see `fl.ntk`. `x` replaces the inputs of the Session in this call."""
    x, ranks = audited.inputs(x), audited.request.group
    if out is not None or out_dtype is not None:
        from featlearn.kernel.stored_tiles import stored_kernels

        return stored_kernels(
            audited,
            x,
            x2,
            outputs=outputs,
            by=by,
            optimizer=optimizer,
            verify=verify,
            sketch=sketch,
            out=out,
            out_dtype=out_dtype,
        )
    if sketch is not None:
        from featlearn.kernel.sketched_kernel import checked_sketch, sketched_kernels

        with ranks.together():  # one rank alone may ask for it
            checked_sketch(sketch, outputs, verify)
            if ranks.given:
                raise InputValueError(
                    "sketch= with group=, expected one of them: sketched kernels are not divided among ranks"
                )
    if ranks.given:
        from featlearn.kernel.divided_kernel import divided_kernels

        divided = divided_kernels(
            audited, x, x2, outputs, by, verify, lambda: checked_rates(audited, outputs, by, optimizer, verify)
        )
        return divided[""] if by == "network" else divided
    if rates := checked_rates(audited, outputs, by, optimizer, verify):
        rates = whole_tensors(rates)

    def measure(measurement: Measurement) -> Kernels | dict[str, Estimate]:
        directions = output_directions(outputs, measurement.classes)
        memory = audited.request.memory
        call = KernelCall(directions=directions, by=by, rates=rates, memory=memory, verify=verify)
        if sketch is None:
            return measured_kernels(measurement, audited.plans, call)
        return sketched_kernels(measurement, sketch, call)

    inputs = [x] if x2 is None else [x, x2]
    try:
        kernels = _measure(audited, inputs, measure)
    except ChangedOutputsError:  # a flag of the model, say, since an earlier call
        audited.forget()
        kernels = _measure(audited, inputs, measure)
    return kernels[""] if by == "network" else kernels


def _measure(
    audited: AuditedModel, inputs: Sequence[Inputs], measure: Callable[[Measurement], Kernels | dict[str, Estimate]]
) -> Kernels | dict[str, Estimate]:
    # Paused until all that was measured with is gone: the collector would take it for lasting.
    with collector_paused(), audited.measuring(inputs, by_layer=True) as measurement:
        return measure(measurement)
