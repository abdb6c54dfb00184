"""Copies of a network: in another precision, or with another state."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from featlearn.errors import InputTypeError, InputValueError, UnsupportedModelError
from featlearn.network.checks import unwrapped
from featlearn.network.inputs import cast
from featlearn.torch_internals import COMPILED_PREFIX


class StoredResult(NamedTuple):
    """A tensor with a graph that a model keeps, and the leaf tensor that its copy was made from."""

    original: Tensor
    leaf: Tensor


def copied(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy with the same parameter names, in `dtype`; the original is only read."""
    return copied_with_results(model, dtype)[0]


def copied_with_results(model: nn.Module, dtype: torch.dtype | None) -> tuple[nn.Module, list[StoredResult]]:
    """Return a copy of a model, and the results of earlier passes that it keeps."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), _ResultCopying(dtype) as copying:
            twin = copy.deepcopy(model)
    except Exception as error:
        target = f"copied to {dtype}" if dtype is not None else "copied"
        raise UnsupportedModelError(
            f"the model cannot be {target}: {type(error).__name__}: {error}; expected a model that copy.deepcopy can "
            "copy: move what it cannot (locks, open files, generators) out of the model, or give it a __deepcopy__"
        ) from error
    for tensor in (*twin.parameters(), *twin.buffers()):
        tensor.data = cast(tensor.data, dtype)
    return twin, copying.results


class _ResultCopying(TorchFunctionMode):
    """Inside, `deepcopy` copies tensors with a graph and inference tensors, wherever an object holds them."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.results: list[StoredResult] = []
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the method of tensors that `deepcopy` calls; it refuses tensors with a graph."""
        if func is not Tensor.__deepcopy__ or (args[0].is_leaf and not args[0].is_inference()):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            twin = cast(tensor.detach().clone(), self._dtype)
            if tensor.requires_grad:  # not a leaf either: a model may write to it
                self.results.append(StoredResult(tensor, twin.requires_grad_()))
                twin = twin.clone()
            memo[id(tensor)] = twin
        return memo[id(tensor)]


class _Holder(nn.Module):
    """A copy of a wrapped model under the names it has in its wrapper."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        (inner,) = self.children()
        return inner(*args, **kwargs)


def refuse_shared_memory(earlier: Iterable[Any], tensors: Iterable[Any], name: str, other: str) -> None:
    """Refuse an earlier state that shares memory with the tensors of a model: it changes as the model trains."""
    now = {tensor.data_ptr() for tensor in tensors if isinstance(tensor, Tensor)} - {0}
    if any(isinstance(tensor, Tensor) and tensor.data_ptr() in now for tensor in earlier):
        raise InputValueError(
            f"{name} shares its memory with {other}: it has moved along with it; expected a copy from before "
            "training, {name: value.clone() for name, value in model.state_dict().items()}"
        )


def network_at(model: nn.Module, initial: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the model as it was at initialization."""
    if not isinstance(initial, Mapping):
        raise InputTypeError(f"initial is {type(initial).__name__}, expected the state_dict() at initialization")
    inner = unwrapped(model)
    refuse_shared_memory(initial.values(), inner.parameters(), "initial", "the model")
    twin = copied(inner, None)
    expected = set(inner.state_dict())
    # What is spread over ranks is gathered.
    state = {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in initial.items()}
    while state and set(state) != expected:  # names from inside a wrapper: module., _orig_mod.
        (prefix, *more) = {name.partition(".")[0] for name in state}
        if more or prefix not in ("module", COMPILED_PREFIX):
            break
        state = {name.partition(".")[2]: value for name, value in state.items()}
    try:
        twin.load_state_dict(state)
    except Exception as error:
        raise InputValueError(
            f"initial does not fit the model: {error}; expected its state_dict(), cloned before training"
        ) from error
    prefix = next((name for name, part in model.named_modules() if part is inner), "")
    for name in reversed(prefix.split(".") if prefix else []):
        twin = _Holder(name, twin)
    return twin
