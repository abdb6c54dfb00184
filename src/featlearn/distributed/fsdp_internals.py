"""The only place that reads private names of `torch.distributed.fsdp.fully_shard` and of autograd's engine.

Those of `fully_shard` differ between versions.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

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


@contextmanager
def unnoted() -> Iterator[None]:
    """Ops inside are no part of the model: nobody notes or transforms them, and none has a graph."""
    with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch(), _disable_current_modes(), torch.no_grad():
        yield


def is_noted() -> bool:
    """Whether ops or calls of this thread are noted by anybody."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def in_backward() -> bool:
    """Whether a backward pass is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def after_backward(act: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(act)


_OWN_HOOK: Any = "featlearn"


def before_gradient(tensor: Tensor, act: Callable[[], None]) -> None:
    """Call a function when the gradient of a tensor is complete, before it goes on; only the first one counts.

    Without a handle: their number tells whether the model has put hooks on tensors, which may change gradients.
    """
    if tensor._backward_hooks is None:
        tensor._backward_hooks = OrderedDict()
        tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
    tensor._backward_hooks.setdefault(_OWN_HOOK, lambda _: act())
