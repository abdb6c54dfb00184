"""The modules of a model and the tensors they hold, found in one walk."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from featlearn.torch_internals import buffer_table, child_table, parameter_table


class Inventory:
    """All modules of a model, its parameters and buffers, each once; a walk takes as long as many small ops."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        found: dict[int, nn.Module] = {}
        named: dict[int, tuple[str, Tensor]] = {}
        stack = [("", model)]
        while stack:
            prefix, part = stack.pop()
            key = id(part)
            if key in found:
                continue
            found[key] = part
            if own := parameter_table(part):
                for name, parameter in own.items():
                    if parameter is not None:
                        named.setdefault(id(parameter), (prefix + name, parameter))
            if inner := child_table(part):
                children = reversed(inner.items())
                stack += [(f"{prefix}{name}.", child) for name, child in children if child is not None]
        self.modules = list(found.values())
        self.types = set(map(type, self.modules))
        """The classes of all modules."""
        self._named = list(named.values())
        self.parameters = [parameter for _, parameter in self._named]
        tables = [table for part in self.modules if (table := buffer_table(part))]
        buffers = [buffer for table in tables for buffer in table.values() if buffer is not None]
        self.tensors = _distinct([*self.parameters, *buffers]) if buffers else self.parameters

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """What `model.named_parameters()` gives, unless the model has one of its own."""
        if type(self.model).named_parameters is not nn.Module.named_parameters:
            return self.model.named_parameters()
        return self._named

    @cached_property
    def kind(self) -> tuple[tuple[torch.Size, torch.dtype, torch.device], ...]:
        """Shape, type and device of all tensors."""
        return tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in self.tensors])


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
