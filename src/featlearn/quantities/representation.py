"""Gram matrices of what each layer takes in or gives out: the empirical NNGP kernels."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from featlearn.audited_model import AuditedModel
from featlearn.contraction.factors import Dense
from featlearn.contraction.kernel_sum import Captured, KernelSum
from featlearn.distributed.sharded_model import whole_weights
from featlearn.errors import InputValueError, MemoryBudgetError, UnsupportedModelError
from featlearn.graph.graph import splits
from featlearn.network.checks import (
    matching,
    refuse_other_device,
    refuse_unmeasurable,
    unwrapped,
)
from featlearn.network.copies import copied
from featlearn.network.inputs import Inputs, ModelWithInputs, batch_size, cast_inputs, tensors_in
from featlearn.network.isolation import undisturbed
from featlearn.network.state import Inventory
from featlearn.ops import Layout
from featlearn.planning.memory import byte_budget, readable_bytes
from featlearn.planning.plan import sample_blocks
from featlearn.signatures import name_keywords

Layouts = dict[str, list[Layout]]
"""Layer -> the sample axis of what it saw in each of its calls."""


@name_keywords()
def representation_kernels(
    model: nn.Module,
    x: Inputs,
    *,
    x2: Inputs | None = None,
    of: Literal["input", "output"] = "input",
    layers: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    memory: str | int | None = None,
) -> dict[str, Tensor]:
    """Gram matrix of each layer's input or output, positions flattened: the empirical NNGP kernels.

    Args:
        model: any `nn.Module`, measured in eval mode and left as it was.
        x: probe inputs, P samples, as for `fl.ntk`.
        x2: a second probe with P2 samples; None for `x` with itself.
        of: what each layer takes (its first tensor) or gives (its first tensor).
        layers: globs of `named_modules()` names; by default every module that has parameters of its own, is called, and
            sees the samples one by one. Weights used without calling their module, and tables that no sample enters
            (position embeddings), have no representation and are left out; named outright, they are an error.
        dtype: `torch.float64` measures a copy of the network in double.
        memory: byte budget, as for `fl.ntk`.

    Returns:
        Layer name -> (P, P2): K[i, j] = sum over positions and features of h_i h_j, no division. A layer called several
        times counts all of its calls, one after the other.
    """
    audited = AuditedModel(model, dtype=dtype, memory=memory)
    return representation_kernels_of(audited, x2, x=x, of=of, layers=layers)


def representation_kernels_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    of: Literal["input", "output"] = "input",
    layers: str | Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Compute Gram matrices of each layer's input or output: see `fl.quantities.representation_kernels`."""
    if of not in ("input", "output"):
        raise InputValueError(f"of={of!r}, expected 'input' or 'output'")
    x, model, request = audited.inputs(x), unwrapped(audited.model), audited.request
    request.refuse("representation_kernels", "readout", "parameters", "group")
    inputs = [x] if x2 is None else [x, x2]
    sizes = [batch_size(part, name) for part, name in zip(inputs, ("x", "x2"), strict=False)]
    with whole_weights(model), ExitStack() as stack:
        inside = Inventory(model)
        refuse_unmeasurable(inside)
        for part, name in zip(inputs, ("x", "x2"), strict=False):
            refuse_other_device(inside, part, name)
        named = _selected_layers(audited.model, model, layers)
        isolation = stack.enter_context(undisturbed(inside))
        stack.enter_context(torch.no_grad())
        twin = copied(model, request.dtype) if inside.needs_copy(request.dtype) else model
        with undisturbed(Inventory(twin)), torch.no_grad():
            batches = tuple(
                ModelWithInputs(twin, cast_inputs(part, request.dtype), size, None, isolation.rewind)
                for part, size in zip(inputs, sizes, strict=True)
            )
            modules = {name: twin.get_submodule(inner) for name, inner in named.items()}

            def measure(*several: ModelWithInputs) -> dict[str, Tensor]:
                return _kernels(several, modules, of, layers is not None, request.memory)

            kernels = measure(*batches)
            if isolation.random.has_drawn():
                from featlearn.audit.refusals import refuse_random_outputs  # late: few models need it

                refuse_random_outputs(batches, isolation.random, lambda batch: list(measure(batch).values()))
            return kernels


