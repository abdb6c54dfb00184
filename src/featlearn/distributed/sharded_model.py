"""Models sharded by FSDP2 hold all of their weights while they are measured; afterwards everything is as before."""

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
    """Every rank enters: weights are gathered once, and what was sharded is sharded again; nothing for other models.

    Meanwhile the modules are plain ones: hooks of FSDP only cast, as its mixed precision asks for.
    """
    parts = idle_parts(model)
    before = [part for part in parts if _shards(part, parts)]
    tables = [table for part in parts for table in forward_hooks(part.module)]
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


class ShardedWeights(NamedTuple):
    """What ranks hold parts of, and would hold whole after a gathering."""

    parts: list[ShardedModule]
    ranks: RankGroup
    """Those that the weights are spread over."""
    device: torch.device
    whole_bytes: int
    """Bytes that gathering all weights would take, those that are whole already aside."""
    replicated: bool
    """Whether other ranks hold the same parts."""


def sharded_weights(model: nn.Module) -> ShardedWeights | None:
    """The weights that are spread over ranks now, all in the same way; None where there are no such."""
    parts = idle_parts(model)
    found = [(part, shard) for part in parts for shard in _shards(part, parts)]
    axes = {(shard.device_mesh, tuple(shard.placements)) for _, shard in found}
    if len({(mesh, tuple(one.is_shard() for one in kinds)) for mesh, kinds in axes}) != 1:
        return None
    mesh, kinds = next(iter(axes))
    spread = [axis for axis, one in enumerate(kinds) if one.is_shard()]
    if len(spread) != 1:  # tensor parallel, which is refused with its reason
        return None
    group = mesh.get_group(spread[0])
    on_gpu = mesh.device_type == "cuda"  # where they are gathered: shards may wait on the host
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else found[0][1].device
    return ShardedWeights(
        parts,
        RankGroup(group),
        device,
        sum(shard.numel() * (part.weight_dtype or shard.dtype).itemsize for part, shard in found),
        mesh.size() > dist.get_world_size(group),
    )


def idle_parts(model: nn.Module) -> list[ShardedModule]:
    """The sharded modules of a model, outer ones first; refused in the middle of a pass."""
    parts = sharded_modules(model)
    if any(not part.idle for part in parts):
        raise UnsupportedModelError(
            "the model is in the middle of a forward or backward pass of FSDP, expected a call between them; measure "
            "between steps"
        )
    return parts


def own_modules(module: nn.Module, parts: Sequence[ShardedModule]) -> list[nn.Module]:
    """A sharded module and all inside of it that belong to no other sharded one."""
    nested = {id(part.module) for part in parts}
    stack, own = [module], []
    while stack:
        own.append(stack.pop())
        stack += [child for child in own[-1].children() if id(child) not in nested]
    return own


def _shards(part: ShardedModule, parts: Sequence[ShardedModule]) -> list[Any]:
    """The weights of a module itself that are spread over ranks now."""
    held = (parameter for inner in own_modules(part.module, parts) for parameter in parameter_table(inner).values())
    return list({id(parameter): parameter for parameter in held if hasattr(parameter, "placements")}.values())


def _replace_hooks(part: ShardedModule) -> None:
    """Casts in the place of hooks that gather, cast and drop; nothing where there is nothing to cast."""

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast((args, kwargs), part.input_dtype)

    def cast_outputs(_: nn.Module, args: Any, outputs: Any) -> Any:
        return cast(outputs, part.output_dtype)

    module = part.module
    before, after = forward_hooks(module)
    replace_hook(before, part.pre_forward, cast_inputs if part.input_dtype else None)
    replace_hook(after, part.post_forward, cast_outputs if part.output_dtype else None)


def replace_hook(table: dict[int, Any], hook: Callable[..., Any], new: Callable[..., Any] | None) -> int:
    """Put a hook in the place of another one, or nothing; its key."""
    for key, found in list(table.items()):
        if found == hook:
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
    """Floating point tensors in another type, as FSDP casts them; None leaves all as it is."""
    if to is None:
        return thing
    return map_nested(Tensor, lambda t: t.to(to) if t.is_floating_point() else t, thing)
