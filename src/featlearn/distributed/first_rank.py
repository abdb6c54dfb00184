"""Copy tensors and buffers of rank 0 to all ranks of a group."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from featlearn.distributed.group import RankGroup
from featlearn.errors import InputValueError
from featlearn.torch_internals import buffer_table


def tensors_of_first(group: RankGroup, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of rank 0, as exact copies on the group's device on other ranks.

    Tensors passed by other ranks are ignored.
    """
    first = group.rank == 0
    metadata = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} if first else None
    kinds = group.from_first(metadata)
    with group.together():
        sent = {
            name: (tensors[name].detach() if first else torch.empty(shape, dtype=dtype)).to(group.device).contiguous()
            for name, (shape, dtype) in kinds.items()
        }
    for tensor in sent.values():
        if tensor.numel():
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=group.process_group, group_src=0)
    return dict(tensors) if first else sent


@contextmanager
def buffers_of_first(group: RankGroup, model: nn.Module) -> Iterator[None]:
    """Replace the model's buffers by those of rank 0 on every rank, and restore the original buffers afterwards.

    Running statistics of BatchNorm differ from rank to rank under DistributedDataParallel.
    """
    original = dict(model.named_buffers())
    received = tensors_of_first(group, original)
    with group.together():
        if [(name, tensor.shape, tensor.dtype) for name, tensor in original.items()] != [
            (name, tensor.shape, tensor.dtype) for name, tensor in received.items()
        ]:
            raise InputValueError("the buffers have other names, shapes or types than those of rank 0")
        replacements = {id(tensor): received[name].to(tensor.device) for name, tensor in original.items()}
    entries = [
        (buffer_table(part), name, buffer)
        for part in (model.modules() if group.rank else ())
        for name, buffer in buffer_table(part).items()
        if buffer is not None
    ]
    try:
        for table, name, buffer in entries:
            table[name] = replacements[id(buffer)]
        yield
    finally:
        for table, name, buffer in entries:
            table[name] = buffer
