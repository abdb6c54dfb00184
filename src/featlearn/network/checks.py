"""What can be measured at all, said before anything runs."""

import fnmatch
from collections.abc import Sequence

from torch import Tensor, nn

from featlearn.errors import InputTypeError, InputValueError, UnsupportedModelError
from featlearn.network.inputs import Inputs, Readout, batch_size, tensors_in
from featlearn.network.state import Inventory
from featlearn.shapes import describe
from featlearn.torch_internals import (
    buffer_table,
    compiled_from,
    forward_hooks,
    in_transform,
    is_fake,
    makes_fake_tensors,
    parameter_table,
)


def admitted(
    model: nn.Module,
    inside: Inventory,
    inputs: Sequence[Inputs],
    readout: Readout | None,
    parameters: str | Sequence[str] | None,
) -> tuple[dict[str, Tensor], list[int]]:
    """Refuse what can be refused before anything runs; return the parameters that count and the sizes of the batches.

    `inside`: what the model holds inside its wrappers.
    """
    if in_transform():
        raise UnsupportedModelError("a measurement inside a torch.func transform is not possible; call it outside")
    types = {type(tensor) for tensor in (*inside.tensors, *tensors_in(list(inputs)))}
    if any(map(is_fake, types)) or makes_fake_tensors():
        raise UnsupportedModelError(
            "the model or its inputs are fake tensors, expected tensors with values; build and measure the model "
            "outside of FakeTensorMode"
        )
    if readout is not None and not callable(readout):
        raise InputTypeError(f"readout is {readout!r}, expected a function of the model's output, or of (output, x)")
    sizes = [batch_size(x, name) for x, name in zip(inputs, ("x", "x2"), strict=False)]
    refuse_unmeasurable(inside)
    chosen = trainable_parameters(model, parameters, inside if inside.model is model else None)
    for x, name in zip(inputs, ("x", "x2"), strict=False):
        refuse_other_device(inside, x, name)
    return chosen, sizes


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile, DataParallel and DistributedDataParallel."""
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {describe(model)}, expected a torch.nn.Module; wrap a function in a module")
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            if type(model) not in (nn.DataParallel, nn.parallel.DistributedDataParallel) or any(forward_hooks(model)):
                raise UnsupportedModelError(
                    f"the wrapper {type(model).__name__} changes what its module computes (hooks, or a forward of its "
                    "own), expected a plain one; measure model.module"
                )
            inner = model.module
        else:
            compiled = compiled_from(model)
            if compiled is None or any(forward_hooks(model)):
                return model
            inner = compiled
        model = inner


def refuse_unmeasurable(inside: Inventory) -> None:
    """Refuse modules that rewrite themselves in a forward pass, or have no weights yet."""
    odd = any(type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta for tensor in inside.tensors)
    if not odd and not any(issubclass(kind, _EMBEDDINGS) or kind.__name__ == _FSDP1 for kind in inside.types):
        return
    for part in inside.modules:
        if reason := _obstacle(part):
            name = next(name for name, each in inside.model.named_modules() if each is part)
            raise UnsupportedModelError(f"{name or 'the model'} ({type(part).__name__}) {reason}")


_EMBEDDINGS, _FSDP1 = (nn.Embedding, nn.EmbeddingBag), "FullyShardedDataParallel"


def _obstacle(part: nn.Module) -> str | None:
    """Return why a module cannot be measured, None if it can."""
    tensors = [t for t in (*parameter_table(part).values(), *buffer_table(part).values()) if t is not None]
    if any(map(nn.parameter.is_lazy, tensors)):
        return "is not initialized yet; run the model once on a batch first"
    if any(hasattr(tensor, "placements") for tensor in tensors) or type(part).__name__ == _FSDP1:
        return (
            "is spread over ranks otherwise than by fully_shard (tensor parallel, or FSDP1), expected whole weights: "
            "what a rank computes with a part of them does not show which sample it belongs to; gather them into a "
            "plain model first"
        )
    if any(tensor.is_meta for tensor in tensors):
        return "is on the meta device and has no weights; load them first"
    if isinstance(part, _EMBEDDINGS) and part.max_norm is not None:
        return f"has max_norm={part.max_norm}: a forward pass rewrites its weights; expected max_norm=None"
    if isinstance(part, _EMBEDDINGS) and part.scale_grad_by_freq:
        return "has scale_grad_by_freq=True: its gradients depend on the batch; expected False"
    return None


def trainable_parameters(
    model: nn.Module, patterns: str | Sequence[str] | None = None, inside: Inventory | None = None
) -> dict[str, Tensor]:
    """Trainable parameters by their first `named_parameters()` name, those that match any of the globs.

    `inside`: what the model holds, where that is known.
    """
    named = model.named_parameters() if inside is None else inside.named_parameters()
    trainable: dict[str, Tensor] = {name: p for name, p in named if p.requires_grad}
    if not trainable:
        raise InputValueError(
            "the model has no trainable parameters, expected at least one with requires_grad=True; "
            "a tangent kernel of frozen parameters is zero"
        )
    if patterns is None:
        return trainable
    # A tied parameter answers to each of its names.
    first = {id(p): name for name, p in trainable.items()}
    aliases = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if id(p) in first}
    matched = {aliases[name] for name in matching(list(aliases), patterns, "parameters", "trainable parameter")}
    return {name: p for name, p in trainable.items() if name in matched}


def matching(names: list[str], patterns: str | Sequence[str] | None, argument: str, kind: str) -> list[str]:
    """The names that match any of the globs; None matches all."""
    if patterns is None:
        return names
    globs = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(globs, list | tuple | set | frozenset) or not globs or not all(isinstance(g, str) for g in globs):
        raise InputTypeError(f"{argument} is {patterns!r}, expected a glob such as 'layers.*' or a list of globs")
    for glob in globs:
        if not any(fnmatch.fnmatchcase(name, glob) for name in names):
            named = [name for name in names if name]
            some = ", ".join(named[:8]) + (f" and {len(named) - 8} more" if named[8:] else "")
            raise InputValueError(f"{argument}={glob!r} matches no {kind}, expected some of {some}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


def refuse_other_device(inside: Inventory, x: Inputs, name: str) -> None:
    """Refuse inputs on another device than a model that lives on one device alone."""
    homes = {parameter.device for parameter in inside.parameters}
    others = {tensor.device for tensor in tensors_in(x)} - homes
    if len(homes) == 1 and others:
        (home,) = homes
        raise InputValueError(
            f"{name} is on {', '.join(map(str, others))}, expected {home}, where the model is; "
            f"move it: {name}.to({str(home)!r})"
        )
