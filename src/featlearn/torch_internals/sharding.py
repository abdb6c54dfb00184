"""Private names of `torch.distributed`: what `fully_shard` keeps in a module, which no public function lists."""

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import nn

from featlearn.errors import UnsupportedModelError


class ShardedModule(NamedTuple):
    """What must be known of a module that `fully_shard` was applied to."""

    module: Any
    idle: bool
    """Whether no forward or backward pass is under way."""
    pre_forward: Callable[..., Any]
    """The hook that gathers weights and casts inputs."""
    post_forward: Callable[..., Any]
    """The hook that drops weights and casts outputs."""
    weight_dtype: torch.dtype | None
    """The type in which weights are gathered, None for their own."""
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    original: type
    """The class of the module before it was sharded."""


def sharded_modules(model: nn.Module) -> list[ShardedModule]:
    """All modules of a model that `fully_shard` was applied to, outer ones first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # else there are none
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [_read(part, kind) for part in model.modules() if isinstance(part, kind)]


STATE_KEY = "__composable_api_state_key"
"""How attributes begin under which a module holds its state of FSDP."""
STATE_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def is_own_hook(hook: Callable[..., Any]) -> bool:
    """Whether FSDP has put a hook on saving or loading, which shards the model that it was put on."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def _read(part: Any, kind: type) -> ShardedModule:
    try:
        state = part._get_fsdp_state()
        policy = state._mp_policy
        inputs = policy.param_dtype if policy.cast_forward_inputs else None
        return ShardedModule(
            part,
            state._training_state.name == "IDLE",
            state._pre_forward,
            state._post_forward,
            policy.param_dtype,
            inputs,
            policy.output_dtype,
            next(base for base in type(part).__bases__ if not issubclass(base, kind)),
        )
    except (AttributeError, StopIteration) as error:
        raise UnsupportedModelError(
            f"fully_shard of torch {torch.__version__} cannot be read ({type(error).__name__}: {error}), expected a "
            "version from 2.11 to 2.13; gather the weights into a plain model and measure that"
        ) from error


def collective_timeout(device: str) -> timedelta:
    """Return how long collectives of the default group wait on a device. The timeout can be set in public, not read."""
    backend: Any = torch.distributed.group.WORLD._get_backend(torch.device(device))  # type: ignore[union-attr]
    timeout: timedelta = backend.options._timeout
    return timeout


def default_store(prefix: str) -> Any:
    """Return a part of the default group's key-value store, which `init_process_group` takes and nothing gives back."""
    from torch.distributed import distributed_c10d

    return distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())
