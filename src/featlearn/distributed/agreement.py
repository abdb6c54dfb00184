"""What must be the same on every rank, compared and not hoped for: arguments, inputs, weights, memory."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from featlearn.distributed.group import RankGroup
from featlearn.errors import InputValueError
from featlearn.network.fingerprint import fingerprint
from featlearn.network.inputs import tensors_in

SAME_DATA = "pass all samples on every rank: they are divided here, so a DistributedSampler must not do it before"


def fingerprints(tensors: Mapping[str, Any]) -> dict[str, tuple[object, ...]]:
    """Shape, type and fingerprint of every tensor; plain values as they are."""
    return {
        name: (tuple(value.shape), str(value.dtype), int(fingerprint(value))) if isinstance(value, Tensor) else (value,)
        for name, value in tensors.items()
    }


def expect_same_arguments(group: RankGroup, arguments: Mapping[str, object]) -> None:
    """Refuse a call whose arguments differ from rank to rank, on every rank."""
    said = group.gathered({name: str(value) for name, value in arguments.items()})
    for name, rank, theirs in _differences(said):
        raise InputValueError(
            f"{name} is {theirs} on rank {rank} and {said[0].get(name)} on rank 0, expected the same call on every "
            "rank of the group"
        )


def expect_same_call(group: RankGroup, arguments: Mapping[str, object], given: Mapping[str, Any]) -> None:
    """Refuse a call that differs from rank to rank in its arguments, or in the tensors that were given with it."""
    expect_same_arguments(group, arguments)
    expect_same_tensors(group, "the argument", {
        f"{name}{f'[{place}]' if place else ''}": tensor
        for name, value in given.items()
        for place, tensor in enumerate(_tensors(value))
    }, SAME_DATA)  # fmt: skip


def _tensors(given: Any) -> list[Tensor]:
    """The tensors in an argument, and the states of its random generators."""
    if isinstance(given, torch.Generator):
        return [given.get_state()]
    return tensors_in(given) if not hasattr(given, "generator") else _tensors(given.generator)


def expect_same_tensors(group: RankGroup, what: str, tensors: Mapping[str, Any], remedy: str) -> None:
    """Refuse tensors that differ from rank to rank, on every rank; says which."""
    if group.size == 1:
        return
    said = group.gathered(fingerprints(tensors))
    different = list(_differences(said))
    if different:
        name, rank, _ = different[0]
        more = len({name for name, _, _ in different}) - 1
        raise InputValueError(
            f"{what} {name}{f' (and {more} more)' if more else ''} of rank {rank} differs from that of rank 0, "
            f"expected the same on every rank; {remedy}"
        )


def expect_same_outputs(group: RankGroup, outputs: Tensor, precision: float) -> None:
    """Refuse a network that gives other outputs for the same samples on other ranks, on every rank; says on which.

    Its weights are the same, so that its code, a plain attribute or the readout differs. `precision`: the machine
    epsilon of its weights; equal networks on unequal hardware differ by some roundings.
    """
    said = group.gathered(outputs.detach().cpu())
    first = said[0]
    slack = max(precision, torch.finfo(first.dtype).eps) ** 0.5 * float(first.abs().max())
    odd = [
        str(rank)
        for rank, there in enumerate(said)
        if there.shape != first.shape or not bool(((there - first).abs() <= slack).all())
    ]
    if odd:
        raise InputValueError(
            f"the model or its readout gives other outputs on rank{'s' * (len(odd) > 1)} {', '.join(odd)} than on rank "
            "0, for the same samples and weights, expected the same network on every rank; compare the readouts, and "
            "attributes of the model that are neither weights nor buffers"
        )


def _differences(said: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, Any]]:
    """(name, rank, what it says) where a rank says something else than rank 0."""
    return [
        (name, rank, there.get(name))
        for name in dict.fromkeys(name for one in said for name in one)
        for rank, there in enumerate(said)
        if there.get(name) != said[0].get(name)
    ]


def smallest_budget(group: RankGroup, budget: int, device: torch.device, *, measured: bool) -> int:
    """The byte budget that every rank keeps to: the smallest of all.

    `measured`: it is a share of what was free, which ranks on one device of one machine share in turn.
    """
    home = (platform.node(), str(device))
    said = group.gathered((home, budget))
    homes = [where for where, _ in said]
    return min(int(size) // (homes.count(where) if measured else 1) for where, size in said)
