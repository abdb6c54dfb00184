"""Private names of torch, in one place. Each entry says which public function is missing."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.nn.modules import module as module_globals
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

# Tensors

weight_norm: Any = torch._weight_norm
"""The op behind `nn.utils.weight_norm`, which has no public name."""


map_nested: Any = tree_map_only
"""Apply a function to all objects of a type in registered containers. `torch.func` maps tensors in none."""


def version(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place, 0 in inference mode. No public counter exists."""
    return 0 if tensor.is_inference() else tensor._version


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others by one call. `Tensor.copy_` takes one at a time, each of which is a launch on a GPU."""
    torch._foreach_copy_(list(targets), list(sources))


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Return all numbers of some tensors side by side. `torch.cat` takes flat ones, each of which is a call."""
    flat: Tensor = torch._C._nn.flatten_dense_tensors(list(tensors))
    return flat


def add_quotients(
    tensors: Sequence[Tensor], values: Sequence[Tensor], divisors: Sequence[Tensor], factor: float
) -> None:
    """Add `factor * values / divisors` in place. `Tensor.addcdiv_` takes one tensor at a time."""
    torch._foreach_addcdiv_(list(tensors), list(values), list(divisors), value=factor)


def norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Return the norm of each tensor. `torch.linalg.vector_norm` takes one at a time."""
    return tuple(torch._foreach_norm(list(tensors), order, dtype=dtype))


def distance_gradient(gradient: Tensor, left: Tensor, right: Tensor, order: float, distances: Tensor) -> Tensor:
    """Return the gradient of `torch.cdist` at `left`. The public function has no backward pass that can be called."""
    result: Tensor = torch.ops.aten._cdist_backward(gradient, left, right, order, distances)
    return result


def wrapper_of(kind: type, shape: torch.Size, **form: Any) -> Any:
    """Return a tensor of a subclass that has no memory of its own. No public function makes one."""
    return Tensor._make_wrapper_subclass(kind, shape, **form)


# Autograd: what nodes keep, hooks, and the engine


SAVED = "_saved_"
"""How attributes begin under which an autograd node keeps its arguments. Nodes have no public list of them."""


def saved(node: Any, name: str) -> Any:
    """Return what an autograd node kept of its arguments, None if nothing."""
    return getattr(node, SAVED + name, None)


def output_forms(nodes: Sequence[Any]) -> list[tuple[tuple[torch.Size, torch.dtype], ...]]:
    """Return shape and dtype of each output of some nodes. Public nodes do not say what they give.

    Ragged outputs (nested tensors) count as empty, so that no axis of them is ever read.
    """
    return [
        tuple([(torch.Size((0,) if m.is_nested_tensor else m.shape), m.dtype) for m in node._input_metadata or ()])
        for node in nodes
    ]


def hooks_made() -> int:
    """Return how many hooks were put on tensors, nodes and modules so far. No public list of hooks exists."""
    return RemovableHandle.next_id


def hook_tables(tensor: Tensor) -> list[dict[int, Any]]:
    """Return the hooks on a tensor and its gradient. They can be added in public, and neither listed nor muted."""
    tables = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [table for table in tables if table]


def has_hook_table(tensor: Tensor) -> bool:
    """Return whether a tensor has, or once had, hooks."""
    return tensor._backward_hooks is not None


def drop_hook_table(tensor: Tensor) -> None:
    """Leave a tensor as one that never had hooks. Handles remove single hooks, and only their owner has them."""
    tensor._backward_hooks = None


def engine_gradients(
    outputs: Sequence[Any], inputs: Sequence[Any], cotangents: Sequence[Tensor], *, retain_graph: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of tensors or graph edges, None for inputs that are not used.

    `torch.autograd.grad` gives the same. To compare shapes it imports SymPy, which takes half of the first call.
    """
    run: Any = torch.autograd.graph._engine_run_backward
    found: tuple[Tensor | None, ...] = run(
        tuple(outputs),
        tuple(cotangents),
        retain_graph,
        False,  # no graph of the gradients
        tuple(inputs),
        True,  # inputs may be unused
        accumulate_grad=False,
    )
    return found


