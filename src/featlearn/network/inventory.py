"""The modules of a model and the tensors they hold, found in one walk."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn


class Inventory:
    """All modules of a model, its parameters and buffers, each once; a walk takes as long as many small ops."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        modules: dict[int, nn.Module] = {}
        stack = [model]
        while stack:
            part = stack.pop()
            if id(part) not in modules:
                modules[id(part)] = part
                stack += [child for child in reversed(part._modules.values()) if child is not None]
        self.modules = list(modules.values())
        found = [p for part in self.modules for p in part._parameters.values() if p is not None]
        self.parameters: list[Tensor] = _distinct(found)
        buffers = [b for part in self.modules for b in part._buffers.values() if b is not None]
        self.tensors = _distinct([*self.parameters, *buffers]) if buffers else self.parameters

    @cached_property
    def kind(self) -> tuple[tuple[torch.Size, torch.dtype, torch.device], ...]:
        """Shape, type and device of all tensors."""
        return tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in self.tensors])


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
