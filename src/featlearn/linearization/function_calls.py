"""Calls of torch functions in a forward pass, by number: recorded, or with other results."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode

from featlearn.errors import UnsupportedModelError
from featlearn.network.inputs import tensors_in


class Call(NamedTuple):
    """One call of a torch function."""

    name: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    result: Any
    node: Any
    """`grad_fn` of the result when the call returned; a later op in place may change it."""

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [*tensors_in(self.arguments), *tensors_in(self.keywords)]


class RecordedCalls(TorchFunctionMode):
    """Inside, every call is recorded, and its tensors are held."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and record it."""
        result = func(*args, **(kwargs or {}))
        self.calls.append(Call(_name(func), tuple(args), kwargs or {}, result, getattr(result, "grad_fn", None)))
        return result

    def gated_nodes(self) -> set[Any]:
        """Return the nodes of calls that take a value which depends on parameters without a gradient.

        Such values are masks made of comparisons, indices of sorted entries, and detached tensors.
        """
        nodes: set[Any] = set()
        without_gradient: set[int] = set()
        for call in self.calls:
            tensors = call.tensors
            gated = any(id(tensor) in without_gradient for tensor in tensors)
            if gated and call.node is not None:
                nodes.add(call.node)
            if call.name.endswith("_like") or call.name.startswith("new_"):  # they take a shape and a type
                continue
            if gated or any(tensor.requires_grad for tensor in tensors):
                without_gradient.update(id(one) for one in tensors_in([call.result]) if not one.requires_grad)
        return nodes


Change = Callable[[Callable[..., Any], tuple[Any, ...], Any], Any]
"""Takes a function, its arguments, and its result; gives the result that takes its place."""


class ChangedCalls(TorchFunctionMode):
    """Inside, the results of some calls are changed. The names of all calls must be those of an earlier pass."""

    def __init__(self, names: Sequence[str], changes: Mapping[int, Change]) -> None:
        super().__init__()
        self._names, self._changes, self._number = names, changes, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and change its result."""
        number, self._number = self._number, self._number + 1
        if number >= len(self._names) or self._names[number] != _name(func):
            raise UnsupportedModelError(
                f"the model calls {_name(func)} as number {number} of its calls, expected the calls of an earlier pass"
            )
        result = func(*args, **(kwargs or {}))
        change = self._changes.get(number)
        return result if change is None else change(func, tuple(args), result)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))