def batched_gradients(
    outputs: Sequence[Any], inputs: Sequence[Any], cotangents: Sequence[Tensor], *, retain_graph: bool
) -> list[Tensor | None]:
    """Return the gradients for each row of the cotangents.

    `torch.autograd.grad(is_grads_batched=True)` gives the same, and makes a hundred calls to look at its arguments.
    """
    level, size = torch._C._vmapmode_increment_nesting(), cotangents[0].shape[0]
    try:
        rows = [torch._add_batch_dim(cotangent, 0, level) for cotangent in cotangents]
        found = engine_gradients(outputs, inputs, rows, retain_graph=retain_graph)
        return [None if g is None else torch._remove_batch_dim(g, level, size, 0) for g in found]
    finally:
        torch._C._vmapmode_decrement_nesting()


def in_backward() -> bool:
    """Return whether a backward pass is running on this thread. No public function answers that."""
    return torch._C._current_graph_task_id() != -1


def after_backward(act: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that is running. Public hooks run at single tensors."""
    torch.autograd.Variable._execution_engine.queue_callback(act)


_OWN_HOOK: Any = "featlearn"


def before_gradient(tensor: Tensor, act: Callable[[], None]) -> None:
    """Call a function when the gradient of a tensor is complete, before it goes on; only the first one counts.

    `Tensor.register_hook` makes a handle, whose number would look like a hook of the model: `hooks_made`.
    """
    if tensor._backward_hooks is None:
        tensor._backward_hooks = OrderedDict()
        tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
    tensor._backward_hooks.setdefault(_OWN_HOOK, lambda _: act())


# Modules: their tables, and types of layers

PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"
"""Keys of a module's own tables in its `__dict__`."""
RESERVED = frozenset(nn.Module().__dict__) - {PARAMETERS, BUFFERS, CHILDREN, "_non_persistent_buffers_set"}
"""Keys of the flag and the tables of hooks. No public list of them exists."""
HOOKS = tuple(key for key in RESERVED if isinstance(nn.Module().__dict__[key], dict))
"""Keys of the tables of hooks."""
NormWithStatistics = _NormBase
AnyBatchNorm: TypeAlias = _BatchNorm
AnyConvolution: TypeAlias = _ConvNd
AnyDropout: TypeAlias = _DropoutNd
"""Base classes of layers, which have no public names; the first is that of all normalizations with statistics."""
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")

parameter_table: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter(PARAMETERS)
"""A module's own parameters. `named_parameters(recurse=False)` takes ten times as long and cannot write."""

buffer_table: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter(BUFFERS)
"""A module's own buffers. `named_buffers(recurse=False)` takes ten times as long and cannot write."""

child_table: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter(CHILDREN)
"""A module's own children. `named_children()` takes ten times as long and cannot write."""

forward_hooks: Callable[[nn.Module], tuple[dict[int, Any], ...]] = attrgetter("_forward_pre_hooks", "_forward_hooks")
"""The hooks of the forward pass, those before it first. They can be added in public, not listed."""


def add_pre_forward_hook(module: nn.Module, key: Any, hook: Callable[..., Any]) -> None:
    """Add a hook, called with the module, `args` and `kwargs`, under a key. Public hooks have numbered handles."""
    module._forward_pre_hooks[key] = hook
    module._forward_pre_hooks_with_kwargs[key] = True


def drop_pre_forward_hook(module: nn.Module, key: Any) -> None:
    """Remove the hook under a key, if there is one."""
    module._forward_pre_hooks.pop(key, None)
    module._forward_pre_hooks_with_kwargs.pop(key, None)


hooks_always_called: Callable[[nn.Module], dict[int, bool]] = attrgetter("_forward_hooks_always_called")
"""Which forward hooks also run when the forward pass raises; `always_call=True` has no way to read it."""


def global_backward_hooks() -> tuple[dict[int, Any], ...]:
    """Return the backward hooks of all modules of the process. They can be added in public, not muted."""
    return module_globals._global_backward_hooks, module_globals._global_backward_pre_hooks


def compiled_from(model: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile` was called with, None for other modules.

    There is no public name for the type; the compiler, which takes seconds to import, is not imported to ask.
    """
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None or not isinstance(model, eval_frame.OptimizedModule):
        return None
    inner = model._orig_mod
    assert isinstance(inner, nn.Module)
    return inner


COMPILED_PREFIX = "_orig_mod"
"""What a compiled module puts before the names in its `state_dict`; no public function takes it off."""


# Modes and settings: who sees or transforms ops, and in which precision they run

DispatchMode = TorchDispatchMode
"""Base class of modes that see every op below autograd. Public modes see calls of functions alone."""
FunctionOfFunctions = HigherOrderOperator
"""Type of `torch.cond`, `scan` and `while_loop`, which has no public name."""
SCRIPTED_CALLS: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
"""Types whose calls run scripted code, of which public modes see nothing."""
COMPILER = "torch._dynamo"
"""The module that `torch.compile` and `torch.cond` import when they are first called."""
NO_FUNCTION_OVERRIDES: Any = torch._C._disabled_torch_function_impl
"""What a subclass of Tensor sets to have calls of functions treated as those of its base class."""


def dispatching(mode: type[TorchDispatchMode], dispatch: Callable[..., Any]) -> None:
    """Give a mode its method. In the body of the class torch would wrap it by its compiler: seconds to import."""
    mode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


def is_fake(kind: type) -> bool:
    """Return whether tensors of a type hold no numbers. `FakeTensorMode` has no public test of its tensors."""
    return issubclass(kind, FakeTensor)


def makes_fake_tensors() -> bool:
    """Return whether tensors that are made now hold no numbers."""
    return torch._C._len_torch_dispatch_stack() > 0 and isinstance(torch.empty(0, device="cpu"), FakeTensor)


def in_transform() -> bool:
    """Return whether code runs inside of `torch.func`. No public function answers that."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_observed() -> bool:
    """Return whether any mode sees ops or calls of this thread. Modes can be entered in public, not counted."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


@contextmanager
def unobserved() -> Iterator[None]:
    """Run ops that no mode sees, that are not transformed, and that have no graph. Modes cannot be left in public."""
    with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch(), _disable_current_modes(), torch.no_grad():
        yield


def is_autocasting() -> bool:
    """Return whether autocast is on for any kind of device; `torch.is_autocast_enabled` takes one kind at a time."""
    return torch._C._is_any_autocast_enabled()


def compiler_loaded() -> bool:
    """Return whether torch's compiler has been imported."""
    return COMPILER in sys.modules


_PRODUCTS = (
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
    ("mkldnn", "matmul"),
)


def product_precisions() -> list[str]:
    """Return the precisions of float32 products. Reading the attributes of `torch.backends` takes as long as ops."""
    read = torch._C._get_fp32_precision_getter
    return [read(*product) for product in _PRODUCTS]


def ask_for_full_precision(before: list[str]) -> None:
    """Use no TF32 or bfloat16 in float32 products; set as `fp32_precision` alone, since two interfaces do not mix."""
    for product, precision in zip(_PRODUCTS, before, strict=True):
        if precision != "ieee":
            torch._C._set_fp32_precision_setter(*product, "ieee")


def restore_precisions(before: list[str]) -> None:
    """Set the precisions back, with those that are inherited from the general setting."""
    if product_precisions() == before:
        return
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    for product, precision in zip(_PRODUCTS, before, strict=True):
        if read(*product) != precision:
            # "none" inherits from the general setting, and reads as what it inherits.
            write(*product, "none")
            if read(*product) != precision:
                write(*product, precision)


@contextmanager
def without_fused_recurrent_layers() -> Iterator[None]:
    """Run recurrent layers as single ops. `torch.backends.cudnn.flags` would set precision, too."""
    mkldnn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)
        torch._C._set_cudnn_enabled(False)
        yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        torch._C._set_cudnn_enabled(cudnn)


def sequence_number(node: Any = None) -> int:
    """Return the number of a node in the order of the forward pass; without a node, that of the newest one."""
    autograd: Any = torch.autograd
    return int(autograd._get_sequence_nr()) - 1 if node is None else int(node._sequence_nr())
