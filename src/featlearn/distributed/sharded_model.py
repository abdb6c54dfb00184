"""Gather the weights of models sharded by FSDP2 while they are measured, and restore the shards afterwards."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from featlearn.distributed.group import RankGroup
from featlearn.errors import UnsupportedModelError
from featlearn.torch_internals import forward_hooks, map_nested, parameter_table
from featlearn.torch_internals.sharding import STATE_HOOKS, STATE_KEY, ShardedModule, is_own_hook, sharded_modules

T = TypeVar("T")


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Gather weights once, on all ranks, and shard them again afterwards; do nothing for other models.

    Meanwhile the modules are plain modules: hooks of FSDP only cast, as required by its mixed precision.
    """
    parts = idle_parts(model)
    sharded_before = [part for part in parts if _shards(part, parts)]
    tables = [table for part in parts for table in forward_hooks(part.module)]
    state_hooks = [getattr(inner, name) for inner in model.modules() for name in STATE_HOOKS] if parts else []
    tables += state_hooks
    saved = [dict(table) for table in tables]
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
        for table in state_hooks:  # a copy of the model has no shards
            for key in [key for key, hook in table.items() if is_own_hook(hook)]:
                del table[key]
        yield
    finally:
        for part, kind, state in zip(parts, classes, states, strict=True):
            part.module.__class__ = kind
            vars(part.module).update(state)
        for table, hooks in zip(tables, saved, strict=True):
            if list(table.items()) != list(hooks.items()):
                table.clear()
                table.update(hooks)
        for part in sharded_before:
            part.module.reshard()


def whole_tensors(values: Mapping[str, T]) -> dict[str, T]:
    """Gather sharded tensors, on all ranks; return other values unchanged."""
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in values.items()}


class ShardedWeights(NamedTuple):
    """Weights sharded over ranks."""

    parts: list[ShardedModule]
    ranks: RankGroup
    """Ranks over which the weights are sharded."""
    device: torch.device
    whole_bytes: int
    """Bytes needed to gather all weights that are not gathered yet."""
    replicated: bool
    """Whether other ranks hold the same shards."""


def sharded_weights(model: nn.Module) -> ShardedWeights | None:
    """Return the sharded weights, if all are sharded in the same way; otherwise None."""
    parts = idle_parts(model)
    shards = [(part, shard) for part in parts for shard in _shards(part, parts)]
    axes = {(shard.device_mesh, tuple(shard.placements)) for _, shard in shards}
    if len({(mesh, tuple(placement.is_shard() for placement in kinds)) for mesh, kinds in axes}) != 1:
        return None
    mesh, kinds = next(iter(axes))
    sharded_axes = [axis for axis, placement in enumerate(kinds) if placement.is_shard()]
    if len(sharded_axes) != 1:  # tensor parallel, which is refused with its reason
        return None
    group = mesh.get_group(sharded_axes[0])
    on_gpu = mesh.device_type == "cuda"  # where they are gathered: shards may wait on the host
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else shards[0][1].device
    return ShardedWeights(
        parts,
        RankGroup(group),
        device,
        sum(shard.numel() * (part.weight_dtype or shard.dtype).itemsize for part, shard in shards),
        mesh.size() > dist.get_world_size(group),
    )


def idle_parts(model: nn.Module) -> list[ShardedModule]:
    """Return the sharded modules of a model, outer modules first; raise during a pass."""
    parts = sharded_modules(model)
    if any(not part.idle for part in parts):
        raise UnsupportedModelError(
            "the model is in the middle of a forward or backward pass of FSDP, expected a call between them; measure "
            "between steps"
        )
    return parts


def own_modules(module: nn.Module, parts: Sequence[ShardedModule]) -> list[nn.Module]:
    """Return a sharded module and its submodules that belong to no other sharded module."""
    nested = {id(part.module) for part in parts}
    stack, modules = [module], []
    while stack:
        modules.append(stack.pop())
        stack += [child for child in modules[-1].children() if id(child) not in nested]
    return modules


def _shards(part: ShardedModule, parts: Sequence[ShardedModule]) -> list[Any]:
    """Return the sharded weights of a module, without nested sharded modules."""
    held = (parameter for inner in own_modules(part.module, parts) for parameter in parameter_table(inner).values())
    return list({id(parameter): parameter for parameter in held if hasattr(parameter, "placements")}.values())


def _replace_hooks(part: ShardedModule) -> None:
    """Replace hooks that gather, cast, and drop by hooks that only cast, if needed."""

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast((args, kwargs), part.input_dtype)

    def cast_outputs(_: nn.Module, args: Any, outputs: Any) -> Any:
        return cast(outputs, part.output_dtype)

    module = part.module
    before, after = forward_hooks(module)
    replace_hook(before, part.pre_forward, cast_inputs if part.input_dtype else None)
    replace_hook(after, part.post_forward, cast_outputs if part.output_dtype else None)


def replace_hook(table: dict[int, Any], hook: Callable[..., Any], new: Callable[..., Any] | None) -> int:
    """Replace or remove a hook; return its key."""
    for key, existing in list(table.items()):
        if existing == hook:
            if new is None:
                del table[key]
            else:
                table[key] = new
            return key
    raise UnsupportedModelError(
        f"torch {torch.__version__} hooks this sharded module in another way (several modules in one call of "
        "fully_shard, say), expected fully_shard(module) for each; gather the weights into a plain model"
    )


def cast(thing: Any, to: torch.dtype | None) -> Any:
    """Cast floating-point tensors to a dtype, like FSDP; None does nothing."""
    if to is None:
        return thing
    return map_nested(Tensor, lambda t: t.to(to) if t.is_floating_point() else t, thing)