def outputs_with_features(batch: ModelWithInputs, chunk: int = 256) -> tuple[Tensor, Tensor | None]:
    """(P, C) outputs, and (P, N) what enters the last layer, flattened; None where its rows are no features of samples.

    The last layer is the module with a weight matrix that is called last. Call this with the model in isolation.
    """
    layers = {
        name: part
        for name, part in batch.model.named_modules()
        if any(p.dim() > 1 for p in part.parameters(recurse=False))
    }
    outputs, features = [], []
    for indices in torch.arange(batch.samples, device="cpu").split(chunk):
        with _recorded(layers, "input", last=True) as values:
            outputs.append(batch.outputs(indices).detach())
        last = next((calls[-1] for calls in values.values() if calls), None)
        if last is not None and len(last) == len(indices):
            features.append(last.reshape(len(last), -1))
    whole = len(features) == len(outputs) and len({part.shape[1] for part in features}) == 1
    return torch.cat(outputs), torch.cat(features) if whole else None


def _selected_layers(wrapped: nn.Module, model: nn.Module, layers: str | Sequence[str] | None) -> dict[str, str]:
    """Return names in the user's module -> names in the module inside its wrappers."""
    places = {id(part): name for name, part in model.named_modules()}
    inside = {name: places[id(part)] for name, part in wrapped.named_modules() if id(part) in places}
    if layers is not None:
        return {name: inside[name] for name in matching(list(inside), layers, "layers", "module")}
    found = {
        name: inner
        for name, inner in inside.items()
        if any(True for _ in model.get_submodule(inner).parameters(recurse=False))
    }
    if not found:
        raise InputValueError("the model has no layers with parameters of their own; name modules with layers=")
    return found


def _kernels(
    batches: tuple[ModelWithInputs, ...],
    layers: Mapping[str, nn.Module],
    of: str,
    explicit: bool,
    memory: str | int | None,
) -> dict[str, Tensor]:
    found = [_example(batch, layers, of, explicit) for batch in batches]
    seen = {name: values for name, values in found[0].items() if values and all(other[name] for other in found)}
    silent = [name for name in layers if name not in seen]
    if silent and (explicit or not seen):
        raise InputValueError(
            f"{', '.join(silent[:5])} {'is' if len(silent) == 1 else 'are'} not called in the forward pass, expected "
            "modules that are; name others with layers="
        )
    example, _ = next(iter(seen.values()))[0]
    dtype = torch.promote_types(example.dtype, torch.float32)
    budget = byte_budget(memory, example.device)
    samples = (batches[0].samples, batches[-1].samples)
    needed = samples[0] * samples[1] * dtype.itemsize * len(seen)
    held = samples[0] if len(batches) == 1 else sum(samples)
    widths = {name: sum(layout.before * layout.after for _, layout in values) for name, values in seen.items()}
    available = budget - needed
    smallest = max(needed / 0.9, needed + 7 * max(widths.values()) * dtype.itemsize)
    if smallest > budget:
        raise MemoryBudgetError(
            f"the kernels of {len(seen)} layers and a few samples of the widest need {readable_bytes(smallest)}, "
            f"expected at most {readable_bytes(budget)}; name fewer layers with layers=, or raise memory="
        )
    layouts: Layouts = {name: [layout for _, layout in values] for name, values in seen.items()}
    keys, symmetric = {name: name for name in seen}, len(batches) == 1
    total = KernelSum(keys, samples, "sum", dtype, example.device, symmetric=symmetric, scratch=int(0.2 * available))
    every = slice(0, 1)
    for names, size, chunk in _layer_groups(widths, available, dtype.itemsize, held, max(samples)):
        part = {name: layers[name] for name in names}
        for i in sample_blocks(samples[0], size):
            left = dict(_features(batches[0], i, part, of, layouts, chunk, dtype))
            for j in sample_blocks(samples[1], size):
                if symmetric and j.start > i.start:
                    break
                same = symmetric and i == j
                right = left if same else dict(_features(batches[-1], j, part, of, layouts, chunk, dtype))
                for name, features in left.items():
                    total.add(name, features, right[name], i, j, every)
    total.mirror(every)
    return total.kernels


