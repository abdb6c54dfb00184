"""What can be measured at all, said before anything runs."""

import fnmatch
from collections.abc import Sequence

from torch import nn

from featlearn.capture.probe import Inputs, describe, tensors_in
from featlearn.errors import InputTypeError, InputValueError, UnsupportedModelError


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile, DataParallel and DistributedDataParallel."""
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {describe(model)}, expected a torch.nn.Module; wrap a function in a module")
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        inner = model.module if isinstance(model, wrappers) else model._orig_mod
        assert isinstance(inner, nn.Module)
        model = inner
    return model


def refuse_unmeasurable(model: nn.Module) -> None:
    """Modules that rewrite themselves in a forward pass, or have no weights yet."""
    for name, part in model.named_modules():
        where = f"{name or 'the model'} ({type(part).__name__})"
        tensors = (*part._parameters.values(), *part._buffers.values())
        if any(nn.parameter.is_lazy(tensor) for tensor in tensors):
            raise UnsupportedModelError(f"{where} is not initialised yet; run the model once on a batch first")
        if any(tensor is not None and tensor.device.type == "meta" for tensor in tensors):
            raise UnsupportedModelError(f"{where} is on the meta device and has no weights; load them first")
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            if part.max_norm is not None:
                raise UnsupportedModelError(
                    f"{where} has max_norm={part.max_norm}: a forward pass rewrites its weights; expected max_norm=None"
                )
            if part.scale_grad_by_freq:
                raise UnsupportedModelError(
                    f"{where} has scale_grad_by_freq=True: its gradients depend on the batch; expected False"
                )


def trainable_parameters(model: nn.Module, patterns: str | Sequence[str] | None = None) -> dict[str, nn.Parameter]:
    """Trainable parameters by their first `named_parameters()` name, those that match any of the globs."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise InputValueError(
            "the model has no trainable parameters, expected at least one with requires_grad=True; "
            "a tangent kernel of frozen parameters is zero"
        )
    return {name: trainable[name] for name in matching(list(trainable), patterns, "parameters", "trainable parameter")}


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


def refuse_other_device(model: nn.Module, x: Inputs, name: str) -> None:
    """Inputs on another device than a model that lives on one device alone."""
    homes = {p.device for p in model.parameters()}
    strangers = {tensor.device for tensor in tensors_in(x)} - homes
    if len(homes) == 1 and strangers:
        (home,) = homes
        raise InputValueError(
            f"{name} is on {', '.join(map(str, strangers))}, expected {home}, where the model is; "
            f"move it: {name}.to({str(home)!r})"
        )


def refuse_other_dtype(model: nn.Module, x: Inputs, name: str) -> None:
    """Floating point inputs of another precision than all of the weights."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    given = {tensor.dtype for tensor in tensors_in(x) if tensor.is_floating_point()}
    if len(kinds) == 1 and given and not given & kinds:
        raise InputTypeError(
            f"{name} is {' and '.join(map(str, given))}, expected {kinds.pop()} as the weights are; "
            f"cast it, or pass dtype= to measure both in that precision"
        )
