"""What rank 0 has, on every rank of a group."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from featlearn.distributed.group import RankGroup
from featlearn.errors import InputValueError
from featlearn.torch_internals import buffer_table


def tensors_of_first(group: RankGroup, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of rank 0, bit for bit: its own there, copies on the device of the group on the others.

    What other ranks pass is not looked at.
    """
    first = group.rank == 0
    said = {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()} if first else None
    kinds = group.from_first(said)
    with group.together():
        sent = {
            name: (tensors[name].detach() if first else torch.empty(shape, dtype=dtype)).to(group.device).contiguous()
            for name, (shape, dtype) in kinds.items()
        }
    for one in sent.values():
        if one.numel():
            dist.broadcast(one.view(-1).view(torch.uint8), group=group.process_group, group_src=0)
    return dict(tensors) if first else sent


@contextmanager
def buffers_of_first(group: RankGroup, model: nn.Module) -> Iterator[None]:
    """The model has the buffers of rank 0 on every rank; afterwards each has its own tensors again, never written to.

    Running statistics of BatchNorm differ from rank to rank under DistributedDataParallel.
    """
    own = dict(model.named_buffers())
    found = tensors_of_first(group, own)
    with group.together():
        if [(name, one.shape, one.dtype) for name, one in own.items()] != [
            (name, one.shape, one.dtype) for name, one in found.items()
        ]:
            raise InputValueError("the buffers have other names, shapes or types than those of rank 0")
        instead = {id(one): found[name].to(one.device) for name, one in own.items()}
    places = [
        (buffer_table(part), name, buffer)
        for part in (model.modules() if group.rank else ())
        for name, buffer in buffer_table(part).items()
        if buffer is not None
    ]
    try:
        for table, name, buffer in places:
            table[name] = instead[id(buffer)]
        yield
    finally:
        for table, name, buffer in places:
            table[name] = buffer