def _layer_groups(
    widths: Mapping[str, int], available: int, itemsize: int, held: int, largest: int
) -> Iterator[tuple[list[str], int, int]]:
    """Yield groups of layers whose features fit together: names, samples in a block, samples in a forward pass.

    A layer too wide for all samples is alone in its group, in blocks of samples. `widths` are numbers per sample,
    `held` is the number of samples held together.
    """
    room = int(0.5 * available) // itemsize
    groups: list[list[str]] = []
    total = 0
    for name, width in widths.items():
        if not groups or (total + width) * held > room:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += width
    for names in groups:
        width = sum(widths[name] for name in names)
        block = largest if width * held <= room else max(1, room // (2 * width))
        yield names, block, max(1, min(block, int(0.15 * available) // (width * itemsize)))


def _example(
    batch: ModelWithInputs, layers: Mapping[str, nn.Module], of: str, explicit: bool
) -> dict[str, list[tuple[Tensor, Layout]]]:
    """Find the sample axis of every layer's values: the one along which another batch shows the same samples."""
    count = min(5, batch.samples)
    drawn = torch.randint(count, (count + 1,), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    with _recorded(layers, of) as whole:
        batch.call(torch.arange(count, device="cpu"))
    with _recorded(layers, of) as part:
        batch.call(drawn)
    found: dict[str, list[tuple[Tensor, Layout]]] = {}
    for name in layers:
        layouts = [_layout(a, b, count, drawn) for a, b in zip(whole[name], part[name], strict=False)]
        if None in layouts or len(whole[name]) != len(part[name]):
            if not explicit and all(torch.equal(a, b) for a, b in zip(whole[name], part[name], strict=False)):
                found[name] = []  # the same whatever the batch: no sample enters
                continue
            raise UnsupportedModelError(
                f"the {of} of {name or 'the model'} has no axis along which the samples lie one by one, expected one; "
                "leave it out with layers="
            )
        found[name] = [(a, layout) for a, layout in zip(whole[name], layouts, strict=True) if layout is not None]
    return found


def _layout(whole: Tensor, part: Tensor, count: int, drawn: Tensor) -> Layout | None:
    slack = torch.finfo(whole.dtype).eps ** 0.5 * float(whole.abs().max()) if whole.numel() else 0.0
    for layout in splits(whole.shape, count):
        if part.numel() != layout.before * len(drawn) * layout.after:
            continue
        chosen = whole.reshape(layout.before, count, layout.after)[:, drawn.to(whole.device)]
        again = part.reshape(layout.before, len(drawn), layout.after)
        if float((chosen - again).abs().max()) <= slack:
            return layout
    return None


def _features(
    batch: ModelWithInputs,
    block: slice,
    layers: Mapping[str, nn.Module],
    of: str,
    layouts: Layouts,
    chunk: int,
    dtype: torch.dtype,
) -> Captured:
    pieces: dict[str, list[Tensor]] = {name: [] for name in layers}
    for indices in torch.arange(block.start, block.stop, device="cpu").split(chunk):
        with _recorded(layers, of) as values:
            batch.call(indices)
        for name, calls in values.items():
            if len(calls) != len(layouts[name]):
                raise UnsupportedModelError(f"{name} is called a different number of times for different samples")
            flat = [
                Layout(layout.before, len(indices), layout.after).samples_first(value).to(dtype)
                for value, layout in zip(calls, layouts[name], strict=True)
            ]
            pieces[name].append(torch.cat(flat, 1))
    return ((name, Dense(torch.cat(parts)[:, None])) for name, parts in pieces.items())


@contextmanager
def _recorded(layers: Mapping[str, nn.Module], of: str, *, last: bool = False) -> Iterator[dict[str, list[Tensor]]]:
    """What every layer takes or gives, call by call, as floating point numbers: the first tensor of each call.

    `last` keeps the latest call of all layers alone, and nothing where that takes indices, as an embedding does.
    """
    values: dict[str, list[Tensor]] = {name: [] for name in layers}

    def keep(name: str, seen: Any) -> None:
        tensors = [tensor for tensor in tensors_in(seen) if tensor.dim()]
        if tensors:
            first = tensors[0].detach()
            if last:
                for calls in values.values():
                    calls.clear()
                if not first.is_floating_point():
                    return
            # A copy, because a later op may write into it.
            values[name].append(first.clone() if first.is_floating_point() else first.double())

    handles = []
    for name, layer in layers.items():

        def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            keep(name, (args, kwargs))

        def after(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            keep(name, output)

        handles.append(
            layer.register_forward_pre_hook(before, with_kwargs=True)
            if of == "input"
            else layer.register_forward_hook(after)
        )
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()
