"""Models sharded by FSDP2 hold all of their weights while they are measured; afterwards everything is as before."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from featlearn.distributed.fsdp_internals import STATE_HOOKS, STATE_KEY, ShardedModule, is_own_hook, sharded_modules
from featlearn.errors import UnsupportedModelError

T = TypeVar("T")


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Every rank enters: weights are gathered once, and what was sharded is sharded again; nothing for other models.

    Meanwhile the modules are plain ones: hooks of FSDP only cast, as its mixed precision asks for.
    """
    parts = sharded_modules(model)
    if any(not part.idle for part in parts):
        raise UnsupportedModelError(
            "the model is in the middle of a forward or backward pass of FSDP, expected a call between them; measure "
            "between steps"
        )
    before = [part for part in parts if _is_sharded(part.module, parts)]
    tables = [table for part in parts for table in (part.module._forward_pre_hooks, part.module._forward_hooks)]
    saving = [getattr(inner, name) for inner in model.modules() for name in STATE_HOOKS] if parts else []
    tables += saving
    kept = [dict(table) for table in tables]
    classes = [type(part.module) for part in parts]
    states = [{key: v for key, v in vars(part.module).items() if key.startswith(STATE_KEY)} for part in parts]
    try:
        for part in parts:
            part.module.unshard()
        for part, state in zip(parts, states, strict=True):
            _replace_hooks(part)
            part.module.__class__ = part.original
            for key in state:
                del vars(part.module)[key]
        for table in saving:  # a copy of the model has no shards
            for key in [key for key, hook in table.items() if is_own_hook(hook)]:
                del table[key]
        yield
    finally:
        for part, kind, state in zip(parts, classes, states, strict=True):
            part.module.__class__ = kind
            vars(part.module).update(state)
        for table, hooks in zip(tables, kept, strict=True):
            if list(table.items()) != list(hooks.items()):
                table.clear()
                table.update(hooks)
        for part in before:
            part.module.reshard()


def whole_tensors(given: Mapping[str, T]) -> dict[str, T]:
    """Tensors gathered from the ranks that hold parts of them; all else as it is. Every rank calls it."""
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in given.items()}


def _is_sharded(module: nn.Module, parts: list[ShardedModule]) -> bool:
    """Whether the weights that belong to this module itself are spread over ranks now."""
    nested = {id(part.module) for part in parts}
    stack, own = [module], []
    while stack:
        inner = stack.pop()
        own += [parameter for parameter in inner._parameters.values() if parameter is not None]
        stack += [child for child in inner.children() if id(child) not in nested]
    return any(hasattr(parameter, "placements") for parameter in own)


def _replace_hooks(part: ShardedModule) -> None:
    """Casts in the place of hooks that gather, cast and drop; nothing where there is nothing to cast."""

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), part.input_dtype)

    def cast_outputs(_: nn.Module, args: Any, outputs: Any) -> Any:
        return _cast(outputs, part.output_dtype)

    module = part.module
    _replace(module._forward_pre_hooks, part.pre_forward, cast_inputs if part.input_dtype else None)
    _replace(module._forward_hooks, part.post_forward, cast_outputs if part.output_dtype else None)


def _replace(table: dict[int, Any], hook: Callable[..., Any], new: Callable[..., Any] | None) -> None:
    for key, found in list(table.items()):
        if found == hook:
            if new is None:
                del table[key]
            else:
                table[key] = new
            return
    raise UnsupportedModelError(
        f"torch {torch.__version__} hooks this sharded module in another way (several modules in one call of "
        "fully_shard, say), expected fully_shard(module) for each; gather the weights into a plain model"
    )


def _cast(thing: Any, to: torch.dtype | None) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(to) if t.is_floating_point() else t, thing)
