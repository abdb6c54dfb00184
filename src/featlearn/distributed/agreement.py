"""What must be the same on every rank, and is compared: arguments, inputs, weights, outputs, memory."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from featlearn.distributed.group import Expectation, RankGroup, digest
from featlearn.errors import InputValueError
from featlearn.network.fingerprint import fingerprint
from featlearn.network.inputs import tensors_in

SAME_DATA = "pass all samples on every rank: they are divided here, so a DistributedSampler must not do it before"


def same_arguments(arguments: Mapping[str, object]) -> Expectation:
    """Arguments of a call, as their text."""

    def refuse(said: list[dict[str, str]]) -> None:
        for name, rank, theirs in _differences(said):
            raise InputValueError(
                f"{name} is {theirs} on rank {rank} and {said[0].get(name)} on rank 0, expected the same call on every "
                "rank of the group"
            )

    return Expectation(lambda: {name: str(value) for name, value in arguments.items()}, refuse)


def same_call(arguments: Mapping[str, object], given: Mapping[str, Any]) -> tuple[Expectation, Expectation]:
    """Arguments of a call, and the tensors that were given with it."""
    tensors = {
        f"{name}{f'[{place}]' if place else ''}": tensor
        for name, value in given.items()
        for place, tensor in enumerate(_tensors(value))
    }
    return same_arguments(arguments), same_tensors("the argument", tensors, SAME_DATA)


def _tensors(given: Any) -> list[Tensor]:
    """The tensors in an argument, and the states of its random generators."""
    if isinstance(given, torch.Generator):
        return [given.get_state()]
    return tensors_in(given) if not hasattr(given, "generator") else _tensors(given.generator)


def same_tensors(what: str, tensors: Mapping[str, Any], remedy: str) -> Expectation:
    """Tensors, by shape, type and fingerprint, and plain values among them; the refusal says which differ."""

    def refuse(said: list[dict[str, Any]]) -> None:
        different = _differences(said)
        if different:
            name, rank, _ = different[0]
            more = len({name for name, _, _ in different}) - 1
            raise InputValueError(
                f"{what} {name}{f' (and {more} more)' if more else ''} of rank {rank} differs from that of rank 0, "
                f"expected the same on every rank; {remedy}"
            )

    return Expectation(lambda: _fingerprints(tensors), refuse)


def _fingerprints(tensors: Mapping[str, Any]) -> dict[str, tuple[object, ...]]:
    """Shape, type and fingerprint of every tensor; plain values as they are."""
    prints = [fingerprint(value) for value in tensors.values() if isinstance(value, Tensor)]
    found = iter(torch.stack([one.to(prints[0].device) for one in prints]).tolist() if prints else [])
    return {
        name: (tuple(value.shape), str(value.dtype), next(found)) if isinstance(value, Tensor) else (value,)
        for name, value in tensors.items()
    }


def same_outputs(outputs: Tensor, precision: float) -> Expectation:
    """Outputs of a network for the same samples; the refusal says on which ranks they are others.

    Its weights are the same, so that its code, a plain attribute or the readout differs. `precision`: the machine
    epsilon of its weights; equal networks on unequal hardware differ by some roundings.
    """

    def refuse(said: list[Tensor]) -> None:
        first = said[0]
        slack = max(precision, torch.finfo(first.dtype).eps) ** 0.5 * float(first.abs().max())
        odd = [
            str(rank)
            for rank, there in enumerate(said)
            if (there.shape, there.dtype) != (first.shape, first.dtype)
            or not bool(((there - first).abs() <= slack).all())
        ]
        if odd:
            raise InputValueError(
                f"the model or its readout gives other outputs on rank{'s' * (len(odd) > 1)} {', '.join(odd)} than on "
                "rank 0, for the same samples and weights, expected the same network on every rank; compare the "
                "readouts, and attributes of the model that are neither weights nor buffers"
            )

    return Expectation(lambda: outputs.detach().cpu(), refuse)


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
    said = group.numbers([digest((platform.node(), str(device))), min(budget, 2**62), int(measured)])
    homes = [where for where, _, _ in said]
    return min(size // (homes.count(where) if shared else 1) for where, size, shared in said)
